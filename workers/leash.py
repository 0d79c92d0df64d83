"""Imported first in the fork server: it ends with the thread that started it, and by no signal meant for that.

Linux kills it with its parent; by itself it would notice only after its imports, which take seconds, that the process
it serves is gone. In a session of its own neither it nor a worker hears what a terminal, `timeout` or `kill` says to
the whole process group: the process they serve does, and writes a checkpoint before it ends them.
"""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1

ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
os.setsid()

"""Imported first in the fork server: Linux ends it with the thread that started it.

By itself it would notice only after its imports, which take seconds, that the process it serves is gone.
"""

from __future__ import annotations

import ctypes
import signal

PR_SET_PDEATHSIG = 1

ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

"""Imported first in the worker processes of a local cluster, and in the server they are forked from.

Nothing imported here may start a thread or touch a GPU: neither survives a fork.
"""

from __future__ import annotations

import signal
from importlib import import_module

# A Ctrl-C reaches the whole process group. Workers live until the driver, which writes a checkpoint first, ends them.
signal.signal(signal.SIGINT, signal.SIG_IGN)

for module in ("peft", "digenrl.models.sd3", "workers.calls", "workers.presence"):
    import_module(module)

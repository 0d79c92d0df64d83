"""Scheduling: which unit of work runs on which worker, as a pure state machine.

scheduler   Scheduler: commands = handle(event, now); its docstring is the map of the machine
units       the pieces of work
messages    events in, commands out
shape       how a run is cut into units
policies    layouts
scopes      the contract of the advantage function
simulate    runs a Scheduler on a virtual clock
timeline    who ran what when, from a log of events
"""

from digenrl.scheduling.policies import Colocated, Digenrl, Disaggregated, Layout
from digenrl.scheduling.progress import Progress
from digenrl.scheduling.scheduler import Scheduler
from digenrl.scheduling.scopes import AdvantageFn, StdScope, Verdict
from digenrl.scheduling.shape import RunShape

__all__ = [
    "AdvantageFn",
    "Colocated",
    "Digenrl",
    "Disaggregated",
    "Layout",
    "Progress",
    "RunShape",
    "Scheduler",
    "StdScope",
    "Verdict",
]

"""Incarnations: which worker processes exist, and who is gone.

Every worker gets a uuid, its incarnation, and resources named after it: one device slot and one cpu slot. A unit is
pinned by the slot's name and never by the worker's address, so a unit of a dead worker waits until the engine drops
it: Dask cannot run it again behind the scheduler's back on the empty process that the nanny starts instead.

Arrivals and departures reach the engine as Dask events on one topic, within milliseconds:

    {"op": "joined", "card"}                     a worker can take units
    {"op": "left", "address", "silent"}          the scheduler gave a worker up; silent: it had stopped answering
    {"op": "exited", "address", "exit_code"}     a nanny saw its worker process end

The three plugins stay with the cluster and serve every later run on it.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import uuid
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any
from weakref import WeakKeyDictionary

from distributed import Nanny, NannyPlugin, Scheduler, SchedulerPlugin, Status, Worker, WorkerPlugin

from workers import process

TOPIC = "digenrl-presence"
_INCARNATIONS: WeakKeyDictionary[Worker, str] = WeakKeyDictionary()

#: Packages whose versions must agree between the run's process and its workers.
PACKAGES = ("digenrl", "torch", "dask", "distributed", "diffusers", "peft")


@dataclass(frozen=True)
class WorkerCard:
    """Who a worker is.

    Attributes:
        incarnation: uuid of this process.
        address: its Dask address.
        name: name for people, stable over restarts (a local cluster numbers its workers).
        host: host name.
        pid: process id on that host.
    """

    incarnation: str
    address: str
    name: str
    host: str
    pid: int


@dataclass(frozen=True)
class Environment:
    """What a process runs on.

    Attributes:
        python: "major.minor".
        versions: installed versions of PACKAGES.
    """

    python: str
    versions: dict[str, str]


def environment_here() -> Environment:
    """That of this process."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Environment(python, {package: version(package) for package in PACKAGES})


def incarnation_of(worker: Worker) -> str:
    """The uuid of this worker; made on first use."""
    return _INCARNATIONS.setdefault(worker, uuid.uuid4().hex[:12])


def slots(incarnation: str) -> dict[str, str]:
    """Resource name of each lane."""
    return {"device": f"slot-{incarnation}", "cpu": f"cpu-{incarnation}"}


def card(dask_worker: Worker) -> WorkerCard:
    """Describe the worker this runs on (through `Client.run`)."""
    return WorkerCard(
        incarnation=incarnation_of(dask_worker),
        address=dask_worker.address,
        name=str(dask_worker.name),
        host=platform.node(),
        pid=os.getpid(),
    )


class Presence(WorkerPlugin):
    """Gives a worker its incarnation, slots and the handler that peers fetch from."""

    name = "digenrl-presence"
    idempotent = True

    async def setup(self, worker: Worker) -> None:
        """Announce the worker once it can take units."""
        incarnation = incarnation_of(worker)
        # A class of workers may have its own.
        worker.handlers.setdefault("digenrl_fetch", process.fetch_handler(incarnation))
        await worker.set_resources(**dict.fromkeys(slots(incarnation).values(), 1))
        worker.log_event(TOPIC, {"op": "joined", "card": asdict(card(worker))})


class Departures(SchedulerPlugin):
    """Tells the engine about workers that are gone."""

    name = "digenrl-departures"
    idempotent = True

    def start(self, scheduler: Scheduler) -> None:
        """Begin with nobody silent."""
        self._silent: set[str] = set()

    def log_event(self, topic: str, msg: Any) -> None:
        """The scheduler notes why it is about to give workers up; they end in several ways."""
        if topic == "scheduler" and isinstance(msg, dict) and msg.get("action") == "worker-ttl-timed-out":
            self._silent.update(msg["workers"])

    def remove_worker(self, scheduler: Scheduler, worker: str, *, stimulus_id: str, **kwargs: Any) -> None:
        """Called by the scheduler as soon as it gives a worker up."""
        scheduler.log_event(TOPIC, {"op": "left", "address": worker, "silent": worker in self._silent})
        self._silent.discard(worker)


class Exits(NannyPlugin):
    """Tells the engine how worker processes ended, where a nanny watches them."""

    name = "digenrl-exits"
    idempotent = True

    def setup(self, nanny: Nanny) -> None:
        """Listen in on the nanny's own reaction to the end of its process."""
        react = nanny._on_worker_exit

        async def tell(exit_code: int) -> None:
            if nanny.status == Status.running:  # otherwise it was meant to end
                message = {"op": "exited", "address": nanny.worker_address, "exit_code": exit_code}
                with contextlib.suppress(OSError):
                    await nanny.scheduler.log_event(topic=TOPIC, msg=message)
            await react(exit_code)

        nanny._on_worker_exit = tell

"""Which worker holds which adapter.

Whoever rolls out needs those of the versions in use, whoever trains also the committed one.
"""

from __future__ import annotations

from digenrl.scheduling.fleet import Worker
from digenrl.scheduling.messages import AdapterRef, Install
from digenrl.scheduling.state import State


class Adapters:
    """Compares what each worker holds with what it needs, and issues the difference.

    One installation per worker and adapter is under way at a time, so an answer always belongs to the last command.
    """

    def __init__(self, state: State) -> None:
        self._state = state

    @property
    def under_way(self) -> list[Install]:
        """Installations without an answer."""
        return list(self._state.installing.values())

    def provide(self, worker: Worker) -> None:
        """Install what the worker lacks."""
        ledger = self._state.ledger
        for theta in self._needed(worker):
            is_lead = worker.name == self._state.lead and theta == self._state.theta
            held = ledger.optimizers(theta) if is_lead else ledger.adapters(theta)
            if worker.name in held or (worker.name, theta) in self._state.installing:
                continue
            if _installing(theta, worker.name) in self._state.postponed:
                continue
            command = Install(theta, worker.name, self._source(theta, worker.name, is_lead), is_lead)
            self._state.installing[worker.name, theta] = command
            self._state.emit(command)

    def provide_all(self) -> None:
        """Install what anybody lacks."""
        for worker in self._state.fleet.workers.values():
            self.provide(worker)

    def installed(self, worker: Worker, theta: int) -> None:
        """An installation was acknowledged."""
        command = self._state.installing.pop((worker.name, theta), None)
        if theta not in self._in_use():
            self._state.drop(AdapterRef(theta), worker.name)
            return
        self._state.succeeded(_installing(theta, worker.name))
        with_optimizer = command is not None and command.with_optimizer
        self._state.ledger.install(theta, worker.name, with_optimizer=with_optimizer)
        self.provide(worker)
        self._state.wake(worker.name)

    def failed(self, worker: Worker, theta: int, reason: str) -> None:
        """An installation did not arrive: it will be tried again, from elsewhere if its source is gone."""
        command = self._state.installing.pop((worker.name, theta), None)
        if command is None:
            return
        if command.source is None or self._state.fleet.alive(command.source):
            self._state.postpone(_installing(theta, worker.name), worker.name, reason)
        self.provide(worker)
        # Others may have left units to this worker.
        self._state.wake_all()

    def lost(self, name: str) -> None:
        """A worker is gone; nothing will be answered for it. What it was sending to others is answered by them."""
        installing = self._state.installing
        self._state.installing = {key: command for key, command in installing.items() if key[0] != name}

    def retire(self) -> None:
        """Drop all adapters that nobody can need any more."""
        in_use = self._in_use()
        for theta, worker in self._state.ledger.retire(in_use):
            self._state.drop(AdapterRef(theta), worker)
        installing = self._state.installing
        self._state.installing = {key: command for key, command in installing.items() if key[1] in in_use}

    def _in_use(self) -> set[int]:
        state = self._state
        in_use = state.version_thetas | {state.theta}
        # From the optimiser step until it is committed the lead holds one more.
        return in_use | {state.theta + 1} if state.step.phase == "commit" else in_use

    def _needed(self, worker: Worker) -> list[int]:
        if worker.draining:
            return []
        if worker.trains:
            return sorted(self._state.version_thetas | {self._state.theta})
        return sorted(self._state.version_thetas) if "rollout" in worker.capabilities else []

    def _source(self, theta: int, target: str, with_optimizer: bool) -> str | None:
        """The lead if it can, else another worker that stays, else the driver, else a worker that is leaving."""
        ledger, workers = self._state.ledger, self._state.fleet.workers
        holders = ledger.optimizers(theta) if with_optimizer else ledger.adapters(theta)
        lead = self._state.lead
        if lead is not None and lead != target and lead in holders and not workers[lead].draining:
            return lead
        leaving = None
        for name in holders:
            if name == target:
                continue
            if not workers[name].draining:
                return name
            leaving = leaving or name
        if theta in ledger.driver:
            return None
        assert leaving is not None, f"nobody holds theta {theta}"
        return leaving


def _installing(theta: int, worker: str) -> str:
    return f"installing theta {theta} on {worker}"

"""Where everything lives that can be lost: adapters, optimiser states, trajectories, gradient contributions.

Pure data. It changes only when somebody reported that something arrived, was made or is gone, and it asserts what must
never happen: a gradient counted twice, a (sample, step) pair with two fates.

    Ledger    what lives where
    Account   what became of each (sample, step) pair of one iteration
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from digenrl.identity import MicroBatchId, SampleId
from digenrl.scheduling.units import TrainUnit

Pair = tuple[SampleId, int]


@dataclass(frozen=True, slots=True)
class Contribution:
    """The gradient of one train unit, in some worker's accumulator.

    Attributes:
        pairs: (sample, step) pairs that are in it.
        excluded: pairs of the unit that the worker left out, with the reason.
    """

    pairs: frozenset[Pair]
    excluded: dict[Pair, str]


@dataclass(frozen=True, slots=True)
class Entry:
    """What one optimiser step took in."""

    trained: int
    excluded: dict[Pair, str]
    skipped: bool


class Account:
    """Each (sample, trained step) pair of an iteration ends here once: in an update, or excluded with a reason."""

    def __init__(self, total: int) -> None:
        """`total`: pairs of the iteration."""
        self._total = total
        self._left_out: dict[Pair, str] = {}
        self._entries: dict[int, Entry] = {}

    def exclude(self, pairs: Iterable[Pair], reason: str) -> None:
        """Record pairs that no train unit will contain."""
        for pair in pairs:
            assert pair not in self._left_out, f"{pair} is excluded twice: {self._left_out[pair]}; {reason}"
            self._left_out[pair] = reason

    def enter(self, theta: int, contributions: Iterable[Contribution], *, skipped: bool) -> None:
        """Record what is in the committed step that made `theta`. A skipped step trained on nothing."""
        trained = 0
        excluded: dict[Pair, str] = {}
        for contribution in contributions:
            excluded |= contribution.excluded
            if skipped:
                excluded |= dict.fromkeys(contribution.pairs, f"the optimiser step of theta {theta} was skipped")
            else:
                trained += len(contribution.pairs)
        self._entries[theta] = Entry(trained, excluded, skipped)

    def take_back(self, theta: int) -> None:
        """Steps after `theta` are undone."""
        self._entries = {t: entry for t, entry in self._entries.items() if t <= theta}

    def close(self) -> tuple[int, dict[Pair, str], int]:
        """Assert that every pair is accounted for.

        Returns:
            Number of trained pairs; excluded pairs with the reason; number of skipped steps.
        """
        entries = self._entries.values()
        trained = sum(entry.trained for entry in entries)
        excluded = dict(self._left_out)
        for entry in entries:
            excluded |= entry.excluded
        counted = trained + len(self._left_out) + sum(len(entry.excluded) for entry in entries)
        assert counted == trained + len(excluded) == self._total, (
            f"{counted} of {self._total} (sample, step) pairs are accounted for, {trained + len(excluded)} distinct"
        )
        return trained, excluded, sum(entry.skipped for entry in entries)


class Ledger:
    """What lives where. Workers are named; the driver's own durable copies are kept apart.

    Attributes:
        driver: thetas whose adapter and optimiser state the driver has.
    """

    def __init__(self, theta: int) -> None:
        """A run starts from `theta`, which the driver has."""
        self.driver = {theta}
        self._adapters: dict[int, dict[str, None]] = {}
        self._optimizers: dict[int, dict[str, None]] = {}
        self._trajectories: dict[MicroBatchId, dict[str, None]] = {}
        self._accumulators: dict[str, dict[TrainUnit, Contribution]] = {}
        self._contributor: dict[TrainUnit, str] = {}

    # --- adapters and optimiser states ---

    def install(self, theta: int, worker: str, *, with_optimizer: bool) -> None:
        """The worker holds adapter `theta`, and the optimiser state that belongs to it."""
        self._adapters.setdefault(theta, {})[worker] = None
        if with_optimizer:
            self._optimizers.setdefault(theta, {})[worker] = None

    def adapters(self, theta: int) -> Collection[str]:
        """Workers that hold the adapter, longest first."""
        return self._adapters.get(theta, {})

    def optimizers(self, theta: int) -> Collection[str]:
        """Workers that hold the adapter with its optimiser state."""
        return self._optimizers.get(theta, {})

    def retire(self, needed: Collection[int]) -> list[tuple[int, str]]:
        """Forget all adapters except the needed ones. Returns (theta, worker) of each copy to drop."""
        dropped = []
        for theta in sorted(self._adapters.keys() - set(needed)):
            dropped += [(theta, worker) for worker in self._adapters.pop(theta)]
            self._optimizers.pop(theta, None)
        return dropped

    # --- trajectories ---

    def keep(self, micro_batch: MicroBatchId, worker: str) -> None:
        """The worker holds the finished trajectory."""
        self._trajectories.setdefault(micro_batch, {})[worker] = None

    def holders(self, micro_batch: MicroBatchId) -> Collection[str]:
        """Workers that hold the finished trajectory."""
        return self._trajectories.get(micro_batch, ())

    def misplace(self, micro_batch: MicroBatchId, worker: str) -> None:
        """The worker turned out not to hold the trajectory."""
        self._trajectories.get(micro_batch, {}).pop(worker, None)

    def release(self, micro_batch: MicroBatchId) -> list[str]:
        """Nobody needs the trajectory. Returns who is to drop it."""
        return list(self._trajectories.pop(micro_batch, ()))

    # --- contributions to the optimiser step in progress ---

    def contribute(self, unit: TrainUnit, worker: str, contribution: Contribution) -> None:
        """The worker's accumulator now holds the unit's gradient."""
        assert unit not in self._contributor, f"{unit.label} is contributed by {self._contributor[unit]} and {worker}"
        self._contributor[unit] = worker
        self._accumulators.setdefault(worker, {})[unit] = contribution

    def void(self, unit: TrainUnit) -> None:
        """None of the unit's samples takes part after all. Its accumulator still has it, as nothing."""
        worker = self._contributor.get(unit)
        if worker is not None:
            self._accumulators[worker][unit] = Contribution(frozenset(), {})

    def contributors(self) -> list[str]:
        """Workers whose own units are counted, whether they are still there or not."""
        return list(self._accumulators)

    def contributors_beside(self, worker: str) -> int:
        """How many workers other than this one are contributors."""
        return len(self._accumulators) - (worker in self._accumulators)

    def contributed(self, worker: str) -> Collection[TrainUnit]:
        """Units that the worker itself computed."""
        return self._accumulators.get(worker, ())

    def disown(self, worker: str) -> list[TrainUnit]:
        """The worker's contributions no longer count. Returns their units."""
        units = list(self._accumulators.pop(worker, ()))
        for unit in units:
            del self._contributor[unit]
        return units

    def settle(self) -> dict[str, dict[TrainUnit, Contribution]]:
        """The step is committed: returns what entered it, by worker, and starts afresh."""
        settled, self._accumulators, self._contributor = self._accumulators, {}, {}
        return settled

    # --- loss ---

    def forget(self, worker: str) -> None:
        """The worker is gone, and all it held but its contributions: another accumulator may contain them."""
        for held in (self._adapters, self._optimizers, self._trajectories):
            for holders in held.values():
                holders.pop(worker, None)

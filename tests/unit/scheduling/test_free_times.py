"""Units that others would end first, counted by rank, are those that are counted worker by worker."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from digenrl.scheduling.fleet import Worker
from digenrl.scheduling.free_times import FreeTimes
from digenrl.scheduling.policies import Role

ROLES: tuple[frozenset[Role], ...] = (frozenset({"rollout"}), frozenset({"train"}), frozenset({"rollout", "assist"}))
#: Multiples of a quarter are exact, so that ties are ties.
QUARTERS = st.integers(0, 40).map(lambda n: n / 4)


@dataclass(frozen=True)
class Change:
    """A worker is put there, moved or taken away."""

    name: str
    kind: str
    roles: frozenset[Role]
    until: float
    leaves: bool


CHANGES = st.builds(
    Change,
    st.sampled_from("abcdefgh"),
    st.sampled_from(("fast", "slow")),
    st.sampled_from(ROLES),
    QUARTERS,
    st.booleans(),
)


def counted(workers: list[Worker], end: float, now: float, seconds: dict[str, float]) -> int:
    """One worker after the other."""
    count = 0
    for worker in workers:
        each = seconds[worker.kind]
        count += max(0, math.ceil((end - max(now, worker.until)) / each - 1e-9) - 1)
    return count


@given(
    st.lists(CHANGES, max_size=25),
    QUARTERS,
    QUARTERS,
    st.fixed_dictionaries({"fast": QUARTERS.map(lambda s: s + 0.25), "slow": QUARTERS.map(lambda s: s + 0.5)}),
    st.sets(st.sampled_from("abcdefgh")),
    st.integers(0, 30),
)
def test_ranks_count_like_workers(
    changes: list[Change], now: float, ahead: float, seconds: dict[str, float], without: set[str], most: int
) -> None:
    times, workers = FreeTimes(), dict[str, Worker]()
    for order, change in enumerate(changes):
        if change.leaves:
            workers.pop(change.name, None)
            times.forget(change.name)
            continue
        worker = workers.setdefault(change.name, Worker(change.name, change.kind, frozenset({"rollout"}), order))
        worker.roles, worker.until = change.roles, change.until
        times.note(worker)

    def rolls(worker: Worker) -> bool:
        return "rollout" in worker.roles

    absent = [worker for name, worker in workers.items() if name in without]
    found = times.ended_before(now + ahead, now, seconds.__getitem__, rolls, absent, most)
    there = [worker for name, worker in workers.items() if name not in without and rolls(worker)]
    assert found == min(most, counted(there, now + ahead, now, seconds))

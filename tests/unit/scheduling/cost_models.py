"""What the tests of costs and plans share: a small run and a profile with round numbers."""

from __future__ import annotations

from schedules import shape

from digenrl.identity import MicroBatchId
from digenrl.scheduling.costs import CostModel

MB = MicroBatchId("train", 0, 0)

#: 8 groups of 8 in micro-batches of 2: 32 micro-batches; 10 steps, 4 of them trained.
RUN = {
    "groups": 8,
    "group_size": 8,
    "micro_batch": 2,
    "num_steps": 10,
    "trained_steps": lambda iteration: (0, 1, 2, 3),
    "timestep_batch": 4,
}

FAST = {
    "rollout_step_s": 0.1,
    "decode_s": 0.1,
    "train_s": {1: 0.4, 2: 0.6, 4: 1.0},
    "score_s": 0.2,
    "update_s": 0.1,
    "switch_s": 0.05,
    "install_s": 0.1,
    "transfer_s": 0.02,
    "gather_s": 0.3,
    "gap_s": 0.005,
}


def model(profile: dict[str, dict[str, object]] | None = None, **changes: object) -> CostModel:
    """A cost model of RUN with changes, by default of one kind `fast` and one `slow` of half its speed."""
    return CostModel.from_profile(shape(**RUN | changes), profile or {"fast": FAST, "slow": {"rollout_step_s": 0.2}})

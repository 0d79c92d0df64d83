"""The table of techniques on the virtual clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from digenrl.scheduling.ablation import FLEETS, POLICIES, Fleet, ablation
from digenrl.scheduling.bound import Pool
from digenrl.scheduling.workloads import Workload, workload

FLEET = Fleet("4-mixed", (Pool("rate-1.0", 2), Pool("rate-0.6", 1), Pool("rate-0.35", 1)))


def small(name: str) -> Workload:
    """A workload with four small groups."""
    whole = workload(name)
    return replace(whole, run=replace(whole.run, groups=4, group_size=8))


def test_every_policy_has_a_row_in_order_and_ratios_belong_together():
    rows = ablation(small("qwen-image-20b"), FLEET, 0.005)
    assert [row.policy for row in rows] == [policy.name for policy in POLICIES]
    by = {row.policy: row for row in rows}
    for row in rows:
        assert (row.workload, row.fleet, row.clock) == ("qwen-image-20b", "4-mixed", "virtual")
        assert row.ratio_colocated == pytest.approx(row.samples_per_s / by["colocated"].samples_per_s)
        assert row.ratio_published == pytest.approx(row.samples_per_s / by["colocated-published"].samples_per_s)
        assert row.fraction_of_bound / row.samples_per_s == pytest.approx(
            rows[0].fraction_of_bound / rows[0].samples_per_s
        )
        assert 0 < row.utilisation <= 1 and row.because
        assert row.policy == "+TCSS" or (row.stale_share == 0 and row.fraction_of_bound <= 1 + 1e-9)
    assert by["+TAG"].samples_per_s > by["+TSP"].samples_per_s
    assert by["colocated"].because.startswith("no item")


def test_streaming_has_no_row_where_the_deviation_is_over_the_iteration():
    chosen = [policy for policy in POLICIES if policy.name in ("+GAP", "streaming+TAG")]
    rows = ablation(small("flux.1-12b"), FLEET, 0.0, policies=chosen)
    assert [row.policy for row in rows] == ["+GAP"]


def test_fleets_have_the_size_in_their_name():
    assert [(fleet.workers, len(fleet.pools)) for fleet in FLEETS.values()] == [(16, 1), (16, 3), (32, 1), (32, 3)]

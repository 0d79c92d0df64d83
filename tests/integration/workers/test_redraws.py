"""on_failed=redraw on real workers gives, bit for bit, the samples and weights of the plain loop."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from digenrl.rewards.base import Failed
from runs import Ground, assert_as_expected, expected, small

REDRAW = ("rewards.0.name=python:picky:picky", "gates.max_failed_share=1", "iterations=2", "evaluation.every=0")


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    found = Ground(2)
    yield found
    found.close()


@pytest.mark.parametrize(
    "schedule", [("schedule.layout=colocated",), ("schedule.layout=digenrl", "schedule.micro_batch=2")]
)
def test_failed_samples_are_drawn_again_as_in_the_plain_loop(ground: Ground, schedule: tuple[str, ...]) -> None:
    config = small(*REDRAW, "gates.on_failed=redraw", "gates.max_redraws=3", *schedule)
    outcome = ground.run(config)
    assert_as_expected(outcome, config)
    for report in outcome.reports:
        places = [(sample.group, sample.generation) for sample in report.scores]
        assert (
            len(places)
            == len(set(places))
            == config.algorithm.prompts_per_iteration * config.algorithm.samples_per_prompt
        )
        assert any(sample.draw for sample in report.scores)
        # What failed once may fail at every draw, but nothing counts as failed that had draws left.
        assert all(s.draw == 3 for s, score in report.scores.items() if isinstance(score, Failed))


def test_without_it_they_are_left_out(ground: Ground) -> None:
    config = small(*REDRAW, "schedule.layout=colocated")
    outcome = ground.run(config)
    assert_as_expected(outcome, config)
    failed = [score for report in outcome.reports for score in report.scores.values() if isinstance(score, Failed)]
    assert failed and all("picky returned None" in score.reason for score in failed)
    assert expected(config) != expected(small(*REDRAW, "gates.on_failed=redraw", "schedule.layout=colocated"))

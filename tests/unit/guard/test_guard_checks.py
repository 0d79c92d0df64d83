"""Each check of the guard, provoked alone: it warns, then stops the run, and names itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from sightings import BASE, SOUND, config, run, sighting

from digenrl.guard.pictures import PictureStatistics
from digenrl.guard.watch import Guard


def levels(guard: Guard, check: str) -> list[str]:
    return [v.findings[check].level if check in v.findings else "-" for v in guard.verdicts.values()]


def test_a_sound_run_is_ok() -> None:
    guard = Guard(config())
    verdicts = run(guard, *(sighting(v, reward=0.5 + v / 100, gold=0.5 + v / 200) for v in range(0, 40, 4)))
    assert {v.level for v in verdicts} == {"ok"} and [v.good for v in verdicts] == list(range(0, 40, 4))
    assert set(verdicts[-1].findings) == {
        *("divergence", "dark", "saturation", "edges", "high_frequency", "grid", "diversity"),
        *("zero_variance", "failed", "kl", "logp_gap", "grad_norm"),
    }
    assert verdicts[-1].reason is None and verdicts[-1].gold["judge"] == pytest.approx(0.68, abs=0.15)


PICTURES = {
    "dark": replace(BASE, dark=0.8),
    "saturation": replace(BASE, saturation=0.8),
    "edges": replace(BASE, edges=0.005),
    "high_frequency": replace(BASE, high_frequency=0.001),
    "grid": replace(BASE, grid=0.5),
}


@pytest.mark.parametrize("check", PICTURES)
def test_pictures_that_lost_what_pictures_have(check: str) -> None:
    guard = Guard(config())
    verdicts = run(guard, sighting(0), sighting(4), *(sighting(v, pictures=PICTURES[check]) for v in (8, 12)))
    assert levels(guard, check) == ["-", "ok", "warn", "stop"]
    assert [f.level for name, f in verdicts[-1].findings.items() if name != check].count("ok") == 11
    assert verdicts[-1].good == 4 and f"guard.{check}" in (verdicts[-1].reason or "")


@pytest.mark.parametrize("check", ["dark", "saturation", "edges", "high_frequency"])
def test_a_change_in_either_direction_counts(check: str) -> None:
    """The same pictures, the other way round."""
    guard = Guard(config())
    run(guard, *(sighting(v, pictures=PICTURES[check]) for v in (0, 4)), *(sighting(v) for v in (8, 12)))
    assert levels(guard, check) == ["-", "ok", "warn", "stop"]


def test_a_grid_that_goes_away_is_welcome() -> None:
    guard = Guard(config())
    run(guard, sighting(0, pictures=PICTURES["grid"]), sighting(4), sighting(8))
    assert levels(guard, "grid") == ["-", "ok", "ok"]


@pytest.mark.parametrize(
    ("check", "value"),
    [
        ("diversity", 0.01),
        ("zero_variance", 1.0),
        ("failed", 0.4),
        ("kl", 1e-3),
        ("logp_gap", 2e-5),
        ("grad_norm", 60.0),
    ],
)
def test_training_that_went_wrong(check: str, value: float) -> None:
    guard = Guard(config())
    verdicts = run(guard, *(sighting(v) for v in (0, 4, 8, 12)), **{check: value})
    assert levels(guard, check)[1:] == ["-" if check in ("kl", "logp_gap", "grad_norm") else "ok", "warn", "stop"]
    assert [name for name, found in verdicts[-1].findings.items() if found.level != "ok"] == [check]
    assert verdicts[-1].good == 4 and f"guard.{check}" in (verdicts[-1].reason or "")


def test_gaps_that_are_rounding_do_not_count() -> None:
    guard = Guard(config())
    tiny = [replace(SOUND, iteration=i, logp_gap=1e-12 if i < 4 else 9e-7, kl=0.0) for i in range(12)]
    for facts in tiny:
        guard.iteration(facts)
    verdict = [guard.evaluation(sighting(v)) for v in (0, 4, 12)][-1]
    assert verdict.level == "ok" and verdict.findings["logp_gap"].reading.value == 1


def test_the_trained_reward_rises_and_the_gold_reward_falls() -> None:
    guard = Guard(config())
    seen = [sighting(0), sighting(4, 0.6, 0.5), sighting(8, 0.7, 0.2), sighting(12, 0.8, 0.15)]
    verdicts = run(guard, *seen)
    assert levels(guard, "divergence") == ["-", "ok", "warn", "stop"]
    reason = verdicts[-1].reason or ""
    assert "trained reward rose by 0.3" in reason and "judge, which is not trained on, fell by 0.3" in reason
    assert reason.endswith("it ends with the weights after 4 iterations")


def test_a_gold_reward_that_first_rises_is_held_against_its_best() -> None:
    guard = Guard(config())
    run(guard, *(sighting(v, 0.5 + v / 20, g) for v, g in ((0, 0.3), (4, 0.8), (8, 0.5), (12, 0.45))))
    assert levels(guard, "divergence") == ["-", "ok", "warn", "stop"]


@pytest.mark.parametrize(
    ("reward", "gold"), [(0.9, 0.9), (0.2, 0.2), (0.5, 0.5), (0.9, 0.49)], ids=["both rise", "both fall", "same", "~"]
)
def test_no_divergence(reward: float, gold: float) -> None:
    guard = Guard(config())
    run(guard, sighting(0), *(sighting(v, reward, gold) for v in (4, 8, 12)))
    assert levels(guard, "divergence") == ["-", "ok", "ok", "ok"]


def test_noise_stops_no_run() -> None:
    """40 runs of 8 evaluations that learn their reward, while a gold reward stays where it is, but for noise."""
    levels = Counter[str]()
    for seed in range(40):
        guard = Guard(config())
        for step in range(8):
            seen = sighting(100 * seed + step, 0.5 + step / 20, noise=0.3)
            levels[guard.evaluation(seen).level] += 1
    assert levels["stop"] == 0 and levels["warn"] < 0.02 * levels.total()


def test_what_was_not_measured_is_left_out() -> None:
    guard = Guard(config())
    nothing = dict.fromkeys(("diversity", "kl", "logp_gap", "grad_norm", "zero_variance"))
    verdicts = run(guard, *(replace(sighting(v, gold=None), pictures={}) for v in (4, 8, 12)), **nothing)
    assert set(verdicts[-1].findings) == {"failed"}


def test_a_check_may_be_left_out() -> None:
    guard = Guard(config("guard.dark=null", "guard.divergence=null"))
    pictures = PictureStatistics(1.0, 0.2, 0.3, 0.2, 0.05)
    verdicts = run(guard, sighting(0), *(sighting(v, 0.9, 0.1, pictures) for v in (4, 8, 12)))
    assert {v.level for v in verdicts} == {"ok"} and not {"dark", "divergence"} & set(verdicts[-1].findings)

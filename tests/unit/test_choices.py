"""`auto` values are settled once, from what was measured, with a reason."""

from __future__ import annotations

import pytest

from digenrl import choices, runspec
from digenrl.config import RunConfig
from digenrl.config.load import load_config
from digenrl.profile import Profile
from digenrl.scheduling.costs import GUESSED, KindCosts

PIECES = ("schedule.micro_batch=4", "schedule.layout=digenrl", "cluster.workers=4")


def config(*overrides: str) -> RunConfig:
    return load_config("tiny-ocr", ["guard.gold=[]", "schedule.timestep_batch=auto", *overrides])


def profile(kind: str = "cpu", streamed: float | None = None, train_s: dict[int, float] | None = None) -> Profile:
    costs = KindCosts(rollout_step_s=0.01, decode_s=0.01, score_s=0.05, train_s=train_s or {3: 0.03, 2: 0.03})
    return Profile(kind, costs, streamed)


def settled(given: RunConfig, *profiles: Profile) -> tuple[object, object, tuple[str, ...]]:
    found, reasons = choices.settle(given, 200, profiles)
    return found.schedule.timestep_batch, found.schedule.advantage, reasons


def test_what_is_set_stays_as_it_is() -> None:
    given = config("schedule.timestep_batch=2", "schedule.advantage=group")
    assert not choices.needs_profile(given)
    assert choices.settle(given, 200, [profile()]) == (given, ())


def test_what_is_settled_needs_no_settling() -> None:
    once, _ = choices.settle(config(), 200, [profile()])
    assert not choices.needs_profile(once)
    assert choices.settle(once, 200, []) == (once, ())


@pytest.mark.parametrize("assist", ["greedy", "search", "auto"])
def test_trainers_that_help_are_weighed_by_what_was_measured_though_nothing_is_open(assist: str) -> None:
    settled = ("schedule.timestep_batch=2", "schedule.advantage=group", "schedule.layout=digenrl")
    given = config(*settled, f"schedule.trainer_assist={assist}")
    assert choices.needs_profile(given)
    assert choices.settle(given, 200, [profile(train_s={2: 9.0})]) == (given, ())
    assert not choices.needs_profile(config(*settled, "schedule.trainer_assist=off"))


def test_the_timestep_batch_is_what_suits_the_worker_that_can_do_least() -> None:
    batch, _, (reason, _) = settled(config(), profile("a"), profile("b", train_s={2: 0.02}))
    assert batch == 2
    assert "time per timestep on b in batches of 2: 10 ms; 3 do not fit its memory" in reason
    batch, _, (reason, _) = settled(config(), profile("a"))
    assert batch == 3
    assert reason == "schedule.timestep_batch=auto: 3; time per timestep on a in batches of 2: 15 ms, 3: 10 ms"


def test_without_a_measurement_all_timesteps_are_trained_at_once() -> None:
    batch, advantage, reasons = settled(config(*PIECES))
    assert (batch, advantage) == (3, "group")
    assert all("nothing was measured" in reason for reason in reasons)


def test_one_trained_timestep_needs_no_measurement() -> None:
    given = config("algorithm.sde_window_size=1")
    assert not choices.needs_profile(given)
    assert settled(given)[0] == 1


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ((), "a group is one micro-batch"),
        (("schedule.micro_batch=4", "schedule.layout=colocated"), "with layout=colocated nobody trains before"),
        (
            ("schedule.micro_batch=4", "algorithm.std_scope=update"),
            "cannot be combined with algorithm.std_scope=update",
        ),
        (("schedule.micro_batch=4", "algorithm.samples_per_prompt=32"), "never clips, but one sample of"),
    ],
)
def test_where_streaming_cannot_be_had_it_is_group(overrides: tuple[str, ...], reason: str) -> None:
    given = config(*overrides)
    assert not choices.may_stream(given)
    _, advantage, reasons = settled(given, profile(streamed=1.0))
    assert advantage == "group"
    assert reason in reasons[-1]


def test_streaming_is_used_where_it_is_predicted_to_pay() -> None:
    """One worker generates the only group piece by piece, and the other would wait for the last one."""
    one = ("algorithm.prompts_per_iteration=1", "algorithm.updates_per_iteration=1")
    given = config("schedule.micro_batch=4", "schedule.layout=disaggregated", *one)
    found = {}
    for streamed in (1.0, 20.0):
        _, found[streamed], reasons = settled(given, *[profile(streamed=streamed)] * 2)
        assert "streaming is predicted to save" in reasons[-1]
    assert found == {1.0: "streaming", 20.0: "group"}


def test_the_model_knows_what_was_measured() -> None:
    shape = runspec.shape(config(), 200)
    model = choices.model_of(shape, [profile("a", 1.25), profile("b", 1.5), profile("a", train_s={3: 9.0})])
    assert model.kinds == ("b", "a") or model.kinds == ("a", "b")
    assert model.of_kind("a").train_s[3] == pytest.approx(0.03)
    assert model.streamed == 1.5
    assert choices.model_of(shape, []).kinds == (GUESSED,)

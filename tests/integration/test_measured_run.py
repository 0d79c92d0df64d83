"""A run that measures its workers: what it leaves open is settled, trainers help where that is predicted to pay, and
samples and weights are those of the plain loop all the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from mlflow import MlflowClient

from digenrl.config import RunConfig
from digenrl.loop import train
from digenrl.policy import adapter_hash
from flows.services import ServicesHandle, ensure
from program import Home
from storage import checkpoints
from storage.runs import RunDirectory

NAME, ITERATIONS = "measured", 3
OVERRIDES = (
    f"iterations={ITERATIONS}",
    "algorithm.num_steps=6",
    "schedule.layout=digenrl",
    "schedule.trainer_assist=search",
    "schedule.micro_batch=2",
    "schedule.timestep_batch=auto",
    "schedule.stale_fraction=0.5",
    "evaluation.every=0",
    "checkpoint.every=2",
)


@dataclass(frozen=True)
class Measured:
    """A home with that run, complete."""

    services: ServicesHandle
    directory: RunDirectory

    @property
    def config(self) -> RunConfig:
        """As settled."""
        return self.directory.read_config()

    @property
    def summary(self) -> dict[str, Any]:
        """summary.json."""
        summary = self.directory.read_summary()
        assert summary is not None
        return summary

    def metric(self, name: str) -> list[float]:
        """Values by iteration."""
        history = MlflowClient(self.services.mlflow_uri).get_metric_history(self.summary["mlflow_run_id"], name)
        return [metric.value for metric in sorted(history, key=lambda metric: metric.step)]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measured]:
    path = tmp_path_factory.mktemp("measured") / "home"
    with Home(path) as home, ensure(owner="pytest", home=path) as services:
        home.run("train", "tiny-smoke", *OVERRIDES, "--name", NAME)
        yield Measured(services, RunDirectory(path / NAME))


def test_what_was_left_open_is_settled_and_written_down(measured: Measured) -> None:
    schedule, log = measured.config.schedule, measured.directory.log_path.read_text()
    assert schedule.timestep_batch in (1, 2, 3)
    assert f"schedule.timestep_batch=auto: {schedule.timestep_batch}; time per timestep on cpu" in log
    # Half of the groups are stale, and the first update takes half of them: none is left to be streamed.
    assert schedule.advantage == "group"
    assert "schedule.advantage=auto: group; schedule.advantage=streaming has nothing to act on" in log
    params = MlflowClient(measured.services.mlflow_uri).get_run(measured.summary["mlflow_run_id"]).data.params
    assert params["schedule.timestep_batch"] == str(schedule.timestep_batch)


def test_seconds_of_units_and_of_what_lies_between_are_kept(measured: Measured) -> None:
    kinds = json.loads(measured.directory.profile_path.read_text())["kinds"]
    assert kinds.keys() == {"cpu"}
    costs = kinds["cpu"]
    assert costs["train_s"][str(measured.config.schedule.timestep_batch)] > 0
    for name in ("rollout_step_s", "decode_s", "score_s", "update_s", "install_s", "transfer_s", "gap_s"):
        assert 0 < costs[name] < 60, name
    assert costs["switch_s"] is None or costs["switch_s"] >= 0


def test_searching_takes_next_to_no_time(measured: Measured) -> None:
    shares = measured.metric("schedule/search_share")
    assert len(shares) == ITERATIONS
    assert all(0 <= share <= 0.01 for share in shares)
    assert 0 < measured.summary["search_share"] <= 0.01


def test_pairs_are_counted_by_the_age_of_their_samples(measured: Measured) -> None:
    fresh, stale = measured.metric("staleness/0"), measured.metric("staleness/1")
    trained = measured.metric("update/pairs_trained")
    assert [a + b for a, b in zip(fresh, stale, strict=True)] == trained
    assert stale[0] == 0
    assert sum(stale[1:]) > 0


def test_samples_and_weights_are_those_of_the_plain_loop(measured: Measured) -> None:
    info = checkpoints.latest(measured.directory.checkpoints)
    assert info is not None and info.iteration == ITERATIONS
    assert checkpoints.load(info).state["adapter_hash"] == adapter_hash(train(measured.config).adapter.weights)

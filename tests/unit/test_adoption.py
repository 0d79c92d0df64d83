"""A run whose directory is elsewhere is found by its checkpoints, and nothing in them is trusted further than that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from digenrl.config.load import ConfigError, load_config
from flows.adoption import adopted
from flows.resuming import check_unused
from flows.stores import Stores, check_storage, stores_of
from storage import checkpoints
from storage.runs import RunDirectory
from storage.stores import open_store


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DIGENRL_HOME", str(tmp_path / "home"))
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


def saved(place: Path, **changes: Any) -> checkpoints.CheckpointInfo:
    """A checkpoint of another machine, which had other paths."""
    config = load_config("tiny-smoke", ["iterations=7"]).model_dump(mode="json")
    config["checkpoint"] |= {"url": "s3://there/x", "endpoint": "http://there:1", "credentials_block": "k"}
    return checkpoints.save(place, 3, {"adapter": {"w": torch.ones(2)}}, {"config": config | changes})


@pytest.mark.parametrize("as_url", [False, True])
def test_the_directory_is_made_from_the_newest_checkpoint(tmp_path: Path, home: Path, as_url: bool) -> None:
    place = tmp_path / "shared" / "run-1"
    saved(place)
    run = adopted(place.as_uri() if as_url else f"{place}/")
    config = run.read_config()
    assert run.path == home / "run-1" and config.iterations == 7
    above = (tmp_path / "shared").as_uri() if as_url else str(tmp_path / "shared")
    assert (config.checkpoint.url, config.checkpoint.endpoint, config.checkpoint.credentials_block) == (
        above,
        None,
        None,
    )
    assert checkpoints.latest(stores_of(run, config).main) is not None
    assert adopted(place.as_uri() if as_url else str(place)).path == run.path, (
        "again, after it failed for other reasons"
    )


def test_a_run_of_the_same_name_is_not_taken_for_it(tmp_path: Path, home: Path) -> None:
    saved(tmp_path / "shared" / "run-1")
    RunDirectory.create(home, "tiny-smoke", load_config("tiny-smoke"), "run-1")
    with pytest.raises(ConfigError, match=r"home/run-1 is another run than .*; resume in another DIGENRL_HOME"):
        adopted(str(tmp_path / "shared" / "run-1"))


@pytest.mark.parametrize(
    ("place", "fragment"),
    [
        ("{tmp}/shared/nothing", "has no whole checkpoint"),
        ("{tmp}/shared/..", "must be made of letters"),
        ("nosuch://x/run-1", "RUN=nosuch://x/run-1 cannot be used"),
        ("{tmp}/shared/old", "is not one of this version of DigenRL: 'config' is missing"),
        ("{tmp}/shared/newer", "is not one of this version of DigenRL: Extra inputs are not permitted"),
    ],
)
def test_what_cannot_be_resumed_is_said(tmp_path: Path, home: Path, place: str, fragment: str) -> None:
    shared = tmp_path / "shared"
    checkpoints.save(shared / "old", 3, {}, {"theta": 1})
    saved(shared / "newer", unheard_of=1)
    with pytest.raises(ConfigError) as refused:
        adopted(place.format(tmp=tmp_path))
    assert fragment in str(refused.value)
    assert not home.exists() or not list(home.iterdir())


def test_a_directory_for_all_runs_is_tried_and_left_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config("tiny-smoke", [f"checkpoint.url={tmp_path}/shared"])
    assert check_storage(config) == []
    assert not list((tmp_path / "shared").iterdir())
    saved(tmp_path / "shared" / "tiny-smoke-3")
    assert check_storage(config) == ["tiny-smoke-3"]
    monkeypatch.chdir(tmp_path)
    config = load_config("tiny-smoke", ["checkpoint.url=shared"])
    run = RunDirectory.create(tmp_path / "home", "tiny-smoke", config, taken=check_storage(config))
    assert run.name == "tiny-smoke-4"
    assert run.read_config().checkpoint.url == str(tmp_path / "shared"), "from any directory"
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"checkpoint.url=.*file cannot be used: .*Not a directory"):
        check_storage(load_config("tiny-smoke", [f"checkpoint.url={tmp_path}/file"]))


def test_a_place_is_for_one_run(tmp_path: Path) -> None:
    store = open_store(tmp_path / "shared" / "run-1")
    stores = Stores(store, open_store(tmp_path / "local"))
    checkpoints.save(store, 0, {}, {})  # of an attempt that ended before its first iteration
    check_unused(stores)
    saved(tmp_path / "shared" / "run-1")
    with pytest.raises(
        ConfigError, match=r"shared/run-1 holds checkpoints of another run: continue it with `digenrl res"
    ):
        check_unused(stores)

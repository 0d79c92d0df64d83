"""Checkpoints on a real S3 service are whole or absent, whatever fails."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from digenrl.config import KeepConfig
from digenrl.config.load import ConfigError, load_config
from digenrl.guard.evidence import Sighting
from digenrl.guard.pictures import PictureStatistics
from digenrl.guard.watch import Guard
from digenrl.prompts import load_prompts
from flows import patience
from flows.checkpointing import Checkpointer
from flows.history import History
from flows.resuming import Restored, restore
from flows.stores import Stores, check_storage
from s3_server import BUCKET, SECRET, Link, S3Server, link_to
from storage import s3
from storage.checkpoints import CheckpointDamaged, committed, latest, load, newest, prune, save
from storage.stores import S3Access, StorageError, open_store
from workers.listener import Evaluation, IterationReport, TrainerState

STATE = {"theta": 4, "cursor": [1, 2]}


@pytest.fixture
def link(server: S3Server) -> Iterator[Link]:
    with link_to(server) as opened:
        yield opened


def tensors(seed: int, size: int = 100) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return {"adapter": {"w": torch.randn(size, generator=generator)}, "optimizer": {"step": torch.tensor(seed)}}


def test_what_one_client_does_the_others_see(server: S3Server) -> None:
    mine, other = server.store("seen/run"), server.store("seen/run")
    assert latest(other) is None
    info = save(mine, 10, tensors(1), STATE)
    assert latest(other) == info and info.url == f"s3://{BUCKET}/seen/run/{info.folder}"
    back = newest(other)
    assert back is not None and back.state == STATE
    assert torch.equal(back.tensors["adapter"]["w"], tensors(1)["adapter"]["w"])
    for iteration in (20, 30):
        save(mine, iteration, tensors(iteration), STATE)
    assert [name[:11] for name in prune(mine, KeepConfig(last=1))] == ["step-000010", "step-000020"]
    assert [name[:11] for name in other.tree()] == ["step-000030"]
    assert other.sizes(info.folder) == {}
    with pytest.raises(CheckpointDamaged, match=r"state\.json is missing"):
        load(info)


@pytest.mark.parametrize("how", ["refuse", "cut", "lose"])
def test_a_save_whose_calls_fail_from_any_on_leaves_the_previous_one(server: S3Server, link: Link, how: str) -> None:
    folder = f"fails-{how}/run"
    store, other = link.store(folder), server.store(folder)
    save(store, 10, tensors(1), STATE)
    link.arm(None)
    save(store, 15, tensors(2), STATE)
    total = link.calls
    assert total == 5, "manifest looked for, three files, manifest"
    prune(store, KeepConfig(last=2))
    for k in range(1, total + 1):
        link.arm(k, how)
        with pytest.raises(OSError, match=r"Access Denied|Connection was closed"):
            save(store, 20, tensors(20), STATE)
        found = newest(other)
        assert found is not None
        # Only an answer that is lost after the last call leaves the new one, whole.
        expected = 20 if how == "lose" and k == total else 15
        assert found.info.iteration == expected, f"call {k} of {total}"
        assert torch.equal(found.tensors["adapter"]["w"], tensors(2 if expected == 15 else 20)["adapter"]["w"])
        for name in other.tree():
            if name.startswith("step-000020"):
                other.remove_folder(name)
    link.arm(None)
    save(store, 20, tensors(20), STATE)
    assert [(name[:11], len(files)) for name, files in other.tree().items()] == [
        *(("step-000010", 4), ("step-000015", 4), ("step-000020", 4))
    ]


def test_a_call_that_fails_once_is_sent_again(link: Link) -> None:
    store = link.store("again/run", attempts=None)
    link.arm(None)
    for k, how in enumerate(("cut", "lose", "cut", "lose", "cut"), start=1):
        link.arm(k, how, fail_until=k)
        saved = save(store, k, tensors(k), STATE)
        assert link.calls > 5
        assert latest(store) == saved


def test_what_failed_saves_left_is_collected(server: S3Server, link: Link) -> None:
    store = link.store("left/run")
    save(store, 10, tensors(1), STATE)
    link.arm(4)
    with pytest.raises(PermissionError):
        save(store, 20, tensors(2), STATE)
    link.arm(None)
    assert [name[:11] for name in store.tree()] == ["step-000010", "step-000020"]
    assert [name[:11] for name in prune(store, KeepConfig())] == ["step-000020"]
    assert [name[:11] for name in server.store("left/run").tree()] == ["step-000010"]


def test_a_truncated_file_is_refused_and_the_previous_checkpoint_used(
    server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    store = server.store("truncated/run")
    save(store, 10, tensors(1), STATE)
    newer = save(store, 20, tensors(2), STATE)
    path = f"{BUCKET}/truncated/run/{newer.folder}/adapter.safetensors"
    files = server.files()
    files.pipe_file(path, files.cat_file(path)[:-1])
    found = latest(store)
    assert found is not None and found.iteration == 10
    (message,) = caplog.messages
    assert f"{newer.folder}: adapter.safetensors has" in message
    assert [name[:11] for name in prune(store, KeepConfig(last=1))] == ["step-000020"]


def test_a_large_file_goes_in_parts_and_an_interrupted_one_stays_unseen(
    server: S3Server, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "PART_BYTES", 5 * 2**20)  # the smallest that S3 takes
    large = tensors(1, size=3_000_000)  # three parts
    store = link.store("parts/run")
    info = save(store, 10, large, STATE)
    found = server.files().info(f"{BUCKET}/parts/run/{info.folder}/adapter.safetensors")
    assert found["ETag"].strip('"').endswith("-3")
    back = newest(store)
    assert back is not None and torch.equal(back.tensors["adapter"]["w"], large["adapter"]["w"])

    link.arm(4, "cut")  # after the look for a manifest, the beginning of the upload, and one part
    with pytest.raises(StorageError):
        save(store, 20, tensors(2, size=3_000_000), STATE)
    link.arm(None)
    assert [name[:11] for name in store.tree()] == ["step-000010"]
    assert store.discard_uploads() == 1, "it could not be given up while nothing answered"
    assert store.discard_uploads() == 0


def state_of(theta: int) -> TrainerState:
    return TrainerState(theta, {"w": torch.full((4,), float(theta))}, {"step": torch.tensor(theta)}, f"h{theta}")


def report(iteration: int) -> IterationReport:
    return IterationReport(iteration, 1.0, [0.5], {}, 6, {}, 0, {}, {"worker 0": 0.5})


def test_an_outage_is_said_twice_and_loses_nothing(
    server: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.1)
    config = load_config("tiny-smoke", ["iterations=9", "checkpoint.every=1", "algorithm.updates_per_iteration=1"])
    stores = Stores(server.store("outage/run", attempts=2), open_store(tmp_path))
    checkpointer = Checkpointer(stores, config, history := History(), load_prompts(config.data.prompts))
    blocked_s = 0.0

    def iterate(iteration: int) -> None:
        nonlocal blocked_s
        began = time.monotonic()
        history.iteration_closed(report(iteration))
        checkpointer.published(iteration + 1, state_of(iteration + 1))
        checkpointer.iteration_closed(report(iteration))
        blocked_s = max(blocked_s, time.monotonic() - began)

    async def saved(iterations: int) -> None:
        async with asyncio.timeout(30):
            while checkpointer.last is None or checkpointer.last.iteration < iterations:
                await asyncio.sleep(0.02)

    async def main() -> None:
        iterate(0)
        await saved(1)
        server.kill()
        for iteration in range(1, 6):
            iterate(iteration)
            await asyncio.sleep(0.2)
        await asyncio.to_thread(server.start)
        await saved(6)
        iterate(6)
        await checkpointer.finish()

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert blocked_s < 0.1
    begun, ended = caplog.messages
    assert begun.startswith(f"checkpoints cannot be saved in {stores.main.root} (") and server.endpoint in begun
    assert re.search(r"are saved in s3://.* again after \d+ s; the newest has 6 iterations", ended)
    assert 1.0 < checkpointer.degraded_s < 30
    restored = restore(stores)
    assert restored is not None and (restored[0], restored[1].theta) == (7, 7)
    assert [row.iteration for row in History.from_state(restored[2].state["history"]).rows] == list(range(7))
    assert not list(tmp_path.iterdir())


def test_a_run_that_ends_in_an_outage_keeps_its_last_checkpoint_here(
    server: S3Server, link: Link, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config("tiny-smoke", ["iterations=9", "algorithm.updates_per_iteration=1"])
    stores = Stores(link.store("end/run"), open_store(tmp_path))
    save(stores.main, 1, tensors(1), STATE)
    link.arm(1)

    async def main() -> None:
        checkpointer = Checkpointer(stores, config, History(), load_prompts(config.data.prompts))
        checkpointer.published(3, state_of(3))
        assert await checkpointer.finish(patience_s=0.5) == latest(tmp_path)

    asyncio.run(main())
    assert f"the last checkpoint is in {tmp_path}" in caplog.messages[-1]
    link.arm(None)
    restored = restore(stores)
    assert restored is not None and restored[0] == 3


def sighting(version: int, *, gamed: bool) -> Sighting:
    """Of a gamed reward the pictures are black."""
    pictures = {0: PictureStatistics(1.0 if gamed else 0.1, 0.0, 0.2, 0.2, 0.0)}
    return Sighting(version, {0: 0.9 if gamed else 0.5}, {}, pictures)


def test_a_run_that_the_guard_stops_goes_back_to_the_good_one(
    server: S3Server, link: Link, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`keep.last=1`: what it may go back to stays. At the stop the service fails for a while."""
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.1)
    overrides = ["iterations=9", "checkpoint.every=1", "checkpoint.keep.last=1", "evaluation.every=2"]
    config = load_config("tiny-smoke", [*overrides, "algorithm.updates_per_iteration=1"])
    stores = Stores(link.store("guarded/run"), open_store(tmp_path))
    guard, history, other = Guard(config), History(), server.store("guarded/run")
    checkpointer = Checkpointer(stores, config, history, load_prompts(config.data.prompts), guard)

    async def saved() -> list[int]:
        async with asyncio.timeout(30):
            while any(task is not asyncio.current_task() for task in asyncio.all_tasks()):
                await asyncio.sleep(0.01)
        return sorted(info.iteration for info in committed(other))

    async def main() -> Restored | None:
        for version in range(1, 9):
            history.iteration_closed(report(version - 1))
            checkpointer.published(version, state_of(version))
            checkpointer.iteration_closed(report(version - 1))
            found = await saved()
            if version % 2 == 0:
                history.evaluated(Evaluation(version, {}, {}))
                guard.evaluation(sighting(version, gamed=version > 4))
        assert found == [4, 6, 8], "4 is good; other checks were ok at 6"
        assert guard.last is not None and guard.last.stops
        link.arm(1)
        with pytest.raises(OSError, match="Access Denied"):
            await checkpointer.go_back(guard.last.good, patience_s=0.3)
        link.arm(2, fail_until=4)
        return await checkpointer.go_back(guard.last.good)

    left = asyncio.run(main())
    assert left is not None and (left[0], left[1].adapter_hash) == (4, "h4")
    assert checkpointer.last == latest(other) == left[2].info
    assert [name[:11] for name in other.tree()] == ["step-000004"] and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "fragments"),
    [
        ({"url": "s3://nosuch/x"}, ["checkpoint.url=s3://nosuch/x cannot be used", "bucket 'nosuch' does not exist"]),
        ({"endpoint": "http://127.0.0.1:9"}, ["cannot be used at http://127.0.0.1:9", "Could not connect"]),
        ({"AWS_ACCESS_KEY_ID": "unknown"}, ["checkpoint.url=", "cannot be used", "key"]),
        ({"AWS_SECRET_ACCESS_KEY": "wrong-7c1d"}, ["checkpoint.url=", "cannot be used", "signature"]),
        ({"url": "nosuch://x/y"}, ["checkpoint.url=nosuch://x/y cannot be used", "nosuch"]),
    ],
)
def test_storage_that_cannot_be_used_is_said_at_once(
    server: S3Server, monkeypatch: pytest.MonkeyPatch, change: dict[str, str], fragments: list[str]
) -> None:
    for name, value in (server.environment | change).items():
        monkeypatch.setenv(name, value)
    overrides = [f"checkpoint.url={change.get('url', f's3://{BUCKET}/checks')}"]
    overrides += [f"checkpoint.endpoint={change['endpoint']}"] if "endpoint" in change else []
    began = time.monotonic()
    with pytest.raises(ConfigError) as refused:
        check_storage(load_config("tiny-smoke", overrides))
    assert time.monotonic() - began < 5
    for fragment in fragments:
        assert fragment.lower() in str(refused.value).lower()
    for secret in (SECRET, "wrong-7c1d"):
        assert secret not in str(refused.value)


def test_a_service_that_never_answers_is_given_up(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    from flows import stores

    monkeypatch.setattr(stores, "CHECK_S", 1.0)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        config = load_config("tiny-smoke", [f"checkpoint.url=s3://{BUCKET}/x", f"checkpoint.endpoint={endpoint}"])
        with pytest.raises(ConfigError, match=f"does not answer within 1 s at {endpoint}"):
            check_storage(config)


def test_a_call_has_a_deadline(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "CALL_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        access = S3Access(f"http://127.0.0.1:{silent.getsockname()[1]}", "key", SECRET)
        with pytest.raises(StorageError, match=r"s3://runs/x: ls did not end within 0 s"):
            s3.S3Store(f"s3://{BUCKET}/x", access).folders()
    assert SECRET not in repr(access)


def test_names_that_are_taken_are_known(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    save(open_store(f"s3://{BUCKET}/taken/tiny-smoke-4"), 2, tensors(1), STATE)
    assert "tiny-smoke-4" in check_storage(load_config("tiny-smoke", [f"checkpoint.url=s3://{BUCKET}/taken"]))
    assert list(server.store("taken").tree()) == [], "nothing is left of the test"

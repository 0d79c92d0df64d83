"""A checkpoint is whole or absent, whatever fails and whenever (locally and through fsspec)."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from digenrl.config import KeepConfig
from storage import checkpoints
from storage.checkpoints import CheckpointDamaged, latest, load, prune, rewind, save
from storage.retention import Merits

STATE = {"theta": 4, "cursor": [1, 2], "lr": 1e-3, "mlflow": None, "ledger": {"i0 m0": "done"}}


def tensors(seed: int) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    weights = {f"layer.{n}": torch.randn(7, 5, generator=generator) for n in range(3)}
    return {"adapter": weights, "optimizer": {"step": torch.tensor(seed), "m": torch.randn(9, generator=generator)}}


class DiskFault(OSError):
    """What a storage call raises when it is told to fail."""


class FaultyFileSystem(DirFileSystem):
    """A real fsspec file system over a directory: before or after call number `fail_at`, it fails.

    "After" is the answer that gets lost: the call took effect and its caller sees an error.
    """

    protocol = "faulty"
    cachable = False
    calls: ClassVar[int] = 0
    fail_at: ClassVar[int | None] = None
    after: ClassVar[bool] = False
    root: ClassVar[str] = ""

    def __init__(self, **options: Any) -> None:
        super().__init__(path=self.root, fs=LocalFileSystem(auto_mkdir=False))

    @classmethod
    def arm(cls, fail_at: int | None, after: bool = False) -> None:
        cls.calls, cls.fail_at, cls.after = 0, fail_at, after


def _counted(name: str) -> Callable[..., Any]:
    def call(self: FaultyFileSystem, *args: Any, **options: Any) -> Any:
        FaultyFileSystem.calls += 1
        failing = FaultyFileSystem.calls == FaultyFileSystem.fail_at
        if failing and not FaultyFileSystem.after:
            if name == "pipe_file":
                # Half of the object arrives, as when a connection breaks.
                args = (args[0], args[1][: len(args[1]) // 2])
                getattr(DirFileSystem, name)(self, *args, **options)
            raise DiskFault(f"call {FaultyFileSystem.calls}: {name}")
        try:
            return getattr(DirFileSystem, name)(self, *args, **options)
        finally:
            if failing:
                raise DiskFault(f"after call {FaultyFileSystem.calls}: {name}")

    return call


for _name in ("ls", "cat_file", "pipe_file", "makedirs", "rm_file", "rm"):
    setattr(FaultyFileSystem, _name, _counted(_name))


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[str]:
    """A URL on the faulty file system."""
    fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
    FaultyFileSystem.root = str(tmp_path)
    FaultyFileSystem.arm(None)
    yield "faulty://run/checkpoints"
    FaultyFileSystem.arm(None)


@pytest.fixture(params=["directory", "file url", "memory url", "faulty url"])
def root(request: pytest.FixtureRequest, tmp_path: Path, faulty: str) -> Iterator[str]:
    urls = {
        "directory": str(tmp_path / "a run" / "checkpoints"),
        "file url": (tmp_path / "a run" / "checkpoints").as_uri(),
        "memory url": "memory://a run/checkpoints",
        "faulty url": faulty,
    }
    yield urls[request.param]
    fsspec.filesystem("memory").store.clear()
    fsspec.filesystem("memory").pseudo_dirs[:] = [""]


def last(n: int) -> KeepConfig:
    """Only the newest n stay."""
    return KeepConfig(last=n)


def latest_iteration(root: str | Path) -> int | None:
    found = latest(root)
    return None if found is None else found.iteration


class FailingCall:
    """Stands for a system call and fails the k-th time."""

    def __init__(self, real: Callable[..., Any], k: int) -> None:
        self.real, self.left = real, k

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise DiskFault(str(self.real))
        return self.real(*args, **options)


def files_of(root: str, folder: str) -> Path:
    base = FaultyFileSystem.root + "/run/checkpoints" if root.startswith("faulty") else root
    return Path(base) / folder


def test_what_is_saved_comes_back(root: str) -> None:
    assert latest(root) is None
    saved = tensors(1)
    saved["half"] = {"x": torch.randn(3, 4).bfloat16(), "empty": torch.zeros(0, 2), "view": torch.randn(4, 4).T[1:]}
    saved["nothing"] = {}
    info = save(root, 10, saved, STATE)
    assert latest(root) == info
    assert info.url.endswith(f"/checkpoints/{info.folder}")
    back = load(info)
    assert back.state == STATE
    assert back.tensors.keys() == saved.keys()
    for group, named in saved.items():
        assert back.tensors[group].keys() == named.keys()
        for name, tensor in named.items():
            assert back.tensors[group][name].dtype == tensor.dtype
            assert torch.equal(back.tensors[group][name], tensor)


def test_tensors_that_share_memory_are_saved(root: str) -> None:
    weight = torch.randn(4, 4)
    back = load(save(root, 1, {"adapter": {"a": weight, "b": weight, "c": weight[1:]}}, {}))
    assert torch.equal(back.tensors["adapter"]["b"], weight)
    assert torch.equal(back.tensors["adapter"]["c"], weight[1:])


def test_the_newest_iteration_is_the_latest(root: str) -> None:
    for iteration in (9, 10, 100, 20):
        save(root, iteration, tensors(iteration), STATE)
    assert latest_iteration(root) == 100


def test_saving_the_same_again_changes_nothing(root: str) -> None:
    first = save(root, 10, tensors(1), STATE)
    assert save(root, 10, tensors(1), STATE) == first
    other = save(root, 10, tensors(2), STATE)
    assert other.folder != first.folder
    assert latest(root) == other
    assert load(first).tensors["optimizer"]["step"] == 1


def test_a_damaged_checkpoint_is_written_again(faulty: str) -> None:
    info = save(faulty, 10, tensors(1), STATE)
    files_of(faulty, info.folder).joinpath("adapter.safetensors").write_bytes(b"")
    assert latest(faulty) is None
    save(faulty, 10, tensors(1), STATE)
    assert latest(faulty) is not None


def test_prune_keeps_the_newest(root: str) -> None:
    for iteration in range(1, 6):
        save(root, iteration, tensors(iteration), STATE)
    removed = prune(root, last(2))
    assert [folder[:11] for folder in removed] == ["step-000001", "step-000002", "step-000003"]
    assert latest_iteration(root) == 5
    assert prune(root, last(2)) == []


def test_prune_keeps_what_a_run_may_go_back_to(root: str) -> None:
    for iteration in (2, 4, 6, 8):
        save(root, iteration, tensors(iteration), STATE)
    removed = prune(root, last(1), Merits(needed=(5, 1, 9)))
    assert [folder[:11] for folder in removed] == ["step-000002", "step-000006"]
    assert prune(root, last(1), Merits(needed=(5,))) == []


def test_rewind_removes_what_is_newer(root: str) -> None:
    for iteration in (2, 4, 6):
        save(root, iteration, tensors(iteration), STATE)
    assert [folder[:11] for folder in rewind(root, 5)] == ["step-000006"]
    assert latest_iteration(root) == 4
    assert len(rewind(root, 0)) == 2 and latest(root) is None and rewind(root, 0) == []


@pytest.mark.parametrize("after", [False, True], ids=["call lost", "answer lost"])
def test_a_save_that_fails_at_any_call_leaves_the_previous_one(faulty: str, after: bool) -> None:
    previous = save(faulty, 10, tensors(1), STATE)
    FaultyFileSystem.arm(None)
    probe = save(faulty, 20, tensors(2), STATE)
    total = FaultyFileSystem.calls
    assert total >= 2 * len(probe.files)
    for name in files_of(faulty, probe.folder).iterdir():
        name.unlink()
    for k in range(1, total + 1):
        FaultyFileSystem.arm(k, after)
        with pytest.raises(DiskFault):
            save(faulty, 20, tensors(2), STATE)
        FaultyFileSystem.arm(None)
        found = latest(faulty)
        assert found is not None
        # Only an answer that is lost after the last call leaves the new one, whole.
        assert found.iteration == (20 if after and k == total else 10), f"call {k} of {total}"
        assert torch.equal(
            load(found).tensors["adapter"]["layer.0"], tensors(found.iteration // 10)["adapter"]["layer.0"]
        )
    assert previous.folder in {path.name for path in files_of(faulty, "").iterdir()}
    save(faulty, 20, tensors(2), STATE)
    assert latest_iteration(faulty) == 20


def test_what_failed_saves_left_is_collected(faulty: str) -> None:
    save(faulty, 10, tensors(1), STATE)
    for k in range(2, 5):
        FaultyFileSystem.arm(k)
        with pytest.raises(DiskFault):
            save(faulty, 20 + k, tensors(k), STATE)
    FaultyFileSystem.arm(None)
    assert len(prune(faulty, last(3))) >= 1
    assert [path.name[:11] for path in files_of(faulty, "").iterdir()] == ["step-000010"]


def test_a_prune_that_fails_at_any_call_keeps_the_latest(faulty: str) -> None:
    FaultyFileSystem.arm(None)
    for iteration in (1, 2, 3):
        save(faulty, iteration, tensors(iteration), STATE)
    for k in itertools.count(1):
        FaultyFileSystem.arm(k)
        try:
            prune(faulty, last(1))
            break
        except DiskFault:
            FaultyFileSystem.arm(None)
            assert latest_iteration(faulty) == 3
    FaultyFileSystem.arm(None)
    assert k > 3
    assert latest_iteration(faulty) == 3
    assert [path.name[:11] for path in files_of(faulty, "").iterdir()] == ["step-000003"]


def test_storage_that_cannot_be_read_is_not_an_absent_checkpoint(faulty: str) -> None:
    save(faulty, 10, tensors(1), STATE)
    save(faulty, 20, tensors(2), STATE)
    FaultyFileSystem.arm(None)
    latest(faulty)
    for k in range(1, FaultyFileSystem.calls + 1):
        FaultyFileSystem.arm(k)
        with pytest.raises(DiskFault):
            latest(faulty)


@pytest.mark.parametrize("syscall", ["fsync", "replace", "mkdir"])
def test_a_local_save_that_fails_anywhere_leaves_the_previous_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, syscall: str
) -> None:
    save(tmp_path, 10, tensors(1), STATE)
    for k in itertools.count(1):
        with monkeypatch.context() as patched:
            patched.setattr(os, syscall, FailingCall(getattr(os, syscall), k))
            try:
                save(tmp_path, 20, tensors(2), STATE)
                break
            except DiskFault:
                committed = any(tmp_path.glob("step-000020-*/manifest.json"))
        # Once the manifest's rename took effect the checkpoint is whole, even if the last fsync says otherwise.
        assert latest_iteration(tmp_path) == (20 if committed else 10)
        for path in tmp_path.glob("step-000020-*"):
            assert not list(path.glob(".*"))
            checkpoints.open_store(tmp_path).remove_folder(path.name)
    assert k > 1
    assert latest_iteration(tmp_path) == 20


def test_a_process_killed_before_the_commit_leaves_the_previous_one(tmp_path: Path) -> None:
    save(tmp_path, 10, tensors(1), STATE)
    code = f"""
import os, signal, torch
from storage import atomic, checkpoints
real = atomic.os.fsync
def fsync(descriptor):
    if "manifest.json" in os.readlink(f"/proc/self/fd/{{descriptor}}"):
        os.kill(os.getpid(), signal.SIGKILL)
    real(descriptor)
atomic.os.fsync = fsync
checkpoints.save({str(tmp_path)!r}, 20, {{"adapter": {{"x": torch.zeros(1000)}}}}, {{}})
"""
    killed = subprocess.run([sys.executable, "-c", code], timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = tmp_path.glob("step-000020-*")
    assert {path.name for path in left.iterdir()} > {"adapter.safetensors", "state.json"}
    assert latest_iteration(tmp_path) == 10
    assert prune(tmp_path, last(3)) == [left.name]
    assert not left.exists()


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["adapter.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", [_truncate, _flip, Path.unlink])
def test_a_damaged_file_is_refused_and_the_previous_checkpoint_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: Callable[[Path], None]
) -> None:
    save(tmp_path, 10, tensors(1), STATE)
    newer = save(tmp_path, 20, tensors(2), STATE)
    damage(tmp_path / newer.folder / name)
    with caplog.at_level(logging.WARNING):
        assert latest_iteration(tmp_path) == 10
    if name == "manifest.json" and damage is Path.unlink:
        assert not caplog.messages
        return
    (message,) = caplog.messages
    assert newer.folder in message
    if name != "manifest.json":
        assert name in message
        with pytest.raises(CheckpointDamaged, match=name):
            load(newer)


def test_a_manifest_that_was_edited_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    info = save(tmp_path, 10, tensors(1), STATE)
    path = tmp_path / info.folder / "manifest.json"
    manifest = json.loads(path.read_text())
    for change in ({"iteration": 11}, {"format": 2}, {"files": {}}, {"files": []}, {"files": {"state.json": {}}}):
        path.write_text(json.dumps(manifest | change))
        assert latest(tmp_path) is None
    assert len(caplog.messages) == 5
    path.write_text(json.dumps(manifest))
    assert latest(tmp_path) == info


class Malice:
    """What a pickle runs when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("name", ["adapter.safetensors", "state.json"])
@pytest.mark.parametrize("how", ["pickle", "torch"])
def test_nothing_that_was_saved_is_run(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, how: str) -> None:
    root, mark = tmp_path / "checkpoints", tmp_path / "it was run"
    save(root, 10, tensors(1), STATE)
    pickled = io.BytesIO()
    (pickle.dump if how == "pickle" else torch.save)(Malice(mark), pickled)
    forge(root, 20, {name: pickled.getvalue()})
    found = latest(root)
    assert found is not None and found.iteration == 10
    (message,) = caplog.messages
    assert f"{name} is not a" in message and message.endswith("using the checkpoint before it")
    assert not mark.exists()


@pytest.mark.parametrize("name", ["../../secret.safetensors", "/etc/passwd", "x/../y.safetensors", "a.pkl", ".x.json"])
def test_a_manifest_cannot_name_files_elsewhere(tmp_path: Path, name: str) -> None:
    root = tmp_path / "checkpoints"
    root.mkdir()
    secret = tmp_path / "secret.safetensors"
    secret.write_bytes(checkpoints.save_tensors({"w": torch.ones(1)}))
    folder = forge(root, 20, {"state.json": b"{}"}, claimed={name: secret.read_bytes()})
    assert latest(root) is None
    prune(root, last(1))
    assert secret.exists() and (root / folder).exists()


@pytest.mark.parametrize("content", [b"[]", b"[" * 200_000, b"\x00", b'"x"'])
def test_a_state_that_is_not_one_is_refused(tmp_path: Path, content: bytes) -> None:
    forge(tmp_path, 20, {"state.json": content})
    forge(tmp_path, 30, {"state.json": b"{}"}, manifest=content)
    assert latest(tmp_path) is None


def test_a_link_to_another_directory_is_left_alone(tmp_path: Path) -> None:
    root, other = tmp_path / "checkpoints", tmp_path / "other"
    save(root, 10, tensors(1), STATE)
    other.mkdir()
    (other / "mine").write_text("mine")
    (root / "step-000020-0123abcd").symlink_to(other)
    assert prune(root, last(1)) == []
    assert (other / "mine").exists()


def forge(
    root: Path, iteration: int, files: dict[str, bytes], claimed: dict[str, bytes] | None = None, manifest: bytes = b""
) -> str:
    """A checkpoint whose hashes are right, by somebody who may write here; the name of its folder."""
    contents = {"state.json": b"{}", **files, **(claimed or {})}
    entries = {
        name: checkpoints.FileEntry(len(data), hashlib.sha256(data).hexdigest()) for name, data in contents.items()
    }
    digest = checkpoints._digest(iteration, entries)
    folder = root / f"step-{iteration:06d}-{digest[:8]}"
    folder.mkdir()
    for name, data in {"state.json": b"{}", **files}.items():
        (folder / name).write_bytes(data)
    info = checkpoints.CheckpointInfo(checkpoints.open_store(root), folder.name, iteration, 0.0, digest, entries)
    (folder / "manifest.json").write_bytes(manifest or checkpoints._manifest_bytes(info))
    return folder.name


def test_prune_does_not_count_a_truncated_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 10, tensors(1), STATE)
    newer = save(tmp_path, 20, tensors(2), STATE)
    _truncate(tmp_path / newer.folder / "adapter.safetensors")
    assert prune(tmp_path, last(1)) == [newer.folder]
    assert latest_iteration(tmp_path) == 10


def test_prune_removes_nothing_where_nothing_is_whole(tmp_path: Path) -> None:
    info = save(tmp_path, 10, tensors(1), STATE)
    _truncate(tmp_path / info.folder / "adapter.safetensors")
    assert prune(tmp_path, last(1)) == []


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-1").mkdir()
    (tmp_path / "README").write_text("mine")
    save(tmp_path, 10, tensors(1), STATE)
    assert prune(tmp_path, last(1)) == []
    assert {"notes", "step-1", "README"} < {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ({"a": {1: "x"}}, r"state\['a'\] has the key 1"),
        ({"a": [0.0, float("nan")]}, r"state\['a'\]\[1\] is nan"),
        ({"a": {"b": torch.zeros(1)}}, r"state\['a'\]\['b'\] is a Tensor"),
        ({"a": b"x"}, r"is a bytes"),
    ],
)
def test_state_that_would_not_come_back_is_refused(tmp_path: Path, state: dict[str, Any], where: str) -> None:
    with pytest.raises(TypeError, match=where):
        save(tmp_path, 1, {}, state)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("group", ["", "../x", "a/b", ".x", "manifest.json"])
def test_names_of_groups_cannot_leave_the_folder(tmp_path: Path, group: str) -> None:
    with pytest.raises(ValueError, match="group of tensors"):
        save(tmp_path, 1, {group: {}}, {})


def test_listings_are_not_cached() -> None:
    store = checkpoints.open_store("memory://x")
    assert store._files.dircache.use_listings_cache is False  # type: ignore[attr-defined]


def test_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(ValueError, match="nosuch"):
        checkpoints.open_store("nosuch://bucket/run")

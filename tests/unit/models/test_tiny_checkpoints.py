"""Tiny checkpoints: the same everywhere, built once, and never seen half written."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch
from safetensors.torch import load_file

from digenrl.models.checkpoint import CheckpointError, locate
from digenrl.models.tiny import BUILDERS, build, tiny_checkpoint


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "digenrl" / "tiny"


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return {
        f"{path.parent.name}/{name}": tensor
        for path in sorted(folder.glob("*/*.safetensors"))
        for name, tensor in load_file(path).items()
    }


@pytest.mark.parametrize("name", list(BUILDERS))
def test_weights_follow_from_the_name_alone(name: str, cache: Path) -> None:
    before = torch.random.get_rng_state()
    folder = Path(locate(f"tiny:{name}"))
    torch.manual_seed(5)
    again = build(name).transformer.state_dict()
    torch.random.set_rng_state(before)
    assert folder.parent == cache and (folder / "model_index.json").is_file()
    saved = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    assert saved.keys() == again.keys() and all(torch.equal(saved[key], again[key]) for key in saved)
    assert sum(tensor.numel() for tensor in _weights(folder).values()) < 1_000_000


def test_the_second_use_finds_the_first(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tiny_checkpoint("wan")
    monkeypatch.setattr("digenrl.models.tiny._save", lambda name, folder: pytest.fail("built again"))
    assert tiny_checkpoint("wan") == first
    assert list(cache.iterdir()) == [first]


def test_several_at_once_get_the_same(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them build, one is kept."""

    def save(name: str, folder: Path) -> None:
        (folder / "part").mkdir(parents=True)
        everyone.wait()

    everyone = Barrier(3, timeout=30)
    monkeypatch.setattr("digenrl.models.tiny._save", save)
    with ThreadPoolExecutor(3) as pool:
        found = set(pool.map(tiny_checkpoint, ["wan"] * 3))
    assert len(found) == 1 and list(cache.iterdir()) == list(found)


def test_a_failed_build_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(name: str, folder: Path) -> None:
        folder.mkdir()
        raise RuntimeError("disk full")

    monkeypatch.setattr("digenrl.models.tiny._save", save)
    with pytest.raises(RuntimeError, match="disk full"):
        tiny_checkpoint("flux")
    assert list(cache.iterdir()) == []


def test_an_unknown_name_is_a_sentence() -> None:
    with pytest.raises(CheckpointError, match=r"'tiny:fluks' is no tiny checkpoint; did you mean tiny:flux\?"):
        locate("tiny:fluks")


def test_building_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    for name in BUILDERS:
        tiny_checkpoint(name)
    assert capfd.readouterr() == ("", "")

"""`digenrl sample`, `evaluate` and `doctor` on a run directory with real weights."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner, Result

from digenrl.config.load import load_config
from digenrl.data.evaluate_tiny_sd3 import load
from digenrl.loop import LoopResult, train
from digenrl.models.checkpoint import locate
from digenrl.models.registry import save_lora
from digenrl.rewards.base import Scored
from flows.cli import app
from flows.commands.sample import slug
from flows.inference import Inference
from flows.weights import newest_weights
from storage import checkpoints
from storage.runs import RunDirectory
from theirs import drawn_by

NAME = "tiny-smoke-1"


@dataclass(frozen=True)
class Trained:
    """A home with one run, and its model."""

    home: Path
    directory: RunDirectory
    inference: Inference


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run whose checkpoint holds an adapter a little away from the start."""
    home = tmp_path_factory.mktemp("home")
    config = load_config("tiny-smoke")
    directory = RunDirectory.create(home, "tiny-smoke", config)
    inference = Inference(config)
    generator = torch.Generator().manual_seed(1)
    adapter = {n: w + 0.02 * torch.randn(w.shape, generator=generator) for n, w in inference.base.items()}
    checkpoints.save(directory.checkpoints, 2, {"adapter": adapter, "optimizer": {"step": torch.tensor(4)}}, {})
    return Trained(home, directory, inference)


@pytest.fixture(autouse=True)
def _home(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIGENRL_HOME", str(trained.home))


@pytest.fixture
def without_checkpoint(trained: Trained) -> Iterator[None]:
    hidden = trained.directory.checkpoints.with_name("hidden")
    trained.directory.checkpoints.rename(hidden)
    yield
    hidden.rename(trained.directory.checkpoints)


def digenrl(*argv: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, list(argv))
    assert result.exit_code == code, result.output
    return result


def drawn(*argv: str) -> bytes:
    """The file that `sample` wrote."""
    (path,) = digenrl("sample", NAME, *argv).stdout.split()
    return Path(path).read_bytes()


def test_sample_is_a_function_of_weights_prompt_and_seed(trained: Trained) -> None:
    first = drawn("--prompt", "042", "--seed", "1")
    path = trained.directory.path / "samples" / "042-seed1.png"
    assert path.read_bytes() == first
    path.unlink()
    assert drawn("--prompt", "042", "--seed", "1") == first
    assert Image.open(io.BytesIO(first)).size == (24, 12)
    others = [
        drawn("--prompt", "042", "--seed", "2"),
        drawn("--prompt", "043", "--seed", "1"),
        drawn("--prompt", "042", "--seed", "1", "--base"),
    ]
    assert len({first, *others}) == 4
    assert path.read_bytes() == first, "each has a file of its own"


def test_diffusers_draws_the_same_picture_from_the_same_seed(trained: Trained) -> None:
    config = trained.directory.read_config()
    pipeline: Any = load(locate(config.model.path))

    theirs = partial(drawn_by, pipeline, config.evaluation.num_steps)

    def ours(*argv: str) -> np.ndarray:
        return np.asarray(Image.open(io.BytesIO(drawn("--prompt", "042", "--seed", "1", *argv)))).astype(int)

    assert np.abs(theirs() - ours("--base")).max() <= 1
    adapter = newest_weights(trained.directory, trained.directory.read_config()).adapter
    with tempfile.TemporaryDirectory() as lora:
        save_lora(config.model.family, adapter, config.lora, Path(lora))
        pipeline.load_lora_weights(lora)
    assert np.abs(theirs() - ours()).max() <= 1
    assert np.abs(ours() - ours("--base")).max() > 1, "the weights make a difference"


def test_sample_draws_each_prompt_by_itself(trained: Trained) -> None:
    argv = ("sample", NAME, "--prompt", "042", "--prompt", "042", "--seed", "3")
    paths = [Path(line) for line in digenrl(*argv).stdout.split()]
    assert [path.name for path in paths] == ["042-seed3.png", "042-seed3-2.png"]
    assert paths[0].read_bytes() != paths[1].read_bytes(), "the same prompt twice is two samples"
    assert paths[0].read_bytes() == drawn("--prompt", "042", "--seed", "3")


def test_sample_enlarges_without_smoothing(tmp_path: Path) -> None:
    out = tmp_path / "large.png"
    result = digenrl("sample", NAME, "--prompt", "042", "--scale", "6", "--out", str(out))
    assert result.stdout.split() == [str(out)]
    assert "--scale" not in result.stderr
    large, small = Image.open(out), Image.open(io.BytesIO(drawn("--prompt", "042")))
    assert np.array_equal(np.asarray(large)[::6, ::6], np.asarray(small))
    assert large.size == (144, 72)
    assert "24 x 12 pixels; --scale 6 makes it larger" in digenrl("sample", NAME, "--prompt", "042").stderr


@pytest.mark.parametrize(
    ("prompt", "notes"),
    [
        ("042", []),
        ("é2", ["prompt 'é2': the model's tokenizers do not know: é"]),
        ("0421", ["prompt '0421': the model reads its first 3 tokens of 4"]),
    ],
)
def test_sample_says_what_the_model_does_not_see(prompt: str, notes: list[str]) -> None:
    lines = digenrl("sample", NAME, "--prompt", prompt, "--scale", "6").stderr.splitlines()
    assert [line.removeprefix("note: ") for line in lines if line.startswith("note: ")] == notes
    assert len(lines) == len(notes) + 1


@pytest.mark.usefixtures("without_checkpoint")
def test_sample_takes_the_lora_where_there_is_no_checkpoint(trained: Trained) -> None:
    refused = digenrl("sample", NAME, "--prompt", "042", code=2)
    assert "has no trained weights yet" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert drawn("--prompt", "042", "--base")


def test_sample_of_the_lora_is_that_of_its_checkpoint(trained: Trained) -> None:
    of_checkpoint = drawn("--prompt", "042")
    config, adapter = (
        trained.directory.read_config(),
        newest_weights(trained.directory, trained.directory.read_config()).adapter,
    )
    lora, hidden = trained.directory.path / "lora", trained.directory.checkpoints.with_name("hidden")
    save_lora(config.model.family, adapter, config.lora, lora)
    trained.directory.checkpoints.rename(hidden)
    try:
        assert drawn("--prompt", "042") == of_checkpoint
    finally:
        hidden.rename(trained.directory.checkpoints)
        (lora / "pytorch_lora_weights.safetensors").unlink()
        lora.rmdir()


@pytest.mark.parametrize(
    ("argv", "fragment"),
    [
        (("sample", NAME), "--prompt TEXT"),
        (("sample", NAME, "--prompt", "04\udcff"), "'04\\udcff' holds the lone surrogate U+DCFF"),
        (("sample", NAME, "--prompt", "1", "--scale", "100000"), "makes 2400000 x 1200000 pixels of 24 x 12; use at"),
        (("sample", NAME, "--prompt", "1", "--prompt", "2", "--out", "x.png"), "2 prompts"),
        (("sample", NAME, "--prompt", "1", "--out", "x.jpg"), "expected the name of a .png file"),
        (("sample", NAME, "--prompt", "1", "--out", "no/such/x.png"), "there is no directory no/such"),
        (("sample", "tiny-smoke-11", "--prompt", "1"), "did you mean tiny-smoke-1?"),
        (("evaluate", "tiny-smoke-11"), "did you mean tiny-smoke-1?"),
    ],
)
def test_mistakes_are_refused(argv: tuple[str, ...], fragment: str) -> None:
    result = digenrl(*argv, code=2)
    assert result.stderr.startswith("digenrl: ")
    assert fragment in result.stderr


@pytest.mark.parametrize(
    "prompt", ["", "  ", "../../etc/passwd", "/root", "..", "a" * 300, "日本", "x\ny", "042!", "a b"]
)
def test_a_slug_is_a_file_name(prompt: str) -> None:
    name = slug(prompt)
    assert 0 < len(name) < 60
    assert name.isascii()
    assert name[0].isalnum()
    assert not set(name) & set("/\\ \n\0")


def test_slugs_are_legible_and_distinct() -> None:
    assert (slug("042"), slug("a red fox")) == ("042", "a-red-fox")
    prompts = ["042", "042!", "042?", "a" * 300, "a" * 301, "日本", "日"]
    assert len({slug(prompt) for prompt in prompts}) == len(prompts)


class _Enough(Exception):
    """The evaluation of the base model is done."""


def _base_evaluation(trained: Trained) -> dict[int, float]:
    """Held-out rewards as the run itself finds them before its first iteration."""
    kept: list[LoopResult] = []

    def stop(result: LoopResult) -> None:
        kept.append(result)
        raise _Enough

    with pytest.raises(_Enough):
        train(trained.directory.read_config(), on_iteration=stop)
    return {s.group: score.value for s, score in kept[0].evaluations[0].items() if isinstance(score, Scored)}


def test_evaluate_agrees_with_the_run_and_says_what_changed(trained: Trained) -> None:
    output = digenrl("evaluate", NAME).stdout
    path = trained.directory.path / "evaluation.json"
    found = json.loads(path.read_bytes())
    assert str(path) in output
    assert (found["run"], found["iterations"], found["prompts"], found["seed"]) == (NAME, 2, 16, 0)
    assert found["failed"] == {"before": 0, "after": 0}
    per_prompt = found["per_prompt"]
    assert {i: entry["before"]["ocr"] for i, entry in enumerate(per_prompt)} == _base_evaluation(trained)

    ocr = found["scores"]["ocr"]
    rises = [entry["after"]["ocr"] - entry["before"]["ocr"] for entry in per_prompt]
    assert ocr["rise"] == pytest.approx(np.mean(rises), abs=1e-6)
    assert ocr["pairs"] == 16
    assert any(rises), "the weights make a difference"
    assert ocr["rise_ci95"][0] <= ocr["rise"] <= ocr["rise_ci95"][1]
    assert "mixed" not in found["scores"], "a single reward of weight 1"
    exact = [entry["after"]["ocr"] == 1 for entry in per_prompt]
    assert found["scores"]["exact_match"]["after"] == pytest.approx(np.mean(exact), abs=1e-6)
    for row in ("ocr", "exact match", f"{ocr['before']:.3f} → {ocr['after']:.3f}"):
        assert row in output


def test_evaluate_takes_prompts_and_seed(trained: Trained) -> None:
    digenrl("evaluate", NAME, "--prompts", "5", "--seed", "7")
    path = trained.directory.path / "evaluation.json"
    first = json.loads(path.read_bytes())
    assert (len(first["per_prompt"]), first["seed"]) == (5, 7)
    digenrl("evaluate", NAME, "--prompts", "5", "--seed", "7")
    assert json.loads(path.read_bytes()) == first


def test_evaluate_needs_held_out_prompts(trained: Trained) -> None:
    config = load_config("tiny-smoke", ["data.held_out=null"])
    RunDirectory.create(trained.home, "tiny-smoke", config, "without-prompts")
    assert "data.held_out is not set" in digenrl("evaluate", "without-prompts", code=2).stderr


def test_doctor_finds_nothing_missing_here(trained: Trained) -> None:
    before = set(trained.home.rglob("*"))
    output = digenrl("doctor").stdout
    for line in (
        "reads '042'",
        "package:tiny-sd3",
        "2026.7.1  (==2026.7.1)",
        str(trained.home),
        "no package is hidden",
    ):
        assert line in output
    assert "missing" not in output.replace("is missing; try: digenrl train", "")
    assert set(trained.home.rglob("*")) == before


def test_doctor_fails_where_something_required_is_missing(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIGENRL_HOME", str(trained.directory.config_path / "below-a-file"))
    output = digenrl("doctor", code=1).stdout
    assert "missing: DIGENRL_HOME" in output
    assert "export DIGENRL_HOME=" in output

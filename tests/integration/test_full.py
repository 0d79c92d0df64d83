"""`method: full` from the command line: killed, resumed, exported, drawn with and evaluated."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import SD3Transformer2DModel
from PIL import Image
from safetensors.torch import load_file
from typer.testing import CliRunner

from digenrl.config.load import load_config
from digenrl.data.evaluate_tiny_sd3 import load
from digenrl.loop import train
from digenrl.models.checkpoint import locate
from digenrl.policy import adapter_hash
from flows.cli import app
from flows.services import ensure
from program import Home, until
from storage import checkpoints
from storage.runs import RunDirectory
from theirs import drawn_by

NAME = "whole"
OVERRIDES = [
    "method=full",
    "iterations=12",
    "evaluation.every=0",
    "checkpoint.every=1",
    "algorithm.prompts_per_iteration=2",
    "algorithm.samples_per_prompt=3",
    "algorithm.updates_per_iteration=1",
    "algorithm.num_steps=6",
    "optimizer.learning_rate=1e-3",
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Of a run that was killed on its way and resumed."""
    path = tmp_path_factory.mktemp("full") / "home"
    found = RunDirectory(path / NAME)
    with Home(path) as home, ensure(owner="pytest", home=path):
        program = home.start("train", "tiny-smoke", *OVERRIDES, "--name", NAME)
        until(lambda: list(found.checkpoints.glob("step-00000[2-9]*/manifest.json")), 90, "a checkpoint")
        os.kill(program.process.pid, signal.SIGKILL)
        program.wait()
        assert not list(found.checkpoints.glob("step-000012*")), "it was killed on its way"
        assert not (found.path / "transformer").exists()
        resumed = home.run("resume", NAME)
        assert f"transformer {found.path / 'transformer'}" in resumed.stdout
    return found


def digenrl(*argv: str) -> str:
    result = CliRunner().invoke(app, list(argv))
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(autouse=True)
def _home(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIGENRL_HOME", str(directory.path.parent))


def test_it_ends_with_the_weights_of_the_plain_loop(directory: RunDirectory) -> None:
    torch.set_num_threads(1)
    info = checkpoints.latest(directory.checkpoints)
    assert info is not None and info.iteration == 12
    found, wanted = checkpoints.load(info), train(directory.read_config())
    assert adapter_hash(found.tensors["adapter"]) == adapter_hash(wanted.adapter.weights)
    assert adapter_hash(found.tensors["optimizer"]) == adapter_hash(wanted.optimizer.to_tensors())


def test_diffusers_loads_the_folder_and_draws_the_same_picture(directory: RunDirectory) -> None:
    summary = directory.read_summary()
    assert summary is not None and summary["lora"] is None
    transformer = SD3Transformer2DModel.from_pretrained(summary["transformer"])
    info = checkpoints.latest(directory.checkpoints)
    assert info is not None
    trained = checkpoints.load(info).tensors["adapter"]
    assert all(torch.equal(trained[name], weight) for name, weight in transformer.named_parameters())
    config = directory.read_config()
    pipeline: Any = load(locate(config.model.path))

    theirs = partial(drawn_by, pipeline, config.evaluation.num_steps)

    def ours(*argv: str) -> np.ndarray:
        (path,) = digenrl("sample", NAME, "--prompt", "042", "--seed", "1", *argv).split()
        return np.asarray(Image.open(path)).astype(int)

    assert np.abs(theirs() - ours("--base")).max() <= 1
    pipeline.transformer = transformer
    assert np.abs(theirs() - ours()).max() <= 1
    assert np.abs(ours() - ours("--base")).max() > 1, "the weights make a difference"


def test_it_is_evaluated_from_its_folder_too(directory: RunDirectory) -> None:
    def scores() -> dict[str, Any]:
        digenrl("evaluate", NAME, "--prompts", "4")
        return dict(json.loads((directory.path / "evaluation.json").read_bytes()))

    of_checkpoint = scores()
    hidden = directory.checkpoints.rename(directory.checkpoints.with_name("hidden"))
    try:
        of_folder = scores()
    finally:
        hidden.rename(directory.checkpoints)
    assert of_folder["weights"] == str(directory.path / "transformer")
    assert of_folder["per_prompt"] == of_checkpoint["per_prompt"]
    assert Path(of_folder["weights"], "config.json").is_file()


def test_a_bfloat16_run_exports_what_it_draws_with(tmp_path: Path) -> None:
    from digenrl.models.registry import load_model, read_transformer, save_transformer

    config = load_config("tiny-smoke", [*OVERRIDES, "model.dtype=bfloat16"])
    weights = {n: 1.001 * p.float() for n, p in load_model(config.model).transformer.named_parameters()}
    save_transformer(config.model, weights, tmp_path)
    saved = load_file(tmp_path / "diffusion_pytorch_model.safetensors")
    assert {saved[name].dtype for name in weights} == {torch.bfloat16}
    back = read_transformer(tmp_path)
    assert all(torch.equal(back[n], w.bfloat16().float()) for n, w in weights.items())

"""`digenrl doctor --model`: a checkpoint against its own pipeline."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from digenrl.models.checkpoint import locate
from digenrl.models.pipeline import PipelineModel
from flows.cli import app

CHECKS = 11


def _doctor(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["doctor", "--model", *arguments])
    return done.exit_code, " ".join(done.output.split())


@pytest.mark.parametrize(("path", "dtype"), [("package:tiny-sd3", "float32"), ("tiny:wan", "bfloat16")])
def test_a_sound_checkpoint_passes_every_check(path: str, dtype: str) -> None:
    code, output = _doctor(path, "--dtype", dtype)
    assert code == 0, output
    assert output.count("at most") + output.count("at least") == CHECKS
    assert "computed here as by its own pipeline" in output and "FAILED" not in output


def test_a_model_that_computes_something_else_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timestep that is off by a tenth of a step: a rollout still makes pictures."""
    right = PipelineModel._timestep
    monkeypatch.setattr(PipelineModel, "_timestep", lambda self, sigma: right(self, sigma) + 10)
    code, output = _doctor("package:tiny-sd3")
    assert code == 1
    assert "failed: rollout is the pipeline's call, rollout is the pipeline's call" in output


def _copied(path: str, folder: Path) -> Path:
    return Path(shutil.copytree(locate(path), folder / "copy"))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    copy = _copied("tiny:flux", tmp_path)
    (copy / "vae" / "config.json").unlink()
    assert _doctor(str(copy))[0] == 2
    assert f"{copy}/vae/config.json is missing" in _doctor(str(copy))[1]


def test_missing_weights_are_named(tmp_path: Path) -> None:
    copy = _copied("tiny:flux", tmp_path)
    (copy / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    code, output = _doctor(str(copy))
    assert code == 2 and "could not be loaded; expected a FluxPipeline there" in output
    assert "diffusion_pytorch_model" in output


def test_another_pipeline_is_named(tmp_path: Path) -> None:
    copy = _copied("tiny:flux", tmp_path)
    index = json.loads((copy / "model_index.json").read_text())
    (copy / "model_index.json").write_text(json.dumps(index | {"_class_name": "AuraFlowPipeline"}))
    code, output = _doctor(str(copy))
    assert code == 2 and "holds a AuraFlowPipeline; the pipelines that can be trained are" in output
    code, output = _doctor("nobody/nothing")
    assert code == 2 and "nobody/nothing is a hub id: say of which family it is" in output

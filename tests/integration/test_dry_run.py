"""`digenrl train PRESET --dry-run` as a user types it: images, video, and an algorithm without likelihoods."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from program import Home


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with Home(tmp_path / "runs") as made:
        yield made


def scratch(name: str) -> list[Path]:
    """Directories of dry runs of this name. The temporary directory is everybody's: claims of ports are there too."""
    return list(Path(tempfile.gettempdir()).glob(f"digenrl-dry-run-*/{name}-*"))


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (
            ("sd35-medium-flow_grpo", "algorithm.samples_per_prompt=16"),
            [
                "48 groups of 16 → 2 groups of 4",
                "guidance 4.5, KL 0.04",
                "about .* on 8 x NVIDIA H100",
                "a GPU of 24 GB",
            ],
        ),
        (("video.yaml",), ["240 x 416 x 33 → tiny:wan 16 x 32 x 5", "19 of 20 steps trained"]),
        (("forward.yaml",), ["tiny:flux", "diffusion_nft, 2 of 8 steps", "replay +none"]),
    ],
    ids=["image", "video", "forward"],
)
def test_one_iteration_runs_passes_its_gates_and_leaves_nothing(
    home: Home, argv: tuple[str, ...], parts: list[str]
) -> None:
    mark = f"-{os.getpid()}"
    argv = tuple(text.replace(".yaml", f"{mark}.yaml") for text in argv)
    (home.user / f"video{mark}.yaml").write_text("extends: wan2.1-1.3b-flow_grpo\n")
    (home.user / f"forward{mark}.yaml").write_text("extends: flux1-dev-diffusion_nft\nlora: {rank: 8}\n")
    output = home.run("train", *argv, "--dry-run").stdout
    name = argv[0].removesuffix(".yaml")
    for part in (f"✓ {name}: one iteration passed its gates", "weights +LoRA on [1-9][0-9]* layers, moved", *parts):
        assert re.search(part, output), f"{part} in\n{output}"
    assert output.rstrip().endswith(f"digenrl train {' '.join(argv)}")
    assert all(len(line.rstrip()) <= 100 for line in output.splitlines())
    assert not list(home.path.iterdir())
    assert mark not in name or not scratch(name)


def test_a_gate_that_fails_is_told_and_the_log_stays(home: Home) -> None:
    stderr = home.run("train", "flux1-dev-dance_grpo", "gates.max_logp_gap=1e-12", "--dry-run", code=1).stderr
    assert re.search(
        r"digenrl: the dry run failed: log-probs of .* differ by up to .* gates.max_logp_gap=1e-12", stderr
    )
    log = Path(stderr.rpartition("its log is ")[2].strip())
    assert "differ by up to" in log.read_text()
    shutil.rmtree(log.parents[1])


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (("flux1-dev-flow_gpro",), "did you mean flux1-dev-flow_grpo"),
        (("flux1-dev-flow_grpo", "algorithm.clip_rnage=1"), "did you mean algorithm.clip_range?"),
        (("flux1-dev-flow_grpo", "rewards.0.name=orc"), "did you mean ocr?"),
        (("flux1-dev-flow_grpo", "data.prompts=package:wrds-train"), "did you mean words-train"),
        (("flux1-dev-flow_grpo", "lora.targets=[to_x]"), "lora.targets: 'to_x' is the name of no layer"),
        (("flux1-dev-flow_grpo", "--name", "mine"), "--dry-run leaves no run behind, so --name means nothing"),
    ],
)
def test_mistakes_are_sentences_before_anything_starts(home: Home, argv: tuple[str, ...], sentence: str) -> None:
    result = CliRunner().invoke(app, ["train", *argv, "--dry-run"])
    assert result.exit_code == 2, result.output
    assert sentence in result.stderr
    assert len(result.stderr.splitlines()) <= 3 and not result.stdout
    assert not list(home.path.iterdir())

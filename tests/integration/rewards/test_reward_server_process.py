"""A real scorer in a second virtual environment, behind a real server process, asked by the reward of a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest

from digenrl.config import RequestConfig, RewardConfig
from digenrl.rewards.base import Failed, PromptRecord, Scored
from digenrl.rewards.mix import RewardMix
from digenrl.rewards.registry import make_reward
from second_environment import REPOSITORY, second_environment

DEADLINE_S = 60.0

#: Colourfulness (Hasler and Süsstrunk 2003), in a module that exists in the second environment alone.
SCORER = """
import importlib.util
import numpy as np

assert not any(importlib.util.find_spec(name) for name in ("torch", "transformers", "prefect", "httpx", "yaml"))


def colourfulness(images, prompts):
    red, green, blue = np.moveaxis(images.astype(np.float64), -1, 0)
    first, second = red - green, (red + green) / 2 - blue
    axes = (1, 2, 3)
    spread = np.sqrt(first.var(axes) + second.var(axes))
    shift = np.sqrt(first.mean(axes) ** 2 + second.mean(axes) ** 2)
    return spread + 0.3 * shift
"""


@contextmanager
def served(*arguments: str, env: dict[str, str] | None = None) -> Iterator[str]:
    """The address of a server that is ready within the block."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")} | (env or {})
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=clean) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert " at http://" in line, line
            url = line.split(" at ")[1].split()[0]
            deadline = time.monotonic() + DEADLINE_S
            while not httpx.get(f"{url}/ready").is_success:
                assert time.monotonic() < deadline, f"{url} is not ready after {DEADLINE_S:.0f} s"
                time.sleep(0.02)
            yield url
            process.send_signal(signal.SIGTERM)
            # It ends in good order, and then of the signal, as programs do.
            assert process.wait(10) == -signal.SIGTERM
        finally:
            process.kill()


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environment") / "venv"
    found = second_environment(folder, REPOSITORY / "recipes/rewards/server.txt")
    (next(folder.glob("lib/*/site-packages")) / "colours.py").write_text(SCORER)
    return found


def test_a_scorer_in_an_environment_of_its_own_scores_a_runs_samples(python: Path) -> None:
    names = subprocess.run(
        [python, "-c", "import sys, digenrl.rewards.server; print('torch' in sys.modules, sys.prefix)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert names.stdout.split() == ["False", str(python.parents[1])] and sys.prefix != str(python.parents[1])
    grey, red = np.full((1, 8, 12, 3), 100, np.uint8), np.zeros((1, 8, 12, 3), np.uint8)
    red[..., 0] = 200
    halves = red.copy()
    halves[:, :, 6:] = (0, 0, 200)
    images = np.stack([grey, red, halves])
    prompts = [PromptRecord(f"p{i}", "a picture") for i in range(3)]
    command = (str(python), "-m", "digenrl.rewards.server", "python:colours:colourfulness", "--port", "0")
    env = {"DIGENRL_REWARD_TOKEN": "secret"}
    with served(*command, "--version", "hasler-2003", env=env) as url, pytest.MonkeyPatch.context() as patch:
        request = RequestConfig(token_env="COLOUR_TOKEN", samples=2, attempts=2, backoff_s=0.01)
        config = RewardConfig(name="http", label="colours", url=url, version="hasler-2003", request=request)
        assert make_reward(config).problem() is None
        assert "serves version" in (make_reward(config.model_copy(update={"version": "2"})).problem() or "")
        patch.setenv("COLOUR_TOKEN", "wrong")
        assert all(isinstance(s, Failed) and "401" in s.reason for s in make_reward(config)(images, prompts))
        patch.setenv("COLOUR_TOKEN", "secret")
        mixed = RewardMix.of([config]).load()(images, prompts)
    values = [score.value for score in mixed.scores if isinstance(score, Scored)]
    # By hand: grey has no colour; red is 200 in one direction and 100 in the other; half blue turns both.
    assert values == [
        0.0,
        pytest.approx(0.3 * np.hypot(200, 100)),
        pytest.approx(np.hypot(100, 150) + 0.3 * np.hypot(100, 50)),
    ]


def test_a_packaged_reward_gives_the_same_values_through_its_server() -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, 2, 16, 24, 3), np.uint8)
    prompts = [PromptRecord(f"p{i}", "noise") for i in range(3)]
    command = (sys.executable, "-m", "flows.cli", "reward-server", "jpeg_compressibility", "--port", "0")
    with served(*command, env={"PYTHONPATH": str(REPOSITORY), "PYTHONSAFEPATH": "1"}) as url:
        for image_format in ("png", "webp"):
            config = RewardConfig(name="http", url=url, request=RequestConfig(image_format=image_format))
            assert make_reward(config)(images, prompts) == make_reward(RewardConfig(name="jpeg_compressibility"))(
                images, prompts
            )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("ocrr",), "did you mean ocr?"),
        (("ocr", "path=x"), "ocr has no use for path"),
        (("python:no_such_module:f",), "cannot be imported"),
        (("ocr", "--token-file", "/nowhere"), "--token-file /nowhere cannot be read"),
    ],
)
def test_a_server_that_cannot_start_says_why_and_exits_with_2(arguments: tuple[str, ...], words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "digenrl.rewards.server", *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr

"""The pipeline that ships with the package, used as anyone would use it."""

import logging
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from digenrl.data.evaluate_tiny_sd3 import generate, load
from digenrl.data.numbers import FONTS, Style, render, split
from digenrl.prompts import load_prompts
from digenrl.rewards.base import Scored
from digenrl.rewards.ocr import OcrReward, exact_match

DATA = Path(str(files("digenrl.data")))
ROOT = DATA.parent.parent
PROMPTS = load_prompts("package:numbers-held-out")


@pytest.fixture(scope="module")
def pipeline() -> StableDiffusion3Pipeline:
    return load(str(DATA / "tiny-sd3"))


@pytest.fixture(scope="module")
def ocr() -> OcrReward:
    return OcrReward()


@contextmanager
def library_warnings() -> Iterator[list[logging.LogRecord]]:
    """What diffusers and transformers log from level WARNING up; neither propagates to the root logger."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("diffusers", "transformers")]
    for logger in loggers:
        logger.addHandler(handler)
    yield records
    for logger in loggers:
        logger.removeHandler(handler)


def mean_reward(ocr: OcrReward, images: np.ndarray, count: int) -> float:
    scores = ocr(images[:, None], PROMPTS[:count])
    assert all(isinstance(score, Scored) for score in scores)
    return float(np.mean([score.value for score in scores]))


def test_it_loads_and_generates_without_a_word() -> None:
    with library_warnings() as records:
        pipeline = load(str(DATA / "tiny-sd3"))
        generate(pipeline, ["042"], seed=0, padding=0, steps=2)
    assert [record.getMessage() for record in records] == []
    assert pipeline.text_encoder_3 is None and pipeline.scheduler.config.shift == 1.0
    parts = (pipeline.vae, pipeline.text_encoder, pipeline.text_encoder_2, pipeline.transformer)
    assert sum(p.numel() for part in parts for p in part.parameters()) < 1.3e6
    assert {p.dtype for part in parts for p in part.parameters()} == {torch.float32}


@pytest.mark.parametrize("font", FONTS)
def test_ocr_reads_clean_numbers(ocr: OcrReward, font: str) -> None:
    numbers = split()[1]
    readings = ocr.recogniser(render(numbers, [Style(font=font)] * len(numbers)))
    assert np.mean([exact_match(reading, number) for reading, number in zip(readings, numbers, strict=True)]) >= 0.98


def test_ocr_reads_what_the_autoencoder_keeps(pipeline: StableDiffusion3Pipeline, ocr: OcrReward) -> None:
    numbers = split()[1]
    pictures = render(numbers, [Style()] * len(numbers))
    with torch.no_grad():
        images = torch.from_numpy(pictures).permute(0, 3, 1, 2) / 127.5 - 1
        decoded = pipeline.vae.decode(pipeline.vae.encode(images).latent_dist.mean).sample
    kept = ((decoded.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    assert mean_reward(ocr, kept, len(numbers)) >= 0.97


def test_held_out_numbers_are_half_legible_which_leaves_headroom(
    pipeline: StableDiffusion3Pipeline, ocr: OcrReward
) -> None:
    images = generate(pipeline, [p.text for p in PROMPTS], seed=0, padding=0)
    assert 0.5 < mean_reward(ocr, images, len(PROMPTS)) < 0.65


@pytest.mark.parametrize("padding", [0, 8, 256])
def test_prompts_are_followed_whatever_the_padding_of_the_stock_call(
    pipeline: StableDiffusion3Pipeline, ocr: OcrReward, padding: int
) -> None:
    images = generate(pipeline, [p.text for p in PROMPTS[:16]], seed=0, padding=padding)
    right = mean_reward(ocr, images, 16)
    shuffled = mean_reward(ocr, np.roll(images, 1, axis=0), 16)
    assert right > 0.35 and right > shuffled + 0.15


def test_the_wheel_holds_pipeline_and_prompts(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "runs", "__pycache__", "tests"))
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=120)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    expected = {
        path.relative_to(ROOT).as_posix()
        for folder in ("tiny-sd3", "prompts")
        for path in (DATA / folder).rglob("*")
        if path.is_file()
    }
    assert {"numbers", "scenes", "styles", "words"} <= {Path(path).name.split("-")[0] for path in expected}
    assert expected <= set(zipfile.ZipFile(wheel).namelist())

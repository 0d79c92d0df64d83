"""The JPEG rewards: DDPO's sizes and signs."""

import io

import numpy as np
import pytest
from PIL import Image

from digenrl.rewards.base import PromptRecord, Scored
from digenrl.rewards.jpeg import JpegCompressibility, JpegIncompressibility

PLAIN = np.full((64, 64, 3), 127, np.uint8)
NOISE = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)


def prompts(count: int) -> list[PromptRecord]:
    return [PromptRecord(str(i), "anything") for i in range(count)]


def test_value_is_the_file_size_in_thousands_of_bytes() -> None:
    buffer = io.BytesIO()
    Image.fromarray(NOISE).save(buffer, "JPEG", quality=95)
    assert JpegIncompressibility()(NOISE[None, None], prompts(1)) == [Scored(len(buffer.getvalue()) / 1000)]


def test_compressibility_prefers_plain_pictures_and_incompressibility_detail() -> None:
    images = np.stack([PLAIN, NOISE])[:, None]
    plain, noise = JpegCompressibility()(images, prompts(2))
    assert noise.value < plain.value < 0
    assert [s.value for s in JpegIncompressibility()(images, prompts(2))] == [-plain.value, -noise.value]


def test_a_videos_value_is_the_mean_of_its_frames() -> None:
    reward = JpegIncompressibility()
    single = [s.value for s in reward(np.stack([PLAIN, NOISE])[:, None], prompts(2))]
    assert reward(np.stack([PLAIN, NOISE])[None], prompts(1)) == [Scored(pytest.approx(sum(single) / 2))]


def test_any_prompt_will_do() -> None:
    JpegCompressibility().validate(prompts(3))

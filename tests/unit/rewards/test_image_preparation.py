"""Our preprocessing against transformers' own Pillow image processors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from benchmarks.tiny_rewards import CLIP_PREPROCESSING, pictures
from digenrl.rewards.pictures import ImagePreparation, chunks_of

SQUARE = {"size": {"height": 20, "width": 26}, "resample": 2, "image_mean": [0.5] * 3, "image_std": [0.2] * 3}


@pytest.mark.parametrize(("height", "width"), [(37, 61), (61, 37), (30, 30), (12, 24), (224, 300)])
@pytest.mark.parametrize(
    ("processor", "settings"),
    [
        (CLIPImageProcessorPil, CLIP_PREPROCESSING),
        (CLIPImageProcessorPil, CLIP_PREPROCESSING | {"crop_size": {"height": 41, "width": 20}}),
        (CLIPImageProcessorPil, CLIP_PREPROCESSING | {"size": {"shortest_edge": 33}, "do_normalize": False}),
        (ViTImageProcessorPil, SQUARE),
        (ViTImageProcessorPil, SQUARE | {"do_rescale": False, "resample": 0}),
    ],
    ids=["clip", "crop larger than the picture", "not normalised", "vit", "not rescaled"],
)
def test_pixels_are_those_of_transformers(processor: Any, settings: dict[str, Any], height: int, width: int) -> None:
    shown = pictures(3, height, width)
    wanted = np.asarray(processor(**settings)(list(shown), return_tensors="np")["pixel_values"])
    found = ImagePreparation.of(settings)(shown)
    assert found.dtype == np.float32 and found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, atol=2e-6 * np.abs(wanted).max())


def test_a_number_is_the_shortest_edge_where_a_crop_follows_and_else_a_square() -> None:
    assert ImagePreparation.of({"size": 30, "crop_size": 30}).shortest_edge == 30
    assert ImagePreparation.of({"size": 30}).size == (30, 30)
    with pytest.raises(ValueError, match="shortest_edge or height and width"):
        ImagePreparation.of({"size": {"longest_edge": 30}})


def test_chunks_cover_everything_in_order() -> None:
    assert [(part.start, part.stop) for part in chunks_of(5, 2)] == [(0, 2), (2, 4), (4, 5)]
    assert not list(chunks_of(0))

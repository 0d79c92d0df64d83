"""What each family generates, from the configurations of published checkpoints; no torch is needed for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from digenrl.models.registry import FAMILIES
from digenrl.models.sizes import SizeRule

#: The fields that matter, of SD3.5-medium, FLUX.1-dev, Qwen-Image, Wan2.1 and HunyuanVideo.
PUBLISHED = {
    "sd3": (
        {"block_out_channels": [128, 256, 512, 512]},
        {"in_channels": 16, "patch_size": 2, "pos_embed_max_size": 384},
    ),
    "flux": ({"block_out_channels": [128, 256, 512, 512]}, {"in_channels": 64, "patch_size": 1}),
    "qwen": ({"temperal_downsample": [False, True, True]}, {"in_channels": 64, "patch_size": 2}),
    "wan": ({"temperal_downsample": [False, True, True]}, {"in_channels": 16, "patch_size": [1, 2, 2]}),
    "hunyuan": (
        {"spatial_compression_ratio": 8, "temporal_compression_ratio": 4},
        {"in_channels": 16, "patch_size": 2, "patch_size_t": 1},
    ),
}


def rule_of(family: str) -> SizeRule:
    return FAMILIES[family].sizes(*PUBLISHED[family])


def test_every_family_is_here() -> None:
    assert PUBLISHED.keys() == FAMILIES.keys()


@pytest.mark.parametrize("family", ["sd3", "flux", "qwen"])
def test_pictures(family: str) -> None:
    rule = rule_of(family)
    assert rule.problems(512, 768, 1) == []
    assert rule.latent_shape(512, 768, 1) == (16, 64, 96) and rule.tokens(512, 768, 1) == 32 * 48
    assert rule.pixels((16, 64, 96)) == 512 * 768
    (problem,) = rule.problems(512, 768, 5)
    assert problem == "model.frames must be 1 for this checkpoint, which generates pictures, got 5"


@pytest.mark.parametrize("family", ["wan", "hunyuan"])
def test_videos(family: str) -> None:
    rule = rule_of(family)
    assert rule.problems(240, 416, 33) == [] and rule.problems(240, 416, 1) == []
    assert rule.latent_shape(240, 416, 33) == (16, 9, 30, 52) and rule.tokens(240, 416, 33) == 9 * 15 * 26
    assert rule.pixels((16, 9, 30, 52)) == 33 * 240 * 416
    (problem,) = rule.problems(240, 416, 32)
    assert problem.startswith("model.frames must be 1 more than a multiple of 4") and problem.endswith("nearest is 33")


def test_sizes_are_whole_patches_within_the_positions() -> None:
    height, width = rule_of("sd3").problems(500, 6160, 1, "here")
    assert height.startswith("model.height must be a multiple of 16 for here") and height.endswith("nearest is 496")
    assert width == "model.width must be at most 6144 for here, got 6160"
    assert rule_of("flux").problems(500, 6160, 1) == [height.replace("for here", "for this checkpoint")]
    assert "nearest is 16" in rule_of("wan").problems(1, 16, 1)[0]


def test_a_rule_is_found_without_torch() -> None:
    code = "import sys; from digenrl.models.registry import family_of; family_of('wan'); print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"

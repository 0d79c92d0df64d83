"""2 x 2 packing equals that of the pipelines, to the bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from diffusers import FluxPipeline, QwenImagePipeline

from digenrl.models.packing import pack, unpack

GOLDEN = Path(__file__).parents[2] / "golden" / "pack_latents__2x4x6x4.npz"


def test_equals_the_golden_vectors() -> None:
    golden = np.load(GOLDEN)
    latents, packed = (torch.from_numpy(golden[name]) for name in ("in_latents", "out_packed"))
    assert torch.equal(pack(latents), packed)
    assert torch.equal(unpack(packed, 6, 4), torch.from_numpy(golden["out_unpacked_flux"]))
    assert torch.equal(unpack(packed, 6, 4), torch.from_numpy(golden["out_unpacked_qwen"]).squeeze(2))


def test_equals_the_installed_pipelines() -> None:
    latents = torch.randn((2, 16, 4, 6), generator=torch.Generator().manual_seed(0))
    for pipeline in (FluxPipeline, QwenImagePipeline):
        assert torch.equal(pack(latents), pipeline._pack_latents(latents, 2, 16, 4, 6))
    assert torch.equal(unpack(pack(latents), 4, 6), latents)

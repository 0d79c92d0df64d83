"""Qwen-Image's guidance: golden values, and the gradient through its norms."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from digenrl.models.qwen import true_cfg

GOLDEN = Path(__file__).parents[2] / "golden" / "qwen_true_cfg__scale4.0.npz"


def test_equals_the_golden_vectors() -> None:
    golden = np.load(GOLDEN)
    conditional, unconditional, expected = (
        torch.from_numpy(golden[name]) for name in ("in_cond", "in_uncond", "out_pred")
    )
    found = true_cfg(conditional, unconditional, 4.0)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found.norm(dim=-1), conditional.norm(dim=-1))


def test_the_gradient_flows_through_both_velocities_and_the_norms() -> None:
    generator = torch.Generator().manual_seed(0)
    pair = [torch.randn((2, 3, 4), generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(lambda c, u: true_cfg(c, u, 4.0), pair)

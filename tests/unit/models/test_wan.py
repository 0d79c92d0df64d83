"""What the Wan2.1 adapter refuses."""

from __future__ import annotations

import pytest

from digenrl.models.checkpoint import CheckpointError
from digenrl.models.tiny import build
from digenrl.models.wan import WanModel


@pytest.mark.parametrize("changed", [{"boundary_ratio": 0.875}, {"expand_timesteps": True}])
def test_wan22_is_another_family(changed: dict[str, object]) -> None:
    pipeline = build("wan")
    pipeline.register_to_config(**changed)
    with pytest.raises(CheckpointError, match=r"needs a Wan2.1 text-to-video checkpoint, but this one is of Wan2.2"):
        WanModel(pipeline)


def test_a_prompt_has_tokens() -> None:
    with pytest.raises(CheckpointError, match=r"max_sequence_length must be at least 1 for model.family=wan, got 0"):
        WanModel(build("wan"), max_sequence_length=0)

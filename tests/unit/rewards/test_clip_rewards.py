"""clip_score, pickscore and aesthetic_predictor on tiny random checkpoints, against a direct computation."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, CLIPModel, CLIPVisionModelWithProjection
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from benchmarks.tiny_rewards import CLIP_PREPROCESSING, aesthetic_folder, clip_folder, pictures
from digenrl.config import RewardConfig
from digenrl.rewards.base import PromptRecord, RewardError, Scored
from digenrl.rewards.registry import make_reward

TEXTS = ("042", "137", "042", "a number that is longer than what the text encoder takes: 0123456789")
PROMPTS = [PromptRecord(f"p{i}", text) for i, text in enumerate(TEXTS)]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clip_folder(tmp_path_factory.mktemp("clip") / "checkpoint")


def values(name: str, path: Path, images: np.ndarray, prompts: list[PromptRecord]) -> np.ndarray:
    scores = make_reward(RewardConfig(name=name, path=str(path)))(images, prompts)
    assert all(isinstance(score, Scored) for score in scores)
    return np.asarray([score.value for score in scores if isinstance(score, Scored)])


def direct_logits(path: Path, shown: np.ndarray) -> np.ndarray:
    """The matrix of logits, pictures by texts, as the model's own documentation computes it."""
    pixels = CLIPImageProcessorPil(**CLIP_PREPROCESSING)(list(shown), return_tensors="pt")["pixel_values"]
    tokens = AutoTokenizer.from_pretrained(path)(
        list(TEXTS), padding=True, truncation=True, max_length=16, return_tensors="pt"
    )
    with torch.no_grad():
        return CLIPModel.from_pretrained(path)(pixel_values=pixels, **tokens).logits_per_image.numpy()


def test_both_are_the_models_own_logits_of_each_picture_and_its_text(clip: Path) -> None:
    shown = pictures(4)
    logits = direct_logits(clip, shown).diagonal()
    assert len(set(np.round(logits, 4))) == 4
    np.testing.assert_allclose(values("pickscore", clip, shown[:, None], PROMPTS), logits, rtol=1e-5)
    np.testing.assert_allclose(values("clip_score", clip, shown[:, None], PROMPTS), 100 * logits / np.exp(3), rtol=1e-5)


def test_a_videos_value_is_the_mean_of_its_frames(clip: Path) -> None:
    shown = pictures(4)
    single = values("clip_score", clip, shown[:, None], [PROMPTS[0]] * 2 + [PROMPTS[1]] * 2)
    video = values("clip_score", clip, shown.reshape(2, 2, *shown.shape[1:]), PROMPTS[:2])
    np.testing.assert_allclose(video, single.reshape(2, 2).mean(axis=1), rtol=1e-6)


@pytest.mark.parametrize("relu", [False, True])
def test_the_aesthetic_predictor_is_its_head_on_the_normalised_embedding(tmp_path: Path, relu: bool) -> None:
    folder = aesthetic_folder(tmp_path / "checkpoint", relu=relu)
    shown = pictures(3)
    pixels = CLIPImageProcessorPil(**CLIP_PREPROCESSING)(list(shown), return_tensors="pt")["pixel_values"]
    tensors = load_file(folder / "model.safetensors")
    with torch.no_grad():
        x = CLIPVisionModelWithProjection.from_pretrained(folder)(pixel_values=pixels).image_embeds
        x = x / x.norm(dim=-1, keepdim=True)
        for index in (0, 2, 4):
            x = x @ tensors[f"layers.{index}.weight"].T + tensors[f"layers.{index}.bias"]
            x = x.relu() if relu and index < 4 else x
    found = values("aesthetic_predictor", folder, shown[:, None], PROMPTS[:3])
    np.testing.assert_allclose(found, x[:, 0].numpy(), rtol=1e-5)


def test_more_pictures_than_a_chunk_give_what_they_give_alone(clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = pictures(4)
    whole = values("clip_score", clip, shown[:, None], PROMPTS)
    monkeypatch.setattr("digenrl.rewards.clip.chunks_of", lambda count: (slice(i, i + 1) for i in range(count)))
    np.testing.assert_allclose(values("clip_score", clip, shown[:, None], PROMPTS), whole, rtol=1e-5)


def test_nothing_gives_nothing(clip: Path) -> None:
    assert make_reward(RewardConfig(name="clip_score", path=str(clip)))(np.zeros((0, 1, 8, 8, 3), np.uint8), []) == []


@pytest.mark.parametrize("name", ["clip_score", "pickscore", "aesthetic_predictor"])
def test_a_path_that_cannot_be_right_is_found_without_loading(name: str, tmp_path: Path) -> None:
    def problem(path: str) -> str | None:
        return make_reward(RewardConfig(name=name, path=path)).problem()

    (tmp_path / "clip-vit").mkdir()
    assert "holds no config.json" in (problem(str(tmp_path / "clip-vit")) or "")
    assert f"did you mean {tmp_path / 'clip-vit'}?" in (problem(str(tmp_path / "clip-vt")) or "")
    assert problem("openai/clip-vit-large-patch14") is None


def test_pickled_weights_are_not_loaded(clip: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pickled"
    shutil.copytree(clip, folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(RewardError, match=r"clip_score: path=.*pickled.*safetensors"):
        make_reward(RewardConfig(name="clip_score", path=str(folder))).load()


def test_a_checkpoint_without_preprocessing_or_head_says_so(clip: Path, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"has no model.safetensors with the tensors layers.N.weight"):
        make_reward(RewardConfig(name="aesthetic_predictor", path=str(clip))).load()
    folder = tmp_path / "bare"
    shutil.copytree(clip, folder)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(RewardError, match=r"has no preprocessor_config\.json"):
        make_reward(RewardConfig(name="clip_score", path=str(folder))).load()


def test_none_of_this_has_imported_torchvision() -> None:
    assert "torchvision" not in sys.modules

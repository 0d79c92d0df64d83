"""The classifier reward: a transformers directory, and an ONNX file that is a real classifier."""

from __future__ import annotations

import json
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont
from transformers import ViTForImageClassification
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from benchmarks.tiny_rewards import classifier_folder, pictures
from digenrl.config import RewardConfig
from digenrl.rewards.base import Failed, PromptRecord, RewardError, Scored
from digenrl.rewards.registry import make_reward

#: Of a text line's direction, packaged with the OCR engine.
DIRECTION = "ch_ppocr_mobile_v2.0_cls_infer.onnx"
SETTINGS = {"labels": ["upright", "upside down"], "outputs": "probabilities", "size": {"height": 48, "width": 192}}


def line(text: str) -> np.ndarray:
    """A line of text, (48, 192, 3) uint8."""
    picture = Image.new("RGB", (192, 48), "white")
    ImageDraw.Draw(picture).text((6, 6), text, fill="black", font=ImageFont.load_default(24))
    return np.asarray(picture)


def wanting(*classes: str) -> list[PromptRecord]:
    return [PromptRecord(f"p{i}", "a picture", {"class": wanted}) for i, wanted in enumerate(classes)]


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return classifier_folder(tmp_path_factory.mktemp("vit") / "checkpoint")


@pytest.fixture
def direction(tmp_path: Path) -> Path:
    shutil.copy(Path(str(files("rapidocr_onnxruntime") / "models" / DIRECTION)), tmp_path / "direction.onnx")
    (tmp_path / "classifier.json").write_text(json.dumps(SETTINGS))
    return tmp_path / "direction.onnx"


def classifier(path: Path, **settings: Any) -> Any:
    return make_reward(RewardConfig(name="classifier", path=str(path), **settings))


def test_the_value_is_the_probability_of_the_records_class(vit: Path) -> None:
    shown = pictures(3)
    pixels = ViTImageProcessorPil(size={"height": 20, "width": 20})(list(shown), return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        wanted = ViTForImageClassification.from_pretrained(vit)(pixel_values=pixels).logits.softmax(dim=-1)
    found = [score.value for score in classifier(vit)(shown[:, None], wanting("ship", "cat", "dog"))]
    np.testing.assert_allclose(found, wanted[[0, 1, 2], [2, 0, 1]], rtol=1e-5)
    video = classifier(vit)(shown[None], wanting("ship"))
    np.testing.assert_allclose(video[0].value, float(wanted[:, 2].mean()), rtol=1e-5)


def test_an_onnx_classifier_tells_upright_text_from_text_upside_down(direction: Path) -> None:
    upright = np.stack([line(text) for text in ("Reward models", "gradient step", "flow matching", "Timestep")])
    shown = np.concatenate([upright, upright[:, ::-1, ::-1]])[:, None]
    found = [score.value for score in classifier(direction)(shown, wanting(*["upright"] * 8))]
    assert min(found[:4]) > 0.7 and max(found[4:]) < 0.3
    other = [score.value for score in classifier(direction)(shown, wanting(*["upside down"] * 8))]
    np.testing.assert_allclose(np.add(found, other), 1, atol=1e-5)


def test_prompts_without_a_class_or_with_an_unknown_one_are_refused_by_name(vit: Path, direction: Path) -> None:
    for path, near in ((vit, "shop"), (direction, "up right")):
        reward = classifier(path)
        with pytest.raises(ValueError, match=r"prompt 'x' has no field 'class'"):
            reward.validate([PromptRecord("x", "a ship")])
        with pytest.raises(ValueError, match=f"class='{near}', which is no label.*did you mean (ship|upright)"):
            reward.validate(wanting(near))
    classifier(vit, field="kind").validate([PromptRecord("x", "a ship", {"kind": "ship"})])


def test_an_unknown_class_is_a_failure_where_it_was_not_validated(vit: Path) -> None:
    scores = classifier(vit)(pictures(2)[:, None], wanting("ship", "plane"))
    assert isinstance(scores[0], Scored) and scores[1] == Failed("no label 'plane'")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (None, "must be a JSON object with the list labels"),
        ({"labels": []}, "must be a list of strings"),
        (SETTINGS | {"outputs": "scores"}, "must be logits or probabilities"),
    ],
)
def test_what_lies_beside_an_onnx_file_is_checked_before_a_run(
    direction: Path, settings: dict[str, Any] | None, words: str
) -> None:
    beside = direction.with_name("classifier.json")
    beside.unlink() if settings is None else beside.write_text(json.dumps(settings))
    assert words in classifier(direction).problem()


def test_labels_that_do_not_match_the_outputs_are_an_error(direction: Path) -> None:
    direction.with_name("classifier.json").write_text(json.dumps(SETTINGS | {"labels": ["a", "b", "c"]}))
    with pytest.raises(ValueError, match="there are 3 labels"):
        classifier(direction)(pictures(1)[:, None], wanting("a"))


def test_a_file_that_is_no_model_is_named(direction: Path) -> None:
    direction.write_bytes(b"not a model")
    with pytest.raises(RewardError, match=r"direction.onnx is no ONNX model"):
        classifier(direction).load()
    direction.unlink()
    assert "is no file" in classifier(direction).problem()

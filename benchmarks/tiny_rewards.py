"""Tiny random checkpoints of the classes that published rewards have, saved as people save them."""

from __future__ import annotations

import json
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import CLIPConfig, CLIPModel, CLIPVisionConfig, CLIPVisionModelWithProjection, ViTConfig
from transformers import ViTForImageClassification as ViT

EDGE = 30
VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
CLIP_PREPROCESSING = {
    "crop_size": EDGE,
    "do_center_crop": True,
    "do_normalize": True,
    "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": 3,
    "size": EDGE,
}


def pictures(count: int, height: int = 37, width: int = 61, seed: int = 0) -> np.ndarray:
    """(count, height, width, 3) uint8 with structure at several scales."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (count, 5, 7, 3), np.uint8)
    return np.stack([np.asarray(Image.fromarray(p).resize((width, height), Image.Resampling.BICUBIC)) for p in small])


def clip_folder(folder: Path) -> Path:
    """A CLIPModel with its tokenizer and preprocessing."""
    torch.manual_seed(0)
    tokenizer = Path(str(files("digenrl") / "data/tiny-sd3/tokenizer"))
    shutil.copytree(tokenizer, folder)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    text = VISION | {"vocab_size": len(vocabulary) + 2, "max_position_embeddings": 16}
    vision = VISION | {"image_size": EDGE, "patch_size": 10}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=8, logit_scale_init_value=3.0)
    CLIPModel(config).save_pretrained(folder)
    return _with(folder, CLIP_PREPROCESSING)


def aesthetic_folder(folder: Path, *, relu: bool = False) -> Path:
    """A CLIP vision model with the linear layers of a predictor's head in the same file."""
    torch.manual_seed(1)
    vision = CLIPVisionConfig(**VISION, image_size=EDGE, patch_size=10, projection_dim=8)
    CLIPVisionModelWithProjection(vision).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for index, (inputs, outputs) in enumerate(((8, 12), (12, 6), (6, 1))):
        # The numbers between belong to dropout layers.
        tensors[f"layers.{2 * index}.weight"] = torch.randn(outputs, inputs)
        tensors[f"layers.{2 * index}.bias"] = torch.randn(outputs)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if relu:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "head_activation": "relu"}))
    return _with(folder, CLIP_PREPROCESSING)


def classifier_folder(folder: Path) -> Path:
    """A ViT classifier of three classes."""
    torch.manual_seed(2)
    config = ViTConfig(**VISION, image_size=20, patch_size=10, id2label={0: "cat", 1: "dog", 2: "ship"})
    model = ViT(config)
    torch.nn.init.normal_(model.classifier.weight)
    model.save_pretrained(folder)
    return _with(folder, {"do_resize": True, "size": {"height": 20, "width": 20}, "resample": 2})


def _with(folder: Path, preprocessing: dict[str, Any]) -> Path:
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessing))
    return folder

"""The SD3 adapter against the stock StableDiffusion3Pipeline, and the sentences it refuses things with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import T5Config, T5EncoderModel

from digenrl.config import ModelConfig
from digenrl.config.errors import ConfigError
from digenrl.models.base import Geometry
from digenrl.models.checkpoint import CheckpointError
from digenrl.models.embeddings import EmbeddingCache, select
from digenrl.models.registry import load_model, save_lora
from digenrl.models.sd3 import SD3Model
from digenrl.rollout import RolloutSpec, advance, finish, start_rollout
from tiny_policy import GEOMETRY, LORA, moved, random_pipeline, rollout_spec, tiny_policy

PROMPTS = ["042", "917", "abc"]


def _rolled_out(policy, spec: RolloutSpec, prompts: list[str]) -> tuple[torch.Tensor, np.ndarray]:
    """Final latents and images."""
    state = start_rollout(policy, spec)
    state = advance(policy, spec, state, policy.model.encode(prompts), 0, spec.num_steps)
    return state.latents, finish(policy, spec, state)[1][:, 0]


@pytest.mark.parametrize("guidance_scale", [1.0, 4.5])
def test_deterministic_rollout_is_the_stock_pipeline(guidance_scale: float) -> None:
    policy = tiny_policy()
    policy.bind(policy.initial_adapter(), 0)
    spec = rollout_spec(policy, size=3, steps=(), num_steps=7, guidance_scale=guidance_scale)
    start = start_rollout(policy, spec).latents
    latents, images = _rolled_out(policy, spec, PROMPTS)
    stock = random_pipeline()

    def call(output_type: str):
        return stock(
            PROMPTS,
            height=12,
            width=24,
            num_inference_steps=7,
            guidance_scale=guidance_scale,
            latents=start.clone(),
            max_sequence_length=0,
            output_type=output_type,
        ).images

    torch.testing.assert_close(latents, call("latent"), rtol=1e-5, atol=1e-5)
    pictures = np.stack([np.asarray(picture) for picture in call("pil")]).astype(int)
    assert np.abs(pictures - images).max() <= 1  # one level where rounding falls on the edge
    assert images.std() > 10


def test_saved_adapter_gives_the_same_picture_in_the_stock_pipeline(tmp_path: Path) -> None:
    """alpha / rank is 2: a reader that assumed alpha = rank would halve the adapter."""
    policy = tiny_policy()
    adapter = moved(policy, 1, scale=0.2)
    policy.bind(adapter.weights, 1)
    spec = rollout_spec(policy, size=3, steps=())
    start = start_rollout(policy, spec).latents
    latents, images = _rolled_out(policy, spec, PROMPTS)
    save_lora("sd3", adapter.weights, LORA, tmp_path / "adapter")

    stock = random_pipeline()
    arguments = {"height": 12, "width": 24, "num_inference_steps": 6, "guidance_scale": 1.0, "max_sequence_length": 0}
    without = stock(PROMPTS, latents=start.clone(), output_type="latent", **arguments).images
    stock.load_lora_weights(tmp_path / "adapter")
    after = stock(PROMPTS, latents=start.clone(), output_type="latent", **arguments).images
    torch.testing.assert_close(after, latents, rtol=1e-5, atol=1e-5)
    assert (after - without).abs().max() > 0.05
    pictures = np.stack([np.asarray(p) for p in stock(PROMPTS, latents=start.clone(), **arguments).images])
    assert np.abs(pictures.astype(int) - images).max() <= 1


def test_equal_adapters_are_saved_as_equal_files(tmp_path: Path) -> None:
    """The metadata have two entries, whose order is that of a hash table with a seed of its own each time."""
    adapter = moved(tiny_policy(), 1, scale=0.2).weights
    for i in range(12):
        save_lora("sd3", adapter, LORA, tmp_path / str(i))
    (first,) = (tmp_path / "0").iterdir()
    assert len({(tmp_path / str(i) / first.name).read_bytes() for i in range(12)}) == 1
    saved = load_file(first)
    assert {name.removeprefix("transformer."): t.tolist() for name, t in saved.items()} == {
        name: t.tolist() for name, t in adapter.items()
    }
    with safe_open(first, "pt") as file:
        assert set(file.metadata()) == {"format", "lora_adapter_metadata"}


def test_encode_is_the_pipelines_encoding_with_t5() -> None:
    """Three text encoders: the T5 part has its own length and lies behind the CLIP part."""
    pipeline = random_pipeline()
    torch.manual_seed(0)
    t5 = T5EncoderModel(T5Config(vocab_size=64, d_model=64, d_kv=8, d_ff=64, num_layers=1, num_heads=2)).eval()
    pipeline.register_modules(text_encoder_3=t5, tokenizer_3=_ByteTokenizer())
    embeddings = SD3Model(pipeline, max_sequence_length=9).encode(PROMPTS)
    expected, negative, pooled, negative_pooled = pipeline.encode_prompt(PROMPTS, None, None, max_sequence_length=9)
    torch.testing.assert_close(embeddings["prompt_embeds"], expected)
    torch.testing.assert_close(embeddings["pooled_prompt_embeds"], pooled)
    torch.testing.assert_close(embeddings["negative_prompt_embeds"], negative)
    torch.testing.assert_close(embeddings["negative_pooled_prompt_embeds"], negative_pooled)
    assert embeddings["prompt_embeds"].shape == (3, 5 + 9, 64)
    assert SD3Model(pipeline).encode(["1"])["prompt_embeds"].shape == (1, 5 + 256, 64)
    assert SD3Model(random_pipeline()).encode(["1"])["prompt_embeds"].shape == (1, 5, 64)


class _ByteTokenizer:
    """Stands in for T5's SentencePiece model, which cannot be built from nothing: one id per character."""

    def __call__(self, prompts, padding, return_tensors, max_length=None, truncation=False, add_special_tokens=True):
        del truncation, return_tensors, add_special_tokens
        rows = [[ord(c) % 60 + 2 for c in prompt] + [1] for prompt in prompts]
        length = max_length if padding == "max_length" else max(map(len, rows))
        ids = torch.tensor([(row + [0] * length)[:length] for row in rows])
        return type("Encoding", (), {"input_ids": ids})()

    def batch_decode(self, ids):
        return [str(row) for row in ids.tolist()]


def test_embeddings_do_not_depend_on_the_batch_they_were_asked_in() -> None:
    model = SD3Model(random_pipeline())
    together = EmbeddingCache(model).encode(PROMPTS)
    small = EmbeddingCache(model, capacity_bytes=1)
    for row, prompt in enumerate(PROMPTS):
        alone = small.encode([prompt])
        for name, tensor in alone.items():
            assert torch.equal(tensor, select(together, torch.tensor([row]))[name])


def test_sigmas_are_the_stock_table_and_leave_the_scheduler_alone() -> None:
    pipeline = random_pipeline()
    pipeline.register_modules(scheduler=type(pipeline.scheduler)(shift=3.0))
    model = SD3Model(pipeline)
    before = pipeline.scheduler.sigmas
    table = model.sigmas(10, GEOMETRY)
    assert pipeline.scheduler.sigmas is before
    pipeline.scheduler.set_timesteps(10)
    assert torch.equal(table, pipeline.scheduler.sigmas)
    assert table[-1] == 0 and table[-2] == pytest.approx(0.0089286, rel=1e-4)  # shifted twice


def test_a_nan_latent_is_a_failed_sample_not_a_black_image() -> None:
    model = SD3Model(random_pipeline())
    latents = torch.randn((4, *model.latent_shape(GEOMETRY)), generator=torch.Generator().manual_seed(0))
    clean = model.decode(latents)
    assert clean.images.shape == (4, 1, 12, 24, 3) and clean.images.dtype == torch.uint8
    latents[1, 0, 0, 0] = float("nan")
    latents[3] = float("inf")
    decoded = model.decode(latents)
    assert decoded.finite.tolist() == [True, False, True, False]
    assert torch.equal(decoded.images[[0, 2]], clean.images[[0, 2]])


def test_large_batches_decode_in_parts_of_a_size_set_by_geometry(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SD3Model(random_pipeline())
    latents = torch.randn((5, *model.latent_shape(GEOMETRY)), generator=torch.Generator().manual_seed(0))
    whole = model.decode(latents).images.int()
    monkeypatch.setattr("digenrl.models.pipeline.PIXELS_PER_DECODE", 2 * 12 * 24)
    assert (model.decode(latents).images.int() - whole).abs().max() <= 1


def test_checkpoint_round_trip_and_dtype(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    random_pipeline().save_pretrained(tmp_path / "tiny")
    capfd.readouterr()
    model = load_model(ModelConfig(path=str(tmp_path / "tiny"), dtype="bfloat16", gradient_checkpointing=True))
    assert model.family == "sd3" and model.transformer.dtype == torch.bfloat16
    assert model.pipeline.vae.dtype == torch.float32
    assert model.transformer.gradient_checkpointing
    assert not any(p.requires_grad for p in model.transformer.parameters())
    latents = torch.randn((2, *model.latent_shape(GEOMETRY)), generator=torch.Generator().manual_seed(0))
    velocity = model.velocity(latents, torch.tensor([0.9, 0.1]), model.encode(["1", "2"]), 3.0)
    assert velocity.dtype == torch.float32 and bool(velocity.isfinite().all())
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


@pytest.mark.parametrize(
    ("geometry", "sentence"),
    [
        (Geometry(13, 24), r"model.height must be a multiple of 4 for this checkpoint.*got 13; the nearest is 12"),
        (Geometry(12, 48), r"model.width must be at most 24"),
        (Geometry(12, 24, frames=5), r"model.frames must be 1 .*pictures, got 5"),
    ],
)
def test_geometry_is_checked(geometry: Geometry, sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        SD3Model(random_pipeline()).latent_shape(geometry)


def test_missing_checkpoints_are_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "sd35").mkdir()
    with pytest.raises(CheckpointError, match=r"is not a directory.*did you mean .*/sd35\?"):
        load_model(ModelConfig(path=str(tmp_path / "sd53")))
    with pytest.raises(CheckpointError, match=r"could not be loaded; expected a StableDiffusion3Pipeline there: \w"):
        load_model(ModelConfig(path=str(tmp_path / "sd35")))
    with pytest.raises(CheckpointError, match=r"model.path='package:tiny-sd4' does not ship with DigenRL"):
        load_model(ModelConfig(path="package:tiny-sd4"))
    with pytest.raises(
        CheckpointError, match=r"'nobody/nothing' could not be loaded from the hub.*`hf auth login`"
    ) as hub:
        load_model(ModelConfig(path="nobody/nothing"))
    assert len(str(hub.value)) < 300
    with pytest.raises(ConfigError, match=r"model.family='sd33' is not a known model family; did you mean sd3\?"):
        load_model(ModelConfig.model_construct(family="sd33"))

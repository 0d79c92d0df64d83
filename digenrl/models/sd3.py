"""Stable Diffusion 3 and 3.5: StableDiffusion3Pipeline behind the FlowModel protocol.

    load(config, device)   read a checkpoint, freeze it, check that it can generate the configured size
    SD3Model               encode, sigmas, velocity, decode
    save_lora(...)         an adapter as diffusers takes it

Everything the pipeline knows is asked of the pipeline: prompts go through its own `encode_prompt`, sigmas come from
its scheduler, adapters are written by its own `save_lora_weights`. Only the denoising loop is ours.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers.utils.logging as diffusers_logging
import torch
import transformers.utils.logging as transformers_logging
from diffusers.loaders.lora_base import LORA_WEIGHT_NAME_SAFE
from torch import nn

from digenrl.config import LoraConfig, ModelConfig
from digenrl.models.base import Decoded, Embeddings, Geometry
from digenrl.models.checkpoint import CheckpointError, locate, unloadable
from digenrl.models.sigmas import sigma_table


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no warnings about optional packages while a checkpoint loads; then as it was before."""
    libraries = (diffusers_logging, transformers_logging)
    before = [(lib.get_verbosity(), lib.is_progress_bar_enabled()) for lib in libraries]
    for lib in libraries:
        lib.set_verbosity_error()
        lib.disable_progress_bar()
    try:
        yield
    finally:
        for lib, (verbosity, bars) in zip(libraries, before, strict=True):
            lib.set_verbosity(verbosity)
            if bars:
                lib.enable_progress_bar()


with _quiet():
    from diffusers import StableDiffusion3Pipeline

#: Attention projections of the joint blocks: the list of Flow-GRPO's SD3.5 recipes.
LORA_TARGETS = tuple(
    f"attn.{name}"
    for name in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
)
#: Length of the T5 part of a prompt in the pipeline's own call.
T5_TOKENS = 256
#: Decoding is cut by geometry alone, so the cut (and with it every bit) is the same on every worker.
PIXELS_PER_DECODE = 2**20


def load(config: ModelConfig, device: torch.device) -> SD3Model:
    """Load a StableDiffusion3Pipeline. The VAE stays in float32 whatever `config.dtype` says.

    Raises:
        CheckpointError: not found, not an SD3 pipeline, or unable to generate `height` x `width`.
    """
    dtype = getattr(torch, config.dtype)
    path = locate(config.path)
    pipeline_class: Any = StableDiffusion3Pipeline
    try:
        with _quiet():
            pipeline = pipeline_class.from_pretrained(
                path, dtype={"vae": torch.float32, "default": dtype}, **_without_t5(path)
            )
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise unloadable(config.path, "StableDiffusion3Pipeline", error) from error
    model = SD3Model(pipeline.to(device), max_sequence_length=config.max_sequence_length)
    model.latent_shape(Geometry(config.height, config.width))
    if config.gradient_checkpointing:
        pipeline.transformer.enable_gradient_checkpointing()
    return model


def _without_t5(path: str) -> dict[str, None]:
    """Arguments that load a saved pipeline without T5: from_pretrained takes an absent part only if told so."""
    index = Path(path) / "model_index.json"
    if not index.is_file():
        return {}
    parts = json.loads(index.read_text(encoding="utf-8"))
    return {name: None for name in ("text_encoder_3", "tokenizer_3") if parts.get(name, [None])[0] is None}


class SD3Model:
    """One SD3 checkpoint, base weights frozen.

    Args:
        pipeline: a StableDiffusion3Pipeline on its device; the transformer's dtype is what `velocity` computes in.
        max_sequence_length: tokens of the T5 part of a prompt. None: 256 as in the pipeline's call, or none at all
            if the checkpoint has no T5 (the pipeline would append 256 zero vectors).
    """

    family = "sd3"
    lora_targets = LORA_TARGETS

    def __init__(self, pipeline: Any, max_sequence_length: int | None = None) -> None:
        self.pipeline = pipeline  # Any: its attributes are set at run time, where type checkers do not see them
        self.transformer: nn.Module = self.pipeline.transformer
        self._dtype: torch.dtype = self.pipeline.transformer.dtype
        if max_sequence_length is None:
            max_sequence_length = 0 if self.pipeline.text_encoder_3 is None else T5_TOKENS
        self._max_sequence_length = max_sequence_length
        self._train_timesteps: int = self.pipeline.scheduler.config.num_train_timesteps
        self._empty_prompt: tuple[torch.Tensor, torch.Tensor] | None = None
        self.pipeline.set_progress_bar_config(disable=True)
        for part in self.pipeline.components.values():
            if isinstance(part, nn.Module):
                part.requires_grad_(False).eval()

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Embeddings:
        """Prompt and empty-prompt embeddings.

        Not in inference mode: the backward pass of training must be able to save these tensors.

        Returns:
            `prompt_embeds` (B, L, C) and `pooled_prompt_embeds` (B, P), and both again with the prefix `negative_`
            for the prompt "" (one tensor expanded over the batch).
        """
        if self._empty_prompt is None:
            self._empty_prompt = self._encode([""])
        embeds, pooled = self._encode(list(prompts))
        negative, negative_pooled = (t.expand(len(prompts), *t.shape[1:]) for t in self._empty_prompt)
        return {
            "prompt_embeds": embeds,
            "pooled_prompt_embeds": pooled,
            "negative_prompt_embeds": negative,
            "negative_pooled_prompt_embeds": negative_pooled,
        }

    def _encode(self, prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            prompts, None, None, do_classifier_free_guidance=False, max_sequence_length=self._max_sequence_length
        )
        return embeds, pooled

    def latent_shape(self, geometry: Geometry) -> tuple[int, ...]:
        """(C, h, w) of one sample.

        Raises:
            CheckpointError: the checkpoint cannot generate this size.
        """
        height, width, scale = geometry.height, geometry.width, self.pipeline.vae_scale_factor
        unit = scale * self.pipeline.patch_size
        if height % unit or width % unit:
            nearest = " x ".join(str(max(unit, round(size / unit) * unit)) for size in (height, width))
            raise CheckpointError(
                f"model.height={height}, model.width={width}: this checkpoint generates multiples of {unit} pixels "
                f"(VAE factor {scale} x patch {self.pipeline.patch_size}); the nearest size is {nearest}"
            )
        largest = self.pipeline.transformer.config.pos_embed_max_size * unit
        if max(height, width) > largest:
            raise CheckpointError(
                f"model.height={height}, model.width={width}: this checkpoint has positions for at most {largest} "
                f"pixels a side"
            )
        if geometry.frames != 1:
            raise CheckpointError(f"model.family='sd3' generates images, not videos of {geometry.frames} frames")
        return (self.pipeline.transformer.config.in_channels, height // scale, width // scale)

    def sigmas(self, num_steps: int, geometry: Geometry) -> torch.Tensor:
        """(T+1,) float32, the table StableDiffusion3Pipeline.__call__ denoises along."""
        _, height, width = self.latent_shape(geometry)
        tokens = (height // self.pipeline.patch_size) * (width // self.pipeline.patch_size)
        return sigma_table(self.pipeline.scheduler, num_steps, tokens)

    def velocity(
        self, latents: torch.Tensor, sigma: torch.Tensor, embeddings: Embeddings, guidance_scale: float
    ) -> torch.Tensor:
        """Velocity (B, C, h, w) in the dtype of `latents`; with guidance, one forward over [negative, positive].

        The timestep is 1000 * sigma in float32, here and only here, so rollout and training embed the same number.
        """
        guided = guidance_scale > 1
        names = ("negative_", "") if guided else ("",)
        copies = len(names)
        output: torch.Tensor = self.transformer(
            hidden_states=latents.to(self._dtype).repeat(copies, 1, 1, 1),
            timestep=(sigma.to(torch.float32) * self._train_timesteps).repeat(copies),
            encoder_hidden_states=_join(embeddings, names, "prompt_embeds").to(self._dtype),
            pooled_projections=_join(embeddings, names, "pooled_prompt_embeds").to(self._dtype),
            return_dict=False,
        )[0].to(latents.dtype)
        if not guided:
            return output
        negative, positive = output.chunk(2)
        guided_output: torch.Tensor = negative + guidance_scale * (positive - negative)
        return guided_output

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> Decoded:
        """Decode in float32 and round to uint8. A sample with a NaN or infinity is marked: it is not a black image."""
        vae = self.pipeline.vae
        scaled = latents.to(torch.float32) / vae.config.scaling_factor + vae.config.shift_factor
        pixels = latents.shape[-2] * latents.shape[-1] * self.pipeline.vae_scale_factor**2
        parts = scaled.split(max(1, PIXELS_PER_DECODE // pixels))
        decoded = torch.cat([vae.decode(part, return_dict=False)[0] for part in parts])
        finite = decoded.isfinite().flatten(1).all(dim=1)
        unit = (decoded / 2 + 0.5).clamp(0, 1).nan_to_num(nan=0.0)
        images = (unit * 255).round().to(torch.uint8).permute(0, 2, 3, 1).unsqueeze(1)
        return Decoded(images.contiguous().cpu(), finite.cpu())


def save_lora(adapter: Mapping[str, torch.Tensor], lora: LoraConfig, directory: Path) -> None:
    """Write `pytorch_lora_weights.safetensors`, which StableDiffusion3Pipeline.load_lora_weights takes as it is.

    Equal adapters give equal files.

    Args:
        adapter: A and B matrices by parameter name, as `digenrl.policy.Policy` names them.
        lora: rank and alpha. Alpha travels as metadata: without it diffusers would assume alpha = rank.
        directory: is created if missing.
    """
    layers = {name: tensor.detach().cpu().contiguous() for name, tensor in adapter.items()}
    metadata = {
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted({name.rpartition(".lora_")[0] for name in layers}),
    }
    StableDiffusion3Pipeline.save_lora_weights(
        str(directory), transformer_lora_layers=layers, transformer_lora_adapter_metadata=metadata
    )
    _sort_metadata(directory / LORA_WEIGHT_NAME_SAFE)


def _sort_metadata(path: Path) -> None:
    """Bring the metadata of a safetensors file, which are written in the order of a hash table, into that of names.

    The file begins with the length of its header, in 8 bytes, and the header in JSON, padded with spaces
    (https://huggingface.co/docs/safetensors/index#format); the tensors' order and places do not change.
    """
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header = {"__metadata__": dict(sorted(header.pop("__metadata__").items())), **header}
        data = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode().ljust(length)
        if len(data) != length:
            raise ValueError(f"{path}: its header of {length} bytes would need {len(data)}")
        file.seek(8)
        file.write(data)


def _join(embeddings: Embeddings, prefixes: Sequence[str], name: str) -> torch.Tensor:
    return torch.cat([embeddings[prefix + name] for prefix in prefixes])

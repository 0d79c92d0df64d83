"""What the families share: a stock diffusers pipeline of which everything is used but its denoising loop.

    PipelineModel         base of the families: loading, freezing, encoding with a negative prompt, decoding
    save_adapter(...)     an adapter as a pipeline's `load_lora_weights` takes it
    decode_pictures(...)  by the VAE of pictures that SD3 and FLUX have
    unstandardised(...)   latents as the VAEs of videos take them
    quiet()               no bars and no warnings while libraries load

Everything a pipeline knows is asked of the pipeline: prompts go through its own `encode_prompt`, sigmas come from its
scheduler, adapters are written by its own `save_lora_weights`.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self

import diffusers.utils.logging as diffusers_logging
import torch
import transformers.utils.logging as transformers_logging
from diffusers.loaders.lora_base import LORA_WEIGHT_NAME_SAFE
from torch import nn

from digenrl.config import LoraConfig, ModelConfig
from digenrl.models.base import Decoded, Embeddings, Geometry
from digenrl.models.checkpoint import CheckpointError, locate, unloadable
from digenrl.models.kernels import Compiled, set_attention
from digenrl.models.registry import FAMILIES
from digenrl.models.sigmas import Spacing, sigma_table

# diffusers imports onnxruntime with some pipelines, and that reads this when it is imported; see digenrl.rewards.ocr.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

#: Attention projections of blocks in which text and picture attend to each other.
JOINT_ATTENTION = tuple(
    f"attn.{name}"
    for name in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
)
#: From so many parameters on, a part is worth saving the memory of, in the time that takes.
LARGE = 10**8
#: Of each tensor of a text encoder, so many numbers go into the name of what it encodes.
KEY_NUMBERS = 64
#: Decoding is cut by geometry alone, so the cut (and with it every bit) is the same on every worker.
PIXELS_PER_DECODE = 2**20


@contextmanager
def quiet() -> Iterator[None]:
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


class PipelineModel(ABC):
    """One checkpoint, base weights frozen. A family adds `_encode`, `velocity` and `_decode`.

    Args:
        pipeline: a `pipeline_class` on its device; the transformer's dtype is what `velocity` computes in.
        max_sequence_length: tokens of the long part of a prompt; None: as in the pipeline's own call.

    Raises:
        CheckpointError: too few tokens.
    """

    family: str
    lora_targets: tuple[str, ...]
    #: The diffusers class. Any: what it has is set at run time, where type checkers do not see it.
    pipeline_class: ClassVar[Any]
    #: What classifier-free guidance steers away from; None: the family's guidance is an input of the transformer.
    negative_prompt: ClassVar[str | None] = None
    #: Tokens of the long part of a prompt in the pipeline's own call, and the fewest there may be.
    default_tokens: ClassVar[int]
    fewest_tokens: ClassVar[int] = 1
    #: What the pipeline's call hands its scheduler.
    spacing: ClassVar[Spacing] = "uniform"

    def __init__(self, pipeline: Any, max_sequence_length: int | None = None) -> None:
        self.pipeline = pipeline
        self.transformer: nn.Module = pipeline.transformer
        self.device: torch.device = pipeline.transformer.device
        self.sizes = FAMILIES[self.family].sizes(pipeline.vae.config, pipeline.transformer.config)
        self._dtype: torch.dtype = pipeline.transformer.dtype
        self.noise_dtype = torch.float32 if self.sizes.frame_scale else self._dtype  # videos are denoised in float32
        self.tokens = self.default_tokens if max_sequence_length is None else max_sequence_length
        if self.tokens < self.fewest_tokens:
            raise CheckpointError(
                f"model.max_sequence_length must be at least {self.fewest_tokens} for model.family={self.family}, "
                f"got {self.tokens}"
            )
        self._negative: Embeddings | None = None
        self._compiled: Compiled | None = None
        self._rolling_out = False
        self._freed = False
        self._text_encoders = "auto"
        pipeline.set_progress_bar_config(disable=True)
        for part in pipeline.components.values():
            if isinstance(part, nn.Module):
                part.requires_grad_(False).eval()

    @classmethod
    def load(cls, config: ModelConfig, device: torch.device) -> Self:
        """Load a checkpoint. The VAE stays in float32 whatever `config.dtype` says.

        Raises:
            CheckpointError: not found, not of this family, or unable to generate the configured size.
        """
        path = locate(config.path)
        dtype = {"vae": torch.float32, "default": getattr(torch, config.base_dtype(device.type))}
        revision = {} if config.revision is None else {"revision": config.revision}
        if revision and Path(path).is_dir():
            raise CheckpointError(f"model.revision={config.revision!r} is for hub ids; model.path is the folder {path}")
        try:
            with quiet():
                pipeline = cls.pipeline_class.from_pretrained(path, dtype=dtype, **revision, **_absent_parts(path))
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise unloadable(config.path, cls.pipeline_class.__name__, error) from error
        pipeline.transformer.to(device)
        model = cls(pipeline, max_sequence_length=config.max_sequence_length)
        model.latent_shape(Geometry(config.height, config.width, config.frames))
        model.settle(config)
        return model

    def settle(self, config: ModelConfig) -> None:
        """Apply what a configuration says about how to compute.

        Raises:
            CheckpointError: the attention kernel does not run here.
        """
        checkpointing = config.gradient_checkpointing
        if checkpointing == "auto":
            checkpointing = sum(p.numel() for p in self.transformer.parameters()) >= LARGE
        if checkpointing:
            self.pipeline.transformer.enable_gradient_checkpointing()
        if config.vae_tiling:
            self.pipeline.vae.enable_tiling()
        self._text_encoders = config.text_encoders
        set_attention(self.transformer, config.attention)
        self._compiled = Compiled(self.transformer) if config.compile else None

    @classmethod
    def save_lora(cls, adapter: Mapping[str, torch.Tensor], lora: LoraConfig, directory: Path) -> None:
        """See `save_adapter`."""
        save_adapter(cls.pipeline_class, adapter, lora, directory)

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Embeddings:
        """Embeddings of B prompts by the pipeline's own rules.

        Where the family has a negative prompt, all of them again for it, with the prefix `negative_` (one tensor
        expanded over the batch). Not in inference mode: the backward pass of training must be able to save them.
        """
        if self._freed:
            raise RuntimeError(
                f"{prompts[0]!r} cannot be encoded: the text encoders were freed after all prompts of the run were "
                "(model.text_encoders=keep keeps them)"
            )
        with self.encoders_on_device():
            found = dict(self._encode(list(prompts)))
            if self.negative_prompt is not None:
                if self._negative is None:
                    self._negative = self._encode([self.negative_prompt])
                for name, tensor in self._negative.items():
                    found[f"negative_{name}"] = tensor.expand(len(prompts), *tensor.shape[1:])
        return found

    @property
    def text_encoders(self) -> dict[str, nn.Module]:
        """Those that are loaded, by the pipeline's names."""
        parts = self.pipeline.components.items()
        return {name: part for name, part in parts if name.startswith("text_encoder") and part is not None}

    @contextmanager
    def encoders_on_device(self) -> Iterator[None]:
        """They are there only while they encode: they may be larger than the transformer."""
        encoders = self.text_encoders.values()
        for encoder in encoders:
            encoder.to(self.device)
        try:
            yield
        finally:
            if self.device.type != "cpu":
                for encoder in encoders:
                    encoder.to("cpu")

    def encoding_key(self) -> str:
        """Hash of what embeddings depend on beside the prompt: of every tensor of the encoders some numbers."""
        said = [type(self.pipeline).__name__, str(self.tokens), str(self.negative_prompt), str(self._dtype)]
        digest = hashlib.sha256("/".join(said).encode())
        for name, encoder in self.text_encoders.items():
            for path, tensor in encoder.state_dict().items():
                digest.update(f"{name}.{path} {tuple(tensor.shape)} {tensor.dtype}".encode())
                some = tensor.flatten()[:: max(1, tensor.numel() // KEY_NUMBERS)][:KEY_NUMBERS]
                digest.update(some.float().cpu().numpy().tobytes())
        return digest.hexdigest()[:32]

    @property
    def frees_text_encoders(self) -> bool:
        """See FlowModel."""
        if self._text_encoders != "auto":
            return self._text_encoders == "free"
        return sum(p.numel() for encoder in self.text_encoders.values() for p in encoder.parameters()) >= LARGE

    def free_text_encoders(self) -> None:
        """Give their memory back; from here on nothing can be encoded."""
        for name in self.text_encoders:
            setattr(self.pipeline, name, None)
        self._freed = True

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """Within it `velocity` may use the compiled transformer: nothing is differentiated or compared there."""
        before, self._rolling_out = self._rolling_out, True
        try:
            yield
        finally:
            self._rolling_out = before

    def _transform(self, **inputs: Any) -> Any:
        """The transformer's output."""
        run = self._compiled if self._rolling_out and self._compiled is not None else self.transformer
        return run(**inputs)

    def latent_shape(self, geometry: Geometry) -> tuple[int, ...]:
        """(C, h, w) or (C, f, h, w) of one sample.

        Raises:
            CheckpointError: the checkpoint cannot generate this size.
        """
        size = (geometry.height, geometry.width, geometry.frames)
        if problems := self.sizes.problems(*size):
            raise CheckpointError(*problems)
        return self.sizes.latent_shape(*size)

    def sigmas(self, num_steps: int, geometry: Geometry) -> torch.Tensor:
        """(T+1,) float32, the table the pipeline's call denoises along."""
        self.latent_shape(geometry)
        tokens = self.sizes.tokens(geometry.height, geometry.width, geometry.frames)
        return sigma_table(self.pipeline.scheduler, num_steps, tokens, spacing=self.spacing)

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> Decoded:
        """Decode in float32 and round to uint8. A sample with a NaN or infinity is marked: it is not a black image."""
        self.pipeline.vae.to(latents.device)  # on the first call: who never decodes never holds it there
        per_part = max(1, PIXELS_PER_DECODE // self.sizes.pixels(tuple(latents.shape[1:])))
        parts = torch.split(latents.to(torch.float32), per_part)
        images, finite = zip(*map(self._decode_part, parts), strict=True)
        return Decoded(torch.cat(images), torch.cat(finite))

    def _decode_part(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        decoded = self._decode(latents)
        # Of the latents too: some decoders end in a clamp, which makes a finite colour of an infinity.
        finite = latents.flatten(1).isfinite().all(dim=1) & decoded.flatten(1).isfinite().all(dim=1)
        unit = (decoded / 2 + 0.5).clamp(0, 1).nan_to_num(nan=0.0)
        images = (unit * 255).round().to(torch.uint8).permute(0, 2, 3, 4, 1)
        return images.contiguous().cpu(), finite.cpu()

    def _timestep(self, sigma: torch.Tensor) -> torch.Tensor:
        """(B,) float32 timestep, 1000 * sigma: computed here only, so rollout and training embed the same number."""
        scale: int = self.pipeline.scheduler.config.num_train_timesteps
        return sigma.to(torch.float32) * scale

    @abstractmethod
    def blank_embeddings(self, prompts: int) -> Embeddings:
        """Zeros of the shapes and dtypes of the longest prompts' embeddings, negative ones included; no masks where
        nothing is padded."""

    def _blank(self, prompts: int, **shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
        prefixes = ("",) if self.negative_prompt is None else ("", "negative_")
        return {
            prefix + name: torch.zeros((prompts, *shape), dtype=self._dtype, device=self.device)
            for prefix in prefixes
            for name, shape in shapes.items()
        }

    @abstractmethod
    def _encode(self, prompts: list[str]) -> Embeddings:
        """Embeddings of B prompts."""

    @abstractmethod
    def velocity(
        self, latents: torch.Tensor, sigma: torch.Tensor, embeddings: Embeddings, guidance_scale: float
    ) -> torch.Tensor:
        """See `FlowModel.velocity`."""

    @abstractmethod
    def _decode(self, latents: torch.Tensor) -> torch.Tensor:
        """(b, 3, F, H, W) in about [-1, 1], of (b, *D) float32 latents."""


def decode_pictures(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """(b, 3, 1, H, W) from (b, C, h, w) latents, by an AutoencoderKL with one scale and shift for all channels."""
    scaled = latents / vae.config.scaling_factor + vae.config.shift_factor
    pictures: torch.Tensor = vae.decode(scaled, return_dict=False)[0]
    return pictures.unsqueeze(2)


def unstandardised(latents: torch.Tensor, vae: Mapping[str, Any]) -> torch.Tensor:
    """(B, C, f, h, w) latents as a video VAE takes them, by the mean and deviation of each channel in its config."""
    mean, std = (latents.new_tensor(vae[f"latents_{name}"]).reshape(1, -1, 1, 1, 1) for name in ("mean", "std"))
    return latents * std + mean


def _absent_parts(path: str) -> dict[str, None]:
    """Arguments that load a pipeline saved without some part: from_pretrained takes an absent one only if told so."""
    index = Path(path) / "model_index.json"
    if not index.is_file():
        return {}
    parts = json.loads(index.read_text(encoding="utf-8"))
    return {name: None for name, kind in parts.items() if kind == [None, None]}


def save_adapter(pipeline_class: Any, adapter: Mapping[str, torch.Tensor], lora: LoraConfig, directory: Path) -> None:
    """Write `pytorch_lora_weights.safetensors`, which the pipeline's load_lora_weights takes as it is.

    Equal adapters give equal files.

    Args:
        pipeline_class: of the family.
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
    pipeline_class.save_lora_weights(
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

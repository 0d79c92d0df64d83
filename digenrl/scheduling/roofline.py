"""From an architecture to seconds: FLOPs, bytes and published rates, each step kept so that it can be read.

    Architecture, Geometry, Training, Reward, Sampling     one workload's published numbers
    Device                                                 rates of one device and its links
    Derivation                                             named quantities with the formula each came from
    forward_flops                                          one transformer forward
    derive                                                 everything a cost model needs of one kind of device

Notation: n latent tokens, t text tokens, d hidden size, f feed-forward size. A linear layer costs 2 FLOPs per
parameter and token, attention 4 d per pair of tokens (scores and weighted sum, 2 d each).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from digenrl.scheduling.costs import KindCosts
from digenrl.scheduling.scopes import StdScope

#: Bytes of bfloat16 and float32.
_HALF, _FULL = 2, 4

#: Weight, master weight, gradient and two moments of Adam in mixed precision (ZeRO, arXiv 1910.02054, section 3.1).
_TRAINED_BYTES = 16

#: Bytes AdamW moves per parameter: weight, both moments read and written, gradient read twice (norm and step).
_STEP_BYTES = 8 * _FULL

#: Activation bytes of one transformer block per token and hidden element, attention scores not kept
#: (Korthikanti et al., arXiv 2205.05198, equation 2 without its attention term).
_BLOCK_BYTES = 34

#: Share of the device's memory that may be planned with; the rest is fragmentation and workspace. Assumption.
_USABLE = 0.9


@dataclass(frozen=True)
class Architecture:
    """A transformer of MMDiT blocks (double: a stream each for latents and text; single: one joint stream) or of
    blocks with self- and cross-attention.

    Attributes:
        hidden: d.
        ffn: f.
        double_blocks: 4 d² + 2 d f parameters per stream.
        single_blocks: 4 d² + 2 d f parameters on all tokens.
        cross_blocks: 6 d² + 2 d f parameters on latents, 2 d² on text.
        text_tokens: t.
        parameters: of the whole transformer.
        counted_flops: of one forward at the workload's geometry, counted independently.
        source: of these numbers.
        self_attentions: second attentions that some double blocks have, 4 d² parameters on latents alone.
    """

    hidden: int
    ffn: int
    double_blocks: int
    single_blocks: int
    cross_blocks: int
    text_tokens: int
    parameters: int
    counted_flops: float
    source: str
    self_attentions: int = 0

    @property
    def blocks(self) -> int:
        """All blocks."""
        return self.double_blocks + self.single_blocks + self.cross_blocks


@dataclass(frozen=True)
class Geometry:
    """One sample. VAEs compress 8 x 8 in space and, for videos, 4 in time; patches are 2 x 2."""

    height: int
    width: int
    frames: int
    decode_flops: float
    source: str

    @property
    def latent_frames(self) -> int:
        """Frames after the VAE, which keeps the first one apart."""
        return (self.frames - 1) // 4 + 1

    @property
    def tokens(self) -> int:
        """n."""
        return self.latent_frames * (self.height // 16) * (self.width // 16)

    @property
    def latent_elements(self) -> int:
        """D, with 16 channels."""
        return 16 * self.latent_frames * (self.height // 8) * (self.width // 8)


@dataclass(frozen=True)
class Sampling:
    """Sizes of one iteration; `trained_steps` is K, the first K steps are trained. See RunShape."""

    groups: int
    group_size: int
    updates: int
    num_steps: int
    trained_steps: int
    std_scope: StdScope
    guidance_passes: int
    micro_batch: int
    source: str


@dataclass(frozen=True)
class Training:
    """What is trained. `shards`: devices that share one replica's weights and states (full training)."""

    method: Literal["lora", "full"]
    shards: int
    rank: int
    adapted_layers: int
    source: str


@dataclass(frozen=True)
class Reward:
    """FLOPs are 2 x parameters x tokens; or device-seconds per sample as measured, if not 0."""

    parameters: float
    tokens: int
    seconds: float
    source: str


@dataclass(frozen=True)
class Device:
    """The device of rate 1.0 and its links; `mfu` and `decode_mfu` are achieved shares of `peak_flops`."""

    name: str
    peak_flops: float
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    host_bytes_per_s: float
    network_bytes_per_s: float
    mfu: float
    decode_mfu: float


@dataclass(frozen=True)
class Quantity:
    """One derived number."""

    name: str
    value: float
    unit: str
    formula: str

    def __str__(self) -> str:
        return f"{self.name:<26} = {_readable(self.value):>10} {self.unit:<8} {self.formula}"


@dataclass
class Derivation:
    """Quantities in the order they were derived."""

    quantities: dict[str, Quantity] = field(default_factory=dict)

    def put(self, name: str, value: float, unit: str, formula: str) -> float:
        """Keep a quantity and return its value."""
        self.quantities[name] = Quantity(name, value, unit, formula)
        return value

    def __getitem__(self, name: str) -> float:
        return self.quantities[name].value

    def __iter__(self) -> Iterator[Quantity]:
        return iter(self.quantities.values())


def forward_flops(model: Architecture, tokens: int) -> float:
    """FLOPs of one forward of one sample with n latent tokens. Modulation and embeddings (< 1 %) are left out."""
    d, text = model.hidden, model.text_tokens
    stream = 4 * d**2 + 2 * d * model.ffn
    joint = tokens + text
    linear = 2 * joint * stream * (model.double_blocks + model.single_blocks)
    attention = 4 * d * joint**2 * (model.double_blocks + model.single_blocks)
    linear += 2 * model.cross_blocks * (tokens * (stream + 2 * d**2) + text * 2 * d**2)
    attention += 4 * d * model.cross_blocks * (tokens**2 + tokens * text)
    linear += 2 * model.self_attentions * tokens * 4 * d**2
    attention += 4 * d * model.self_attentions * tokens**2
    return float(linear + attention)


def derive(
    model: Architecture,
    geometry: Geometry,
    sampling: Sampling,
    training: Training,
    reward: Reward,
    device: Device,
    rate: float,
) -> Derivation:
    """All quantities of a kind of device that computes `rate` times as fast as `device`."""
    out = Derivation()
    n, mb, passes = geometry.tokens, sampling.micro_batch, sampling.guidance_passes
    speed = device.peak_flops * device.mfu * rate
    out.put("speed", speed, "FLOP/s", f"peak x MFU {device.mfu:.3f} x rate {rate}")
    out.put("tokens", n, "", "latent frames x height/16 x width/16")
    forward = forward_flops(model, n)
    out.put("forward", forward, "FLOP", "2 x parameters per token x tokens + 4 d x pairs x blocks")
    step = out.put("sample step", forward * passes, "FLOP", f"forward x {passes} guidance pass(es)")
    out.put("rollout_step_s", mb * step / speed, "s", f"{mb} samples x sample step / speed")
    decoding = device.peak_flops * device.decode_mfu * rate
    decoded = f"{mb} samples x {geometry.decode_flops:.4g} FLOP / (peak x {device.decode_mfu} x rate)"
    out.put("decode_s", mb * geometry.decode_flops / decoding, "s", decoded)
    _derive_training(out, model, sampling, training, device, rate)
    _derive_memory(out, model, n, sampling, training, device)
    _derive_movement(out, model, geometry, sampling, training, device)
    if reward.seconds:
        out.put("score_s", mb * reward.seconds / rate, "s", f"{mb} samples x measured {reward.seconds} s / rate")
    else:
        scoring = mb * 2 * reward.parameters * reward.tokens
        out.put("score_s", scoring / speed, "s", f"{mb} samples x 2 N tokens / speed")
    return out


def _derive_training(
    out: Derivation, model: Architecture, sampling: Sampling, training: Training, device: Device, rate: float
) -> None:
    full, mb = training.method == "full", sampling.micro_batch
    forwards = 4 if full else 3
    what = "forward, recomputation, backward x 2" if full else "forward, recomputation, backward to activations"
    adapter = training.adapted_layers * 2 * training.rank * model.hidden
    trained = model.parameters if full else adapter
    out.put("trained", trained, "", "all parameters" if full else "2 x rank x d x adapted layers")
    out.put("replay_share", 1 / forwards, "", f"one forward of a train unit's {forwards}")
    out.put("train step", forwards * out["sample step"], "FLOP", f"sample step x {forwards}: {what}")
    out.put("train_s", mb * out["train step"] / out["speed"], "s", f"per timestep: {mb} samples x train step / speed")
    moved = _STEP_BYTES * trained / training.shards
    out.put("update_s", moved / device.memory_bytes_per_s / rate, "s", "32 x trained / shards / memory rate")


def _derive_memory(
    out: Derivation, model: Architecture, n: int, sampling: Sampling, training: Training, device: Device
) -> None:
    """What a train unit needs, and with it the largest timestep batch."""
    frozen = 0 if training.method == "full" else model.parameters
    states = _HALF * frozen + _TRAINED_BYTES * out["trained"] / training.shards
    out.put("states", states, "B", "16 x trained / shards" + (" + 2 x frozen parameters" if frozen else ""))
    width = (n + (0 if model.cross_blocks else model.text_tokens)) * model.hidden
    kept = width * (_HALF * model.blocks + _BLOCK_BYTES) * sampling.guidance_passes
    out.put("activations", kept, "B", "tokens x d x (2 per checkpointed block + 34 in one block) x guidance passes")
    room, unit = _USABLE * device.memory_bytes - states, kept * sampling.micro_batch
    fitting = f"({_USABLE} x memory - states) / ({sampling.micro_batch} x activations)"
    if out.put("timesteps that fit", room // unit, "", fitting) < 1:
        raise ValueError(
            f"micro_batch={sampling.micro_batch} does not fit: {unit:.3g} B of activations in {room:.3g} B"
        )


def _derive_movement(
    out: Derivation, model: Architecture, geometry: Geometry, sampling: Sampling, training: Training, device: Device
) -> None:
    trained, shards = out["trained"], training.shards
    size = _HALF if training.method == "full" else _FULL
    out.put("install_s", size * trained / device.network_bytes_per_s, "s", f"{size} x trained / network")
    away = _TRAINED_BYTES * trained / shards
    out.put(
        "switch_s", away / device.host_bytes_per_s, "s", "trainer's states to the host: 16 x trained / shards / link"
    )
    gathered = 3 * _HALF * model.parameters * (shards - 1) / shards
    what = f"2 all-gathers, 1 reduce-scatter of 2 x parameters x {shards - 1}/{shards} / link, not overlapped"
    out.put("gather_s", gathered / device.link_bytes_per_s, "s", what if shards > 1 else "weights are not sharded")
    latents = (sampling.trained_steps + 1) * geometry.latent_elements * _FULL * sampling.micro_batch
    out.put("trajectory", latents, "B", "(K + 1) latents x D x 4 x samples")
    out.put("transfer_s", latents / device.network_bytes_per_s, "s", "trajectory / network")


def kind_costs(derivation: Derivation, trained_steps: int) -> KindCosts:
    """The costs a derivation comes to, at every timestep batch that fits; the gap is not derived but measured."""
    most = min(trained_steps, int(derivation["timesteps that fit"]))
    names = ("rollout_step_s", "decode_s", "score_s", "update_s", "switch_s", "install_s", "transfer_s", "gather_s")
    return KindCosts(
        train_s={batch: batch * derivation["train_s"] for batch in range(1, most + 1)},
        **{name: derivation[name] for name in names},
    )


def _readable(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) and value < 1e7 else f"{value:.4g}"

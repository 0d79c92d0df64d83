"""Workloads in the shapes of published models, for planning and emulation without their weights.

load()            all workloads of digenrl/data/workloads.yaml, by name
Checkpoint        which published checkpoint has the shape
Workload          its numbers; `shape` and `cost_model` for the scheduler; `explain` for a reader

python -m digenrl.scheduling.workloads                    names
python -m digenrl.scheduling.workloads --explain NAME     every derivation of one workload
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from difflib import get_close_matches
from importlib.resources import files
from typing import Any, TypeVar

import yaml

from digenrl.scheduling.costs import CostModel
from digenrl.scheduling.roofline import (
    Architecture,
    Derivation,
    Device,
    Geometry,
    Reward,
    Sampling,
    Training,
    derive,
    forward_flops,
    kind_costs,
)
from digenrl.scheduling.shape import RunShape

_Record = TypeVar("_Record")


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint.

    Attributes:
        repository: on the Hugging Face hub.
        other_parameters: of its text encoders and VAE.
        adapted_layers: layers of d x d that the family's LoRA targets come to.
    """

    repository: str
    other_parameters: int
    adapted_layers: int


@dataclass(frozen=True)
class Workload:
    """One workload.

    Attributes:
        name: in the file.
        checkpoint: that has its shape.
        model: transformer.
        geometry: of a sample.
        run: sizes of an iteration.
        training: what is trained.
        reward: what scores.
        device: the device of rate 1.0.
        rates: kind of worker -> relative speed; the first is the reference.
        device_sources: where the device's numbers are from, as (what, source).
    """

    name: str
    checkpoint: Checkpoint
    model: Architecture
    geometry: Geometry
    run: Sampling
    training: Training
    reward: Reward
    device: Device
    rates: Mapping[str, float]
    device_sources: tuple[tuple[str, str], ...]

    @property
    def timestep_batch(self) -> int:
        """The largest timestep batch that fits the reference device."""
        return min(self.run.trained_steps, int(self.derivation()["timesteps that fit"]))

    def shape(self, iterations: int, timestep_batch: int | None = None) -> RunShape:
        """The run's shape, without evaluation.

        Args:
            iterations: of the run.
            timestep_batch: trained timesteps per train unit; None: the largest that fits.

        Raises:
            ValueError: the timestep batch does not fit.
        """
        run, steps = self.run, tuple(range(self.run.trained_steps))
        batch = self.timestep_batch if timestep_batch is None else timestep_batch
        if not 1 <= batch <= self.timestep_batch:
            raise ValueError(f"timestep_batch={batch} of {self.name} must be 1 to {self.timestep_batch}")
        return RunShape(
            run_seed=0,
            eval_seed=0,
            start_iteration=0,
            iterations=iterations,
            groups=run.groups,
            group_size=run.group_size,
            micro_batch=run.micro_batch,
            num_steps=run.num_steps,
            updates=run.updates,
            timestep_batch=batch,
            trained_steps=lambda iteration: steps,
            detailed=lambda iteration: False,
            eval_prompts=0,
            eval_micro_batch=1,
            eval_num_steps=run.num_steps,
            evaluated=lambda version: False,
        )

    def cost_model(self, shape: RunShape, gap_s: float = 0.0) -> CostModel:
        """Costs of all kinds of device.

        Args:
            shape: as made by `shape`.
            gap_s: orchestration gap between two units of a lane, as measured.
        """
        profile = {
            kind: replace(kind_costs(self.derivation(kind), self.run.trained_steps), gap_s=gap_s) for kind in self.rates
        }
        return CostModel(shape, profile, replay_share=self.derivation()["replay_share"])

    def derivation(self, kind: str | None = None) -> Derivation:
        """Every derived quantity of a kind of device, by default the reference."""
        rate = self.rates[kind or next(iter(self.rates))]
        return derive(self.model, self.geometry, self.run, self.training, self.reward, self.device, rate)

    def explain(self, kind: str | None = None) -> str:
        """The derivation and all sources, for a reader."""
        kind = kind or next(iter(self.rates))
        run = self.run
        lines = [
            f"{self.name} on {kind} ({self.rates[kind]} x {self.device.name})",
            f"P={run.groups} groups x G={run.group_size} samples, U={run.updates} updates, T={run.num_steps} steps, "
            f"K={run.trained_steps} trained, std scope {run.std_scope}, {self.training.method}, "
            f"micro-batches of {run.micro_batch}",
            "",
            *map(str, self.derivation(kind)),
            "",
            "sources",
        ]
        given = ("model", "geometry", "run", "training", "reward")
        sources = [(name, str(getattr(self, name).source)) for name in given] + list(self.device_sources)
        return "\n".join([*lines, *(f"  {name:<10} {' '.join(source.split())}" for name, source in sources)])


def load() -> dict[str, Workload]:
    """All workloads that ship with DigenRL, by name."""
    data = yaml.safe_load(files("digenrl.data").joinpath("workloads.yaml").read_text(encoding="utf-8"))
    hardware, given = data["hardware"], data["workloads"]
    device = _device(hardware, given)
    rates = {kind: float(rate) for kind, rate in hardware["kinds"]["rates"].items()}
    sources = tuple(
        (name, str(hardware[name]["source"])) for name in ("device", "network", "mfu", "decode_mfu", "kinds")
    )
    return {
        name: Workload(
            name=name,
            checkpoint=_record(Checkpoint, entry["checkpoint"]),
            model=_record(Architecture, entry["model"]),
            geometry=_record(Geometry, entry["geometry"]),
            run=_record(Sampling, entry["run"]),
            training=_record(Training, entry["training"]),
            reward=_record(Reward, entry["reward"]),
            device=device,
            rates=rates,
            device_sources=sources,
        )
        for name, entry in given.items()
    }


def workload(name: str) -> Workload:
    """One workload.

    Raises:
        ValueError: there is none of that name.
    """
    known = load()
    if name not in known:
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
        raise ValueError(f"workload {name!r} is not known; {hint}")
    return known[name]


def _device(hardware: Mapping[str, Any], workloads: Mapping[str, Any]) -> Device:
    measured, given = hardware["mfu"], hardware["device"]
    model = _record(Architecture, workloads[measured["workload"]]["model"])
    size = Geometry(measured["height"], measured["width"], measured["frames"], 0.0, "")
    flops = forward_flops(model, size.tokens) * measured["steps"]
    return Device(
        name=given["name"],
        peak_flops=given["peak_flops"],
        memory_bytes=given["memory_bytes"],
        memory_bytes_per_s=given["memory_bytes_per_s"],
        link_bytes_per_s=given["link_bytes_per_s"],
        host_bytes_per_s=given["host_bytes_per_s"],
        network_bytes_per_s=hardware["network"]["bytes_per_s"],
        mfu=flops / measured["seconds"] / given["peak_flops"],
        decode_mfu=hardware["decode_mfu"]["share"],
    )


def _record(kind: type[_Record], given: Mapping[str, Any]) -> _Record:
    known = fields(kind)  # type: ignore[arg-type]
    names = {f.name for f in known}
    needed = {f.name for f in known if f.default is MISSING}
    if not needed <= given.keys() <= names:
        raise ValueError(f"{kind.__name__} needs {sorted(needed)} and takes {sorted(names)}, got {sorted(given)}")
    return kind(**given)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m digenrl.scheduling.workloads", description=__doc__.split("\n")[0])
    parser.add_argument("--explain", metavar="NAME", help="print every derivation of one workload")
    parser.add_argument("--kind", help="kind of device (default: the reference)")
    options = parser.parse_args(arguments)
    if options.explain is None:
        print("\n".join(load()))
        return 0
    try:
        found = workload(options.explain)
        if options.kind is not None and options.kind not in found.rates:
            raise ValueError(f"kind {options.kind!r} is not known; there are {', '.join(found.rates)}")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(found.explain(options.kind))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The trained weights a run has on disk.

newest_weights(directory, config) -> Weights     the newest whole checkpoint, else what was exported at the run's end
export(config, weights, directory)       writes that: a folder `lora` or `transformer`, as diffusers takes it
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load as load_tensors
from safetensors.torch import load_file

from digenrl.algorithms.optimizer import evaluated
from digenrl.config import RunConfig
from digenrl.config.errors import ConfigError
from digenrl.models.registry import read_transformer, save_lora, save_transformer
from digenrl.policy import Adapter
from flows.stores import prefect_for, stores_of
from storage import checkpoints
from storage.runs import RunDirectory

LORA_FILE = "pytorch_lora_weights.safetensors"
#: diffusers writes the part of the pipeline in front of every name.
_PART = "transformer."


@dataclass(frozen=True)
class Weights:
    """An adapter and where it was found.

    Attributes:
        adapter: as `digenrl.policy.Policy` names it, on the CPU; the moving average if the run keeps one.
        iterations: iterations it was trained for; None if the place does not say.
        place: URL of the checkpoint, or path of what was exported.
        kind: for people.
    """

    adapter: Adapter
    iterations: int | None
    place: str
    kind: str = "LoRA"

    @property
    def label(self) -> str:
        """For people: how far it was trained, and where it lies."""
        trained = (
            f"trained {self.kind}" if self.iterations is None else f"checkpoint after {self.iterations} iterations"
        )
        return f"{trained} ({self.place})"


def newest_weights(directory: RunDirectory, config: RunConfig) -> Weights:
    """The newest weights of a run.

    Raises:
        ConfigError: the run has saved none yet, or its checkpoints cannot be read.
    """
    with prefect_for(config):
        stores = stores_of(directory, config)
    found = checkpoints.newest(*stores.distinct)
    if found is not None:
        weights = evaluated(found.tensors["adapter"], found.tensors["optimizer"])
        return Weights(weights, found.info.iteration, found.info.url)
    exported = exported_to(directory, config)
    if (exported / LORA_FILE).is_file():
        return Weights(_read_lora(exported / LORA_FILE), None, str(exported / LORA_FILE))
    if (exported / "config.json").is_file():
        return Weights(read_transformer(exported), None, str(exported), "transformer")
    raise ConfigError(
        f"the run {directory.name!r} has no trained weights yet: no whole checkpoint in {stores.main.root} and "
        f"nothing in {exported}; train it with `digenrl resume {directory.name}`"
    )


def exported_to(directory: RunDirectory, config: RunConfig) -> Path:
    """Where the result of a run is written."""
    return directory.path / ("lora" if config.method == "lora" else "transformer")


def export(config: RunConfig, weights: bytes, directory: Path) -> None:
    """Write trained weights so that diffusers takes them.

    Args:
        config: of the run.
        weights: a safetensors file, which unlike tensors can be sent to any process.
        directory: is created if missing.
    """
    if config.adapter is not None:
        save_lora(config.model.family, load_tensors(weights), config.adapter, directory)
    else:
        save_transformer(config.model, load_tensors(weights), directory)


def _read_lora(path: Path) -> Adapter:
    return {name.removeprefix(_PART): tensor for name, tensor in load_file(path).items()}

"""The trained weights a run has on disk.

newest_weights(directory, config) -> Weights     the newest whole checkpoint, else the LoRA written at the run's end
write_lora(...)                          writes that LoRA
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load as load_tensors
from safetensors.torch import load_file

from digenrl.algorithms.optimizer import evaluated
from digenrl.config import LoraConfig, RunConfig
from digenrl.config.errors import ConfigError
from digenrl.models.registry import save_lora
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
        place: URL of the checkpoint, or path of the LoRA file.
    """

    adapter: Adapter
    iterations: int | None
    place: str

    @property
    def label(self) -> str:
        """For people: how far it was trained, and where it lies."""
        trained = "trained LoRA" if self.iterations is None else f"checkpoint after {self.iterations} iterations"
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
        adapter = evaluated(found.tensors["adapter"], found.tensors["optimizer"])
        return Weights(adapter, found.info.iteration, found.info.url)
    lora = directory.path / "lora" / LORA_FILE
    if lora.is_file():
        return Weights(_read_lora(lora), None, str(lora))
    raise ConfigError(
        f"the run {directory.name!r} has no trained weights yet: no whole checkpoint in {stores.main.root} and no "
        f"{lora}; train it with `digenrl resume {directory.name}`"
    )


def write_lora(family: str, adapter: bytes, lora: LoraConfig, directory: Path) -> None:
    """Write an adapter so that the family's diffusers pipeline takes it.

    Args:
        family: of models.
        adapter: a safetensors file, which unlike tensors can be sent to any process.
        lora: rank and alpha.
        directory: is created if missing.
    """
    save_lora(family, load_tensors(adapter), lora, directory)


def _read_lora(path: Path) -> Adapter:
    return {name.removeprefix(_PART): tensor for name, tensor in load_file(path).items()}

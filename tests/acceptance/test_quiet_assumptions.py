"""Small things that users of comparable systems met, each of which would spoil a run without a word."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest
import torch

from digenrl.config.errors import ConfigError
from digenrl.policy import adapter_hash
from digenrl.scheduling.messages import AdapterRef
from runs import small
from workers.held import join_state, split_state
from workers.receipts import RunSetup
from workers.replica import Replica

IMPORT_EVERYTHING = """
import importlib, pkgutil
import torch

def refuse(*arguments, **named):
    raise AssertionError("asked about CUDA while importing")

# On a machine with a GPU each of these starts the driver, or may.
for name in ("_lazy_init", "is_available", "device_count", "current_device"):
    setattr(torch.cuda, name, refuse)
for package in ("digenrl", "storage", "workers", "tasks", "flows"):
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        importlib.import_module(module.name)
"""


def test_importing_anything_leaves_cuda_alone() -> None:
    """A process that has touched CUDA cannot be forked; workers are forks of one that has imported everything."""
    done = subprocess.run([sys.executable, "-c", IMPORT_EVERYTHING], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="samples_per_prompt"):
        small("algorithm.samples_per_prompt=1")


def test_base_weights_are_the_same_after_a_hundred_publications() -> None:
    torch.set_num_threads(1)
    replica = Replica(RunSetup("epoch", small(), 0), "here")

    def base() -> str:
        digest = hashlib.sha256()
        for name, tensor in sorted(replica.policy.model.transformer.state_dict().items()):
            if "lora" not in name:
                digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    before, adapter = base(), replica.policy.initial_adapter()
    for theta in range(1, 101):
        moved = {name: tensor + 0.01 * theta for name, tensor in adapter.items()}
        replica.store(AdapterRef(theta), None, join_state(moved), adapter_hash(moved))
        replica.policy.bind(split_state(replica.load(AdapterRef(theta))[1]).adapter, theta)
        replica.drop(((theta, AdapterRef(theta)),))
    with replica.policy.reference():
        pass
    assert base() == before

"""What one worker holds of weights, by the theta that made them: adapters, behaviour policies, optimiser states.

The behaviour policy of a theta is what generates samples once it is published. For most algorithms that is the adapter
itself. Where it has weights of its own they go wherever the adapter goes: an update needs no other worker for it, and
nobody can hold the one without the other.
"""

from __future__ import annotations

from digenrl import runspec
from digenrl.algorithms.optimizer import OptimizerState
from digenrl.config import RunConfig
from digenrl.policy import Adapter, NumberedAdapter, Policy, adapter_hash
from digenrl.scheduling.messages import AdapterRef
from workers.held import Tensors, TrainerStateRef, join_state, split_state


class Weights:
    """The weights of one run on one worker.

    Args:
        config: the run.
        policy: whose adapters these are.
    """

    def __init__(self, config: RunConfig, policy: Policy) -> None:
        self._config = config
        self._policy = policy
        self._adapters: dict[int, Adapter] = {}
        self._behaviours: dict[int, Adapter] = {}  # where it is not the adapter itself
        self._optimizers: dict[int, OptimizerState] = {}

    def trained(self, theta: int) -> NumberedAdapter:
        """The adapter."""
        return NumberedAdapter(theta, self._adapters[theta])

    def behaviour(self, theta: int) -> NumberedAdapter:
        """What generates samples of the version that `theta` is or, within an iteration, of the one it is made from."""
        if theta in self._behaviours:
            return NumberedAdapter(theta, self._behaviours[theta], behaviour=True)
        return self.trained(theta)

    def optimizer(self, theta: int) -> OptimizerState:
        """The optimiser's state after `theta`."""
        return self._optimizers[theta]

    def begin(self, adapter: Adapter) -> str:
        """Take `adapter` as theta 0, with a fresh optimiser; returns its content hash."""
        self._adapters[0], self._optimizers[0] = adapter, OptimizerState.initial(adapter)
        return adapter_hash(adapter)

    def advance(self, theta: int, adapter: Adapter, optimizer: OptimizerState) -> str:
        """Take what the update `theta` made; returns the content hash, with that of the behaviour policy."""
        behaviour = runspec.behaviour_after(self._config, theta, self.behaviour(theta - 1).weights, adapter)
        self._put(theta, adapter, behaviour)
        self._optimizers[theta] = optimizer
        return adapter_hash(adapter, behaviour)

    def holds(self, ref: AdapterRef | TrainerStateRef) -> bool:
        """Whether `load` would succeed."""
        return ref.theta in (self._adapters if isinstance(ref, AdapterRef) else self._optimizers)

    def load(self, ref: AdapterRef | TrainerStateRef) -> Tensors:
        """The tensors of `ref`, to be sent elsewhere.

        Raises:
            KeyError: it is not here.
        """
        optimizer = self._optimizers[ref.theta].to_tensors() if isinstance(ref, TrainerStateRef) else None
        return join_state(self._adapters[ref.theta], self._behaviours.get(ref.theta), optimizer)

    def store(self, ref: AdapterRef | TrainerStateRef, tensors: Tensors, expected_hash: str) -> None:
        """Keep what arrived.

        Raises:
            ValueError: it is not this policy's, or its hash is not `expected_hash` (empty: any); nothing is kept.
        """
        placed = {name: tensor.to(self._policy.device) for name, tensor in tensors.items()}
        adapter, behaviour, optimizer = split_state(placed)
        for weights in (adapter, behaviour or adapter):
            self._policy.check(weights, f"theta {ref.theta}")
        found = adapter_hash(adapter, behaviour)
        if expected_hash and found != expected_hash:
            raise ValueError(
                f"adapter theta {ref.theta} arrived with hash {found[:12]}, published was {expected_hash[:12]}: "
                "not installed"
            )
        self._put(ref.theta, adapter, behaviour)
        if isinstance(ref, TrainerStateRef):
            self._optimizers[ref.theta] = OptimizerState.from_tensors(optimizer)

    def drop(self, theta: int) -> None:
        """Forget everything of `theta`."""
        for held in (self._adapters, self._behaviours, self._optimizers):
            held.pop(theta, None)

    def _put(self, theta: int, adapter: Adapter, behaviour: Adapter | None) -> None:
        if behaviour is None:
            self._behaviours.pop(theta, None)
        else:
            self._behaviours[theta] = behaviour
        self._adapters[theta] = adapter

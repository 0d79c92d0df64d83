"""What one worker holds of weights, by the theta that made them: adapters, what stands for them, optimiser states.

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
        self._averages: dict[int, Adapter] = {}  # where evaluations use them
        self._optimizers: dict[int, OptimizerState] = {}

    def trained(self, theta: int) -> NumberedAdapter:
        """The adapter."""
        return NumberedAdapter(theta, self._adapters[theta])

    def behaviour(self, theta: int) -> NumberedAdapter:
        """What generates samples of the version that `theta` is or, within an iteration, of the one it is made from."""
        if theta in self._behaviours:
            return NumberedAdapter(theta, self._behaviours[theta], "behaviour")
        return self.trained(theta)

    def evaluated(self, theta: int) -> NumberedAdapter:
        """What evaluations use: the moving average where one is kept."""
        if self._averaged:
            return NumberedAdapter(theta, self._averages[theta], "average")
        return self.trained(theta)

    def optimizer(self, theta: int) -> OptimizerState:
        """The optimiser's state after `theta`."""
        return self._optimizers[theta]

    def begin(self, adapter: Adapter) -> str:
        """Take `adapter` as theta 0, with a fresh optimiser; returns its content hash."""
        optimizer = OptimizerState.initial(adapter, averaged=self._averaged)
        self._put(0, adapter, {}, optimizer.average, optimizer)
        return adapter_hash(adapter)

    def advance(self, theta: int, adapter: Adapter, optimizer: OptimizerState) -> str:
        """Take what the update `theta` made; returns the content hash, with that of the behaviour policy."""
        behaviour = runspec.behaviour_after(self._config, theta, self.behaviour(theta - 1).weights, adapter)
        self._put(theta, adapter, behaviour or {}, optimizer.average, optimizer)
        return adapter_hash(adapter, behaviour)

    def holds(self, ref: AdapterRef | TrainerStateRef) -> bool:
        """Whether `load` would succeed."""
        return ref.theta in (self._adapters if isinstance(ref, AdapterRef) else self._optimizers)

    def load(self, ref: AdapterRef | TrainerStateRef) -> Tensors:
        """The tensors of `ref`, to be sent elsewhere.

        Raises:
            KeyError: it is not here.
        """
        adapter, behaviour = self._adapters[ref.theta], self._behaviours.get(ref.theta)
        if isinstance(ref, TrainerStateRef):
            return join_state(adapter, behaviour, optimizer=self._optimizers[ref.theta].to_tensors())
        return join_state(adapter, behaviour, self._averages.get(ref.theta))

    def store(self, ref: AdapterRef | TrainerStateRef, tensors: Tensors, expected_hash: str) -> None:
        """Keep what arrived.

        Raises:
            ValueError: it is not this policy's, or its hash is not `expected_hash` (empty: any); nothing is kept.
        """
        placed = {name: tensor.to(self._policy.device) for name, tensor in tensors.items()}
        adapter, behaviour, average, optimizer = split_state(placed)
        for weights in (adapter, behaviour or adapter, average or adapter):
            self._policy.check(weights, f"theta {ref.theta}")
        found = adapter_hash(adapter, behaviour or None)
        if expected_hash and found != expected_hash:
            raise ValueError(
                f"adapter theta {ref.theta} arrived with hash {found[:12]}, published was {expected_hash[:12]}: "
                "not installed"
            )
        state = OptimizerState.from_tensors(optimizer) if isinstance(ref, TrainerStateRef) else None
        self._put(ref.theta, adapter, behaviour, average if state is None else state.average, state)

    def drop(self, theta: int) -> None:
        """Forget everything of `theta`."""
        for held in (self._adapters, self._behaviours, self._averages, self._optimizers):
            held.pop(theta, None)

    def _put(
        self, theta: int, adapter: Adapter, behaviour: Adapter, average: Adapter, optimizer: OptimizerState | None
    ) -> None:
        """Empty: there is none. An optimiser's state that is here stays, unless another one comes."""
        for held, weights in ((self._behaviours, behaviour), (self._averages, average)):
            if weights:
                held[theta] = weights
            else:
                held.pop(theta, None)
        self._adapters[theta] = adapter
        if optimizer is not None:
            self._optimizers[theta] = optimizer

    @property
    def _averaged(self) -> bool:
        return self._config.optimizer.ema_decay is not None

"""What units cost: seconds per kind of worker, from a profile and then from what the workers report.

    KindCosts    the seconds of one kind of worker, as profiled; what is not known is None
    CostModel    answers for every unit and kind, learns from events, speaks JSON

A model has no clock and no randomness: equal profiles and equal events give equal answers. Time that a unit takes on
its lane (`seconds`) is told apart from what lies between two units (`between_s`) and from copies (`move_s`). Of a
unit's seconds, `work_s` are work in the sense of the work bound: everything but gathering sharded parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from typing import Any, cast

from digenrl.identity import MicroBatchId
from digenrl.scheduling.messages import (
    Command,
    Commit,
    Event,
    Install,
    Reduce,
    Trained,
    TrajectoryRef,
    Transfer,
    Transferred,
    UnitFinished,
    VersionInstalled,
    WorkerJoined,
    WorkerLost,
)
from digenrl.scheduling.shape import RunShape
from digenrl.scheduling.units import RolloutUnit, ScoreUnit, TrainUnit, Unit, UpdateUnit


@dataclass(frozen=True)
class KindCosts:
    """Seconds on one kind of worker; None: not known.

    Attributes:
        rollout_step_s: one denoising step of one micro-batch, guidance included.
        decode_s: decoding one micro-batch, added to its last rollout unit.
        train_s: timestep batch -> forward and backward of one micro-batch at so many timesteps, without gathering.
        score_s: rewards of one micro-batch, on the cpu lane.
        update_s: one optimiser step.
        switch_s: going over from rollout to training or back.
        install_s: bringing an adapter to this kind of worker; also a Commit, and one source of a Reduce.
        transfer_s: bringing one trajectory to it.
        gather_s: gathering sharded parameters, once per train unit.
        gap_s: orchestration between two units of one lane, the time the lane stands still.
    """

    rollout_step_s: float | None = None
    decode_s: float | None = None
    train_s: Mapping[int, float] = field(default_factory=dict)
    score_s: float | None = None
    update_s: float | None = None
    switch_s: float | None = None
    install_s: float | None = None
    transfer_s: float | None = None
    gather_s: float | None = None
    gap_s: float | None = None

    @classmethod
    def of(cls, kind: str, given: Mapping[str, Any]) -> KindCosts:
        """From the entries of one kind in a profile.

        Raises:
            ValueError: an unknown name, or a value that is not a number of seconds.
        """
        known = [f.name for f in fields(cls)]
        values: dict[str, Any] = {}
        for name, value in given.items():
            if name not in known:
                near = get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}"
                raise ValueError(f"profile.{kind}.{name} is not a cost{hint}")
            if name != "train_s":
                values[name] = None if value is None else _seconds(f"profile.{kind}.{name}", value)
            elif not isinstance(value, Mapping) or not all(str(batch).isdigit() and int(batch) for batch in value):
                raise ValueError(f"profile.{kind}.train_s={value!r} must map timestep batches (1, 2, ...) to seconds")
            else:
                values[name] = {int(b): _seconds(f"profile.{kind}.train_s.{b}", s) for b, s in sorted(value.items())}
        return cls(**values)


#: Costs of computing: they scale with the speed of the device.
_COMPUTED = ("rollout_step_s", "decode_s", "score_s", "update_s")

#: One optimiser-free training pass is a forward and a backward of twice its FLOPs.
_TRAIN_PER_STEP = 3.0

#: Numbers a model is made with besides the costs.
_OPTIONS = ("replay_share", "streamed", "weight")

#: The kind of worker under which a model files costs that nobody has measured.
GUESSED = "guess"

#: A single report moves an estimate as if it were at most this many times off: a first unit may include compilation.
_SURPRISE = 4.0

# A cost is filed under the name of its field, or under (train, timestep batch).
_Item = str | int


class CostModel:
    """Seconds of every unit on every kind of worker.

    What is not known is estimated, in this order:

    - train at another timestep batch: interpolated between its neighbours, beyond them in proportion to the batch;
    - a computed cost of a kind: that of the first kind that knows it, times the relative slowness of the two, which
      is the geometric mean over the computed costs both know (1 if none);
    - another cost of a kind (switch, install, transfer, gather, gap): that of the first kind that knows it, else 0;
    - if no kind knows how long training takes, a trained timestep counts as three rollout steps (forward and
      backward), and the other way round; decode, score and update that no kind knows count as 0.

    Units of more or fewer samples than a training micro-batch (evaluation) cost in proportion.
    """

    def __init__(
        self,
        shape: RunShape,
        profile: Mapping[str, KindCosts],
        *,
        replay_share: float = 1 / 3,
        streamed: float = 5 / 3,
        weight: float = 0.2,
    ) -> None:
        """Start from a profile.

        Args:
            shape: the run's; tells which unit decodes and how many samples a unit has.
            profile: costs by kind of worker. The first kind is the reference for what others lack.
            replay_share: a no-grad forward under the version's adapter, which train units after an iteration's first
                update need for `old_log_prob`, as a share of the train unit: 1/3 for LoRA with gradient checkpointing
                (forward, recomputation, backward to the activations), 1/4 for full training with it.
            streamed: how many times as long a train unit takes before its group is complete: its backward pass, of
                twice the FLOPs of its forward pass, is done twice.
            weight: of a new observation in the exponential average.

        Raises:
            ValueError: the profile is empty, or knows neither rollout_step_s nor train_s of any kind.
        """
        if not any(costs.rollout_step_s is not None or costs.train_s for costs in profile.values()):
            raise ValueError(
                f"profile of kinds {sorted(profile)} must give rollout_step_s or train_s of at least one kind of worker"
            )
        self.shape = shape
        self.replay_share = replay_share
        self.streamed = streamed
        self.weight = weight
        self._own: dict[str, dict[_Item, float]] = {kind: _items(costs) for kind, costs in profile.items()}
        self._kind_of: dict[str, str] = {}
        self._rolled: dict[str, bool] = {}
        # Timestep batches of the run's train units.
        first = MicroBatchId("train", shape.start_iteration, 0)
        self._used = {len(unit.steps) for unit in shape.train_units(first)}
        # What was estimated from the costs of others. It is forgotten whenever a cost changes.
        self._estimated: dict[tuple[str, _Item], float] = {}

    # --- reading and writing ---

    @classmethod
    def from_profile(cls, shape: RunShape, profile: Mapping[str, Mapping[str, Any]], **options: float) -> CostModel:
        """From nested mappings, as YAML gives them: kind -> name of the cost -> seconds.

        Raises:
            ValueError: see KindCosts.of and __init__.
        """
        return cls(shape, {kind: KindCosts.of(kind, given) for kind, given in profile.items()}, **options)

    @classmethod
    def guess(cls, shape: RunShape) -> CostModel:
        """Nothing is known: a step takes a second, whoever does it. The first report of a kind is taken as it is."""
        return cls(shape, {GUESSED: KindCosts(rollout_step_s=1.0)})

    def to_json(self) -> dict[str, Any]:
        """Plain data from which `from_json` makes an equal model."""
        kinds = {kind: asdict(self._known(kind)) for kind in self._own}
        shares = {name: getattr(self, name) for name in _OPTIONS}
        return {**shares, "kinds": kinds, "workers": dict(self._kind_of)}

    @classmethod
    def from_json(cls, shape: RunShape, data: Mapping[str, Any]) -> CostModel:
        """The inverse of `to_json`."""
        model = cls.from_profile(shape, data["kinds"], **{name: data[name] for name in _OPTIONS})
        model._kind_of = dict(data["workers"])
        return model

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds something is known of, the reference first."""
        return tuple(self._own)

    def of_kind(self, kind: str) -> KindCosts:
        """All costs of a kind, estimates included."""
        values: dict[str, Any] = {f.name: self._cost(kind, f.name) for f in fields(KindCosts) if f.name != "train_s"}
        return KindCosts(train_s={b: self._cost(kind, b) for b in self.timestep_batches}, **values)

    # --- answers ---

    def seconds(self, unit: Unit, kind: str, *, streamed: bool = False) -> float:
        """Seconds of a unit on its lane. `streamed`: a train unit whose group is not complete."""
        return sum([share * self._cost(kind, item) for item, share in self._parts(unit, streamed)])

    def work_s(self, unit: Unit, kind: str) -> float:
        """The part of `seconds` that is work: all but gathering."""
        return math.fsum(share * self._cost(kind, item) for item, share in self._parts(unit) if item != "gather_s")

    def between_s(self, previous: Unit | None, unit: Unit, kind: str) -> float:
        """Seconds between two units of one lane: the orchestration gap, and the switch if the role changes."""
        gap = self._cost(kind, "gap_s")
        if (
            previous is None
            or unit.lane != "device"
            or isinstance(previous, RolloutUnit) == isinstance(unit, RolloutUnit)
        ):
            return gap
        return gap + self._cost(kind, "switch_s")

    def move_s(self, command: Command) -> float:
        """Seconds of an Install, a Transfer, a Commit, or one source of a Reduce; 0 for other commands.

        The kind is that of the receiving worker if its joining was observed, else the reference.
        """
        match command:
            case Install(_, worker):
                return self._cost(self._kind_of.get(worker, self.kinds[0]), "install_s")
            case Transfer(_, _, target):
                return self._cost(self._kind_of.get(target, self.kinds[0]), "transfer_s")
            case Commit() | Reduce():
                return self._cost(self._kind_of.get(command.lead, self.kinds[0]), "install_s")
            case _:
                return 0.0

    def best_train_step_s(self, kind: str) -> float:
        """Work of one trained timestep of a micro-batch at the best timestep batch that is known and useful."""
        most = len(self.shape.trained_steps(self.shape.start_iteration))
        batches = [batch for batch in self.timestep_batches if batch <= most] or [min(most, self.shape.timestep_batch)]
        return min(self._cost(kind, batch) / batch for batch in batches)

    @property
    def timestep_batches(self) -> tuple[int, ...]:
        """Timestep batches that some kind knows the cost of."""
        return tuple(sorted({item for own in self._own.values() for item in own if isinstance(item, int)}))

    # --- learning ---

    def observe(self, event: Event) -> None:
        """Learn from an event: which kind a worker is, how long a unit, a gap or a copy took there.

        A report scales all costs the unit is made of by the same factor, reported over expected seconds, weighted as
        an exponential average. The first report of a kind that had only an estimate is taken as it is.
        """
        match event:
            case WorkerJoined(worker, kind, _):
                self._kind_of[worker] = kind
            case WorkerLost(worker):
                self._kind_of.pop(worker, None)
                self._rolled.pop(worker, None)
            case UnitFinished() if event.worker in self._kind_of:
                self._finished(event, self._kind_of[event.worker])
            case VersionInstalled(worker, _, float(seconds)) if worker in self._kind_of:
                self.note("install_s", self._kind_of[worker], seconds)
            case Transferred(TrajectoryRef(), worker, float(seconds)) if worker in self._kind_of:
                self.note("transfer_s", self._kind_of[worker], seconds)

    def note(self, name: str, kind: str, seconds: float) -> None:
        """Learn a cost that no unit reports: switch_s, install_s, transfer_s, gather_s or gap_s.

        What is found as a difference may be below 0 now and then; the average is not.
        """
        own = self._own.setdefault(kind, {})
        own[name] = max(0.0, own[name] + self.weight * (seconds - own[name]) if name in own else seconds)
        self._estimated.clear()

    def _finished(self, event: UnitFinished, kind: str) -> None:
        unit, streamed = event.unit, isinstance(event.outcome, Trained) and event.outcome.streamed
        if unit.lane == "device":
            rolls = isinstance(unit, RolloutUnit)
            changed = self._rolled.get(event.worker, rolls) != rolls
            self._rolled[event.worker] = rolls
            own = self._own.get(kind, {})
            if event.gap_s is not None and not changed:
                self.note("gap_s", kind, event.gap_s)
            elif event.gap_s is not None and all(item in own for item, _ in self._parts(unit)):
                # Part of the change may lie before the unit, part of it within: a cold cache, say.
                usual = self._cost(kind, "gap_s") + self.seconds(unit, kind, streamed=streamed)
                self.note("switch_s", kind, event.gap_s + event.seconds - usual)
                return
        self._learn(unit, kind, event.seconds, streamed)

    def _learn(self, unit: Unit, kind: str, seconds: float, streamed: bool) -> None:
        expected = self.seconds(unit, kind, streamed=streamed)
        own = self._own.setdefault(kind, {})
        items = [item for item, _ in self._parts(unit)]
        if expected <= 0:
            # Nobody knew anything about it. Only costs that may be 0 come here, and each is a unit of its own.
            own[items[0]] = seconds
        else:
            ratio = seconds / expected
            slow = 1 + self.weight * (min(max(ratio, 1 / _SURPRISE), _SURPRISE) - 1)
            own |= {item: self._cost(kind, item) * (slow if item in own else ratio) for item in self._alike(own, items)}
        if "rollout_step_s" in own or any(isinstance(item, int) for item in own):
            self._own.pop(GUESSED, None)
        self._estimated.clear()

    def _alike(self, own: Mapping[_Item, float], items: list[_Item]) -> list[_Item]:
        """The costs a report tells of. No unit of the run will tell of timestep batches that were only profiled."""
        if not any(isinstance(item, int) for item in items):
            return items
        unused = (item for item in own if isinstance(item, int) and item not in self._used and item not in items)
        return [*items, *unused]

    # --- costs ---

    def _parts(self, unit: Unit, streamed: bool = False) -> list[tuple[_Item, float]]:
        """What a unit is made of: (cost, how many times)."""
        shape = self.shape
        match unit:
            case RolloutUnit(micro_batch, first, last):
                evaluation = micro_batch.phase == "eval"
                share = len(shape.samples(micro_batch)) / shape.micro_batch if evaluation else 1.0
                parts: list[tuple[_Item, float]] = [("rollout_step_s", share * (last - first))]
                ends = shape.eval_num_steps if evaluation else shape.num_steps
                return [*parts, ("decode_s", share)] if last == ends else parts
            case ScoreUnit(micro_batch):
                evaluation = micro_batch.phase == "eval"
                return [("score_s", len(shape.samples(micro_batch)) / shape.micro_batch if evaluation else 1.0)]
            case TrainUnit(micro_batch, steps):
                replay = 0.0 if shape.on_policy(micro_batch) else self.replay_share
                return [(len(steps), self.streamed if streamed else 1.0 + replay), ("gather_s", 1.0)]
            case UpdateUnit():
                return [("update_s", 1.0)]

    def _cost(self, kind: str, item: _Item) -> float:
        own = self._own.get(kind)
        if own is not None and item in own:
            return own[item]
        key = (kind, item)
        if key not in self._estimated:
            self._estimated[key] = self._estimate(kind, item)
        return self._estimated[key]

    def _estimate(self, kind: str, item: _Item) -> float:
        if isinstance(item, int):
            return self._train_s(kind, item)
        for other, costs in self._own.items():
            if item in costs:
                return costs[item] * (self._slowness(kind, other) if item in _COMPUTED else 1.0)
        return self._train_s(kind, 1) / _TRAIN_PER_STEP if item == "rollout_step_s" else 0.0

    def _train_s(self, kind: str, batch: int) -> float:
        for other in (kind, *self._own):
            known = sorted(i for i in self._own.get(other, {}) if isinstance(i, int))
            if known:
                seconds = _between(known, [self._own[other][b] for b in known], batch)
                return seconds * self._slowness(kind, other)
        return batch * _TRAIN_PER_STEP * self._cost(kind, "rollout_step_s")

    def _slowness(self, kind: str, other: str) -> float:
        """How many times longer `kind` takes than `other`."""
        mine, theirs = self._own.get(kind, {}), self._own[other]
        shared = [i for i in mine if i in theirs and (isinstance(i, int) or i in _COMPUTED)]
        ratios = [mine[i] / theirs[i] for i in shared if mine[i] > 0 and theirs[i] > 0]
        return math.exp(math.fsum(map(math.log, ratios)) / len(ratios)) if ratios and kind != other else 1.0

    def _known(self, kind: str) -> KindCosts:
        own = self._own[kind]
        named = cast("dict[str, Any]", {item: seconds for item, seconds in own.items() if isinstance(item, str)})
        return KindCosts(train_s={item: own[item] for item in own if isinstance(item, int)}, **named)


def _items(costs: KindCosts) -> dict[_Item, float]:
    named: Iterable[tuple[_Item, float | None]] = (
        (f.name, getattr(costs, f.name)) for f in fields(KindCosts) if f.name != "train_s"
    )
    return {item: value for item, value in named if value is not None} | dict(costs.train_s)


def _between(known: list[int], seconds: list[float], batch: int) -> float:
    """Piecewise linear inside, in proportion to the nearest known batch outside."""
    if batch <= known[0] or batch >= known[-1]:
        nearest = 0 if batch <= known[0] else -1
        return seconds[nearest] * batch / known[nearest]
    right = next(i for i, b in enumerate(known) if b >= batch)
    left = right - 1
    part = (batch - known[left]) / (known[right] - known[left])
    return seconds[left] + part * (seconds[right] - seconds[left])


def _seconds(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name}={value!r} must be a number of seconds, 0 or more")
    return float(value)

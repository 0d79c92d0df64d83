"""Where a run is, and what it waits for, in words."""

from __future__ import annotations

from dataclasses import dataclass

from digenrl.scheduling.adapters import Adapters
from digenrl.scheduling.evaluation import Evaluations
from digenrl.scheduling.state import State
from digenrl.scheduling.updates import Updates


@dataclass(frozen=True)
class Progress:
    """Position of a run.

    Attributes:
        version: the newest there is; also the number of the iteration in progress.
        theta: the committed adapter.
        micro_batches: open micro-batches of the iteration.
        generated: of these, how many have been generated.
        scored: of these, how many are scored.
        train_units: train units of the optimiser step in progress without a contribution.
        ahead: micro-batches of the next iteration that have been generated.
        evaluating: whether the version's evaluation is not complete.
        workers: workers that are there.
        finished: nothing more will happen.
    """

    version: int
    theta: int
    micro_batches: int
    generated: int
    scored: int
    train_units: int
    ahead: int
    evaluating: bool
    workers: int
    finished: bool


def measure(state: State, updates: Updates, evaluations: Evaluations, over: bool) -> Progress:
    """Count. Walks over the open micro-batches."""
    trained = [batch for batch in state.batches.values() if batch.id.phase == "train"]
    batches = [batch for batch in trained if batch.id.iteration == state.version]
    return Progress(
        version=state.version,
        theta=state.theta,
        micro_batches=len(batches),
        generated=sum(batch.generated for batch in batches),
        scored=sum(batch.scores is not None for batch in batches),
        train_units=updates.lacking[1],
        ahead=sum(batch.generated for batch in trained if batch.id.iteration > state.version),
        evaluating=evaluations.running,
        workers=len(state.fleet.workers),
        finished=over,
    )


def describe(state: State, updates: Updates, adapters: Adapters, evaluations: Evaluations, over: bool) -> str:
    """One sentence: what has to happen next, and who is to do it."""
    if over:
        return "the run is over"
    missing = [need for need in ("rollout", "train", "score") if not state.fleet.staying(need)]
    if missing:
        return f"waiting for a worker that can {' and one that can '.join(missing)}; there are {_workers(state)}"
    running = [f"{u.label} on {w.name}" for w in state.fleet.workers.values() for u in (*w.device, *w.cpu)]
    if running:
        return f"waiting for {_some(running)}"
    moving = [f"theta {i.theta} to reach {i.worker} from {i.source or 'the driver'}" for i in adapters.under_way]
    moving += [f"{b.id.label} to reach {t} from {s}" for b in state.batches.values() for t, s in b.copying.items()]
    moving += [f"the gradient of {source} to reach {state.lead}" for source in sorted(state.step.awaited)]
    if state.step.phase == "commit":
        moving.append(f"theta {state.theta + 1} to be committed to {state.step.standby or 'the driver'}")
    if moving:
        return f"waiting for {_some(moving)}"
    if state.postponed:
        return f"waiting for the next Tick to go on {_some(sorted(state.postponed))}, which has failed before"
    unclosed, units = updates.lacking
    evaluating = f"; the evaluation of version {state.version} is not complete" if evaluations.running else ""
    return (
        f"nothing is outstanding: theta {state.theta + 1} lacks the scores of {unclosed} micro-batches "
        f"and {units} train units{evaluating}; there are {_workers(state)}"
    )


def _workers(state: State) -> str:
    workers = [f"{w.name} ({', '.join(sorted(w.capabilities))})" for w in state.fleet.workers.values()]
    return _some(workers) if workers else "no workers"


def _some(items: list[str], most: int = 5) -> str:
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more

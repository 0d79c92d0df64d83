"""What a dry run prints: what was exchanged, what the iteration showed, what the run itself would need.

passed(witness)        what the gates saw; raises ExpectedError if the iteration showed too little
show(...)              all of it
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from digenrl import runspec
from digenrl.config import RunConfig
from digenrl.models.registry import family_of
from flows.dryrun.needs import FLEET, GPUS, Memory, Pace, gib, smallest_gpu
from flows.dryrun.witness import Witness
from flows.errors import ExpectedError

#: What is said of something, by its name.
Line = tuple[str, str]


def passed(witness: Witness) -> list[Line]:
    """What the gates of an iteration that came to its end saw.

    Raises:
        ExpectedError: nothing was trained, or the weights did not move.
    """
    report, metrics = witness.report, witness.first
    if report is None or not report.trained or not metrics.pairs:
        why = ", ".join(f"{reason}: {count}" for reason, count in report.excluded.items()) if report else "it is open"
        raise ExpectedError(f"the iteration trained nothing ({why}), so it shows nothing")
    if report.skipped_updates or not witness.moved:
        raise ExpectedError(
            f"the updates changed no weights ({report.skipped_updates} were skipped for gradients that are not finite)"
        )
    return [
        ("replay", _replay(witness)),
        ("weights", f"{f'LoRA on {witness.layers} layers' if witness.layers else 'all'}, moved by the updates"),
        ("gradients", f"finite, of {report.trained} (sample, step) pairs; {sum(report.excluded.values())} left out"),
    ]


def _replay(witness: Witness) -> str:
    """How exactly training sees the transitions of the rollout, under the same weights."""
    metrics = witness.first
    if metrics.forward:
        return "none: this algorithm trains on clean samples, noised again"
    gap = metrics.logp_gap_max
    if not gap:
        return "ratio exactly 1: log-probs at training are those at rollout, to the last bit"
    return f"ratio 1 ± {math.expm1(gap):.1e}: log-probs at training and at rollout differ by at most that"


def show(
    out: Console,
    name: str,
    given: RunConfig,
    small: RunConfig,
    gates: Sequence[Line],
    memory: Memory | None,
    pace: Pace | None,
    seconds: tuple[float, float],
    command: str,
) -> None:
    """Print it.

    Args:
        out: where.
        name: of the preset or file.
        given: the configuration.
        small: what ran.
        gates: what they saw.
        memory: that the configuration needs as given; None: not known.
        pace: of its iterations; None: not known.
        seconds: that the iteration took, and everything.
        command: what starts the run itself.
    """
    iteration_s, all_s = seconds
    took = f": one iteration passed its gates ({iteration_s:.1f} s; with servers and workers {all_s:.0f} s)"
    out.print()
    out.print(Text.assemble(("✓ ", "bold green"), (name, "bold"), took))
    out.print()
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    needed = [*_memory(memory), *_pace(pace)] if memory is not None and pace is not None else _unknown(given)
    sections = {"swapped": _swapped(given, small), "kept": _kept(given), "gates": gates, "needs": needed}
    for title, lines in sections.items():
        for position, (what, text) in enumerate(lines):
            table.add_row("" if position else title, what, text)
    out.print(table)
    out.print(Text.assemble(("\nstart it  ", "bold"), command), soft_wrap=True)


def _swapped(given: RunConfig, small: RunConfig) -> list[Line]:
    """What ran instead of what is configured."""
    lines = []
    if given.model != small.model:
        lines.append(("model", f"{_model(given)} → {_model(small)}"))
    lines.append(("samples", f"{_samples(given)} → {_samples(small)}"))
    if given.rewards != small.rewards:
        lines.append(("reward", f"{_rewards(given)} → {_rewards(small)}, as a random model draws noise"))
    if given.cluster != small.cluster:
        lines.append(("workers", f"{_workers(given)} → {_workers(small)}"))
    return lines


def _kept(config: RunConfig) -> list[Line]:
    """What decides what is computed."""
    algorithm, model = config.algorithm, config.model
    guided = family_of(model.family).distilled or model.guidance_scale > 1
    parts = [
        f"{algorithm.name}, {runspec.trained_step_count(config)} of {algorithm.num_steps} steps trained",
        f"{algorithm.updates_per_iteration} updates" if algorithm.updates_per_iteration > 1 else "1 update",
        f"guidance {model.guidance_scale:g}" if guided else "no guidance",
        f"KL {algorithm.kl_beta:g}" if algorithm.kl_beta else "no KL",
    ]
    trained = "all weights" if config.adapter is None else f"LoRA {config.adapter.rank}/{config.adapter.alpha}"
    return [("recipe", ", ".join(parts)), ("schedule", f"{trained}, layout {config.schedule.layout}")]


def _memory(memory: Memory) -> list[Line]:
    """Of a worker by role, and on disk."""
    beside = f"{gib(memory.beside)} of it text encoders and VAE"
    lines = []
    for role, size in (("rollout", memory.rollout + memory.beside), ("training", memory.train + memory.beside)):
        gpu = smallest_gpu(size)
        room = f"a GPU of {gpu} GB ({GPUS[gpu]})" if gpu is not None else f"more than the {max(GPUS)} GB of a GPU"
        lines.append((role, f"{gib(size)} a worker ({beside}): {room}"))
    return [*lines, ("disk", f"{gib(memory.download)} for the checkpoint at two bytes a parameter")]


def _pace(pace: Pace) -> list[Line]:
    """Seconds of an iteration."""
    if pace.iteration_s is None:
        return [("time", f"not predicted: too large for {pace.device}; try schedule.micro_batch=1")]
    split = f", {pace.trainers} of them training" if pace.trainers else ""
    return [("time", f"about {_clock(pace.iteration_s)} an iteration on {FLEET} x {pace.device}{split}")]


def _unknown(config: RunConfig) -> list[Line]:
    """Where sizes are not known."""
    path = config.model.path
    return [("memory", f"not known for model.path={path}; `digenrl plan` estimates it from a directory's files")]


def _model(config: RunConfig) -> str:
    model = config.model
    return f"{model.path} {model.height} x {model.width}" + (f" x {model.frames}" if model.frames > 1 else "")


def _samples(config: RunConfig) -> str:
    algorithm = config.algorithm
    return f"{algorithm.prompts_per_iteration} groups of {algorithm.samples_per_prompt}"


def _rewards(config: RunConfig) -> str:
    return " + ".join(term.called for term in config.rewards)


def _workers(config: RunConfig) -> str:
    cluster = config.cluster
    return f"{cluster.workers} x {cluster.device}" if cluster.address == "local" else cluster.address


def _clock(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"

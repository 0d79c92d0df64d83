"""`digenrl evaluate`: the newest checkpoint against the base model, on held-out prompts with the same noise."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from digenrl.config import RunConfig
from digenrl.config.errors import ConfigError
from digenrl.identity import EVAL_ITERATION, SampleId
from digenrl.prompts import PromptError, load_held_out
from digenrl.prompts.files import Check
from digenrl.rewards.base import PromptRecord
from flows.errors import ExpectedError
from storage.atomic import write_atomically
from storage.home import home
from storage.runs import RunDirectory

if TYPE_CHECKING:
    from digenrl.rewards.mix import RewardMix
    from flows.comparison import Row, Scores
    from flows.inference import Inference
    from flows.weights import Weights


def run(run_name: str, *, prompts: int | None, seed: int | None) -> None:
    """Score, print before → after, and write `<run>/evaluation.json`.

    Args:
        run_name: the run.
        prompts: held-out prompts to take, the first ones; None: as configured.
        seed: of the noise; None: as configured.

    Raises:
        ConfigError: there is no such run, it has no weights or no held-out prompts.
        ExpectedError: no prompt could be scored both times.
    """
    directory = RunDirectory.open(home(), run_name)
    config = directory.read_config()
    seed = config.evaluation.seed if seed is None else seed

    from digenrl.rewards.mix import RewardMix

    reward = RewardMix.of(config.rewards)
    records = held_out(config, prompts, reward.check)

    # After the checks: these import torch and diffusers, which takes seconds.
    from flows.comparison import compare
    from flows.inference import Inference
    from flows.weights import newest_weights

    weights = newest_weights(directory, config)
    reward.load()
    inference = Inference(config)
    for note in inference.notes:
        typer.echo(f"note: {note}", err=True)
    before, after = _score_both(inference, weights, reward, config.evaluation.micro_batch, records, seed)
    rows = compare(before, after)
    if not rows:
        reasons = [*before.failed.values(), *after.failed.values()]
        raise ExpectedError(f"no prompt of {len(records)} has a value both times; the first reason: {reasons[0]}")
    result = _result(directory, weights, records, seed, rows, before, after)
    path = directory.path / "evaluation.json"
    write_atomically(path, json.dumps(result, indent=1, allow_nan=False).encode())
    _show(Console(highlight=False, markup=False), weights, len(records), seed, rows, before, after)
    typer.echo(str(path))


def held_out(config: RunConfig, count: int | None, check: Check) -> Sequence[PromptRecord]:
    """The first `count` held-out prompts; None: as many as configured. `check` is asked about each.

    Raises:
        ConfigError: the run has none, or one is refused.
    """
    if not config.data.holds_out:
        raise ConfigError("data.held_out is not set: this run has no prompts to be evaluated on")
    wanted = config.evaluation.prompts if count is None else count
    if wanted == 0:
        raise ConfigError("evaluation.prompts=0: this run is not evaluated; say how many prompts with --prompts")
    try:
        records = load_held_out(config.data, check)
    except PromptError as error:
        raise ConfigError(f"{config.data.held_out_origin}: {error}") from None
    if wanted > len(records):
        typer.echo(f"note: {wanted} prompts were asked for, {len(records)} there are: all are used", err=True)
    return records[:wanted]


def _score_both(
    inference: Inference, weights: Weights, reward: RewardMix, size: int, records: Sequence[PromptRecord], seed: int
) -> tuple[Scores, Scores]:
    """Scores of the base model and of the trained weights, in the batches of the run's own evaluations."""
    from flows.comparison import Scores, score

    batches = [range(first, min(first + size, len(records))) for first in range(0, len(records), size)]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    found = []
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        for tag, adapter in (("base", inference.base), ("trained", weights.adapter)):
            task = progress.add_task(f"{tag:7} prompts", total=len(records))
            scores = Scores()
            for batch in batches:
                chosen = [records[index] for index in batch]
                samples = [SampleId(seed, EVAL_ITERATION, index, 0) for index in batch]
                made = inference.generate(tag, adapter, samples, [record.text for record in chosen])
                scores |= score(reward, *made, chosen)
                progress.advance(task, len(batch))
            found.append(scores)
    return found[0], found[1]


def _result(
    directory: RunDirectory,
    weights: Weights,
    records: Sequence[PromptRecord],
    seed: int,
    rows: Sequence[Row],
    before: Scores,
    after: Scores,
) -> dict[str, Any]:
    """The content of evaluation.json."""
    per_prompt = [
        {
            "id": record.uid,
            "before": {name: values[i] for name, values in before.values.items() if i in values},
            "after": {name: values[i] for name, values in after.values.items() if i in values},
        }
        for i, record in enumerate(records)
    ]
    return {
        "run": directory.name,
        "weights": weights.place,
        "iterations": weights.iterations,
        "prompts": len(records),
        "seed": seed,
        "scores": {row.name.replace(" ", "_"): row.to_json() for row in rows},
        "failed": {"before": len(before.failed), "after": len(after.failed)},
        "per_prompt": per_prompt,
    }


def _show(
    console: Console, weights: Weights, count: int, seed: int, rows: Sequence[Row], before: Scores, after: Scores
) -> None:
    console.print(f"base model → {weights.label}", soft_wrap=True)
    console.print(f"{count} held-out prompts, same noise before and after (seed {seed})\n")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("", "before → after", "rise", "95 % interval of the rise"):
        table.add_column(heading, no_wrap=True)
    for row in rows:
        low, high = row.interval
        table.add_row(row.name, f"{row.before:.3f} → {row.after:.3f}", f"{row.rise:+.3f}", f"[{low:+.3f}, {high:+.3f}]")
    console.print(table)
    for side, scores in (("base model", before), ("trained weights", after)):
        if scores.failed:
            reason = next(iter(scores.failed.values()))
            console.print(f"{len(scores.failed)} samples of the {side} have no value; the first: {reason}")

"""What is left of a run when it ends: summary.json, the curve, before | after, and the lines a person reads."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console
from rich.text import Text

from digenrl.config import RunConfig
from digenrl.guard.watch import Guard, Verdict
from digenrl.scheduling.bubbles import Cause
from digenrl.statistics import mean_interval, paired_rise
from flows.guarding import draw_stop
from flows.history import History
from flows.pictures import learning_curve, side_by_side
from storage.runs import RunDirectory


@dataclass(frozen=True)
class Places:
    """Where the results of a run are.

    Attributes:
        checkpoint: URL of the newest checkpoint, None if there is none.
        exported: directory that diffusers takes, by load_lora_weights or, of a transformer, by from_pretrained; None
            if no weights were published.
        mlflow_run_id: None if tracking is off.
        mlflow_page: address of the run's page.
        prefect_flow_run_id: id of the flow run.
        prefect_page: address of the flow run's page.
        example_prompt: something to draw.
        trace: Chrome trace of this attempt, None if there is none (yet).
    """

    checkpoint: str | None
    exported: Path | None
    mlflow_run_id: str | None
    mlflow_page: str | None
    prefect_flow_run_id: str
    prefect_page: str | None
    example_prompt: str
    trace: Path | None = None


def summarise(
    name: str,
    config: RunConfig,
    history: History,
    places: Places,
    *,
    status: str,
    observing: float,
    searching: float,
    bubbles: Mapping[Cause, float] | None = None,
    guard: Guard | None = None,
) -> dict[str, Any]:
    """The content of summary.json. Numbers that do not exist yet are null.

    Args:
        name: of the run.
        config: of the run.
        history: rows and evaluations.
        places: where the results are.
        status: completed, cancelled, guarded (stopped by the guard) or failed.
        observing: share of the wall time that showing task runs took.
        searching: share of the iterations' time that trainer_assist=search took to decide.
        bubbles: cause -> share of the devices' time in the iterations of this attempt; None: not known yet.
        guard: of the run; None if nothing is watched.
    """
    last = guard.last if guard is not None else None
    result = history.until(last.good) if status == "guarded" and last is not None else history
    versions = sorted(result.evaluations)
    before = result.evaluations[versions[0]] if versions else {}
    after = result.evaluations[versions[-1]] if len(versions) > 1 else {}
    rise, rise_interval = paired_rise(before, after)
    exported = str(places.exported) if places.exported else None
    return {
        "run": name,
        "status": status,
        "eval_before": _mean(before),
        "eval_after": _mean(after),
        "eval_ci95": _finite(mean_interval(list(after.values()))),
        "eval_rise": _finite_number(rise),
        "eval_rise_ci95": _finite(rise_interval),
        "eval_prompts": len(after or before),
        "eval_iterations": versions[-1] if versions else None,
        "eval_curve": {str(v): _mean(values) for v, values in sorted(history.evaluations.items())},
        "iterations": history.iterations,
        "guard": _guard_summary(guard),
        "samples": sum(row.samples for row in history.rows),
        "seconds": round(history.seconds, 3),
        "samples_per_second": round(history.samples_per_second, 3),
        "utilisation": {name: round(share, 4) for name, share in history.utilisation.items()},
        "bubbles": None if bubbles is None else {cause: round(share, 4) for cause, share in bubbles.items()},
        "observing_share": round(observing, 4),
        "search_share": round(searching, 6),
        "seed": config.seed,
        "checkpoint": places.checkpoint,
        "lora": exported if config.method == "lora" else None,
        "transformer": exported if config.method == "full" else None,
        "mlflow_run_id": places.mlflow_run_id,
        "prefect_flow_run_id": places.prefect_flow_run_id,
    }


def _guard_summary(guard: Guard | None) -> dict[str, Any] | None:
    """What the guard thought of every evaluation; None if nothing is watched."""
    if guard is None or (last := guard.last) is None:
        return None
    return {
        "state": last.level,
        "reason": last.reason,
        "good_iterations": last.good,
        "states": {str(version): verdict.level for version, verdict in guard.verdicts.items()},
        "gold": {
            name: {str(v): round(found.gold[name], 6) for v, found in guard.verdicts.items() if name in found.gold}
            for name in last.gold
        },
        "checks": {name: round(finding.reading.value, 6) for name, finding in last.findings.items()},
    }


def draw(directory: RunDirectory, history: History, stop: Verdict | None = None) -> dict[str, Path]:
    """Write the learning curve and, after two evaluations, before | after. Returns what was written, by name.

    If the guard stopped the run, before | after shows what it ends with, and another picture why it was stopped.
    """
    written = {}
    if stop is not None and (picture := draw_stop(directory, stop)) is not None:
        written["guard"] = picture
    curve = directory.path / "pictures" / "learning-curve.png"
    curve.parent.mkdir(exist_ok=True)
    rewards = [(row.iteration, row.reward_mean, row.reward_std) for row in history.rows]
    held_out = []
    for version, values in sorted(history.evaluations.items()):
        if values:
            held_out.append((version, float(np.mean(list(values.values()))), *mean_interval(list(values.values()))))
    curve.write_bytes(learning_curve(rewards, held_out))
    written["curve"] = curve
    versions = sorted(version for version in history.evaluations if stop is None or version <= stop.good)
    grids = [directory.picture_path("held-out", version) for version in (versions[0], versions[-1])] if versions else []
    if len(versions) > 1 and all(path.is_file() for path in grids):
        titles = [f"before: held-out reward {_mean(history.evaluations[versions[0]]):.3f}"]
        titles.append(f"after {versions[-1]} iterations, same noise: {_mean(history.evaluations[versions[-1]]):.3f}")
        path = directory.path / "pictures" / "before-after.png"
        side_by_side([Image.open(grid) for grid in grids], titles).save(path)
        written["before-after"] = path
    return written


def show_summary(console: Console, summary: dict[str, Any], pictures: dict[str, Path], places: Places) -> None:
    """Print what happened, where everything is and the command that opens it."""
    console.print()
    if summary["eval_after"] is not None:
        low, high = summary["eval_rise_ci95"]
        # The weights that are saved may be newer than those that were evaluated last.
        older = summary["eval_iterations"] != summary["iterations"]
        console.print(
            Text.assemble(
                "held-out reward  ",
                (f"{summary['eval_before']:.3f} → {summary['eval_after']:.3f}", "bold green"),
                f" (after {summary['eval_iterations']} iterations)" if older else "",
                f"   rise {summary['eval_rise']:+.3f}, 95 % interval [{low:+.3f}, {high:+.3f}], "
                f"{summary['eval_prompts']} prompts",
            )
        )
    _show_guard(console, summary)
    busy = ", ".join(f"{name} {share:.0%}" for name, share in summary["utilisation"].items())
    console.print(
        f"{summary['iterations']} iterations, {summary['samples']} samples in {summary['seconds']:.0f} s "
        f"({summary['samples_per_second']:.0f} samples/s while training; busy: {busy})",
        highlight=False,
    )
    if waiting := waits(summary["bubbles"] or {}):
        console.print(f"devices waited for {waiting}", highlight=False)
    name = summary["run"]
    rows = [("curve", str(pictures["curve"]), "")]
    if "before-after" in pictures:
        rows.append(("samples", str(pictures["before-after"]), "same noise, before | after"))
    if "guard" in pictures:
        rows.append(("guard", str(pictures["guard"]), "same noise, before | when it was stopped"))
    if "timeline" in pictures:
        rows.append(("timeline", str(pictures["timeline"]), ""))
    if places.trace:
        rows.append(("trace", str(places.trace), "open it in https://ui.perfetto.dev"))
    if places.exported:
        prompt = shlex.quote(places.example_prompt)
        kind = "LoRA" if summary["lora"] else "transformer"
        rows.append((kind, str(places.exported), f"digenrl sample {name} --prompt {prompt} --seed 1"))
    if summary["checkpoint"]:
        rows.append(("checkpoint", summary["checkpoint"], f"digenrl evaluate {name}"))
    if places.mlflow_page:
        rows.append(("MLflow", places.mlflow_page, "digenrl serve" if not places.prefect_page else ""))
    if places.prefect_page:
        rows.append(("Prefect", places.prefect_page, "digenrl serve"))
    for what, where, command in rows:
        # Never wrapped or cut: paths and addresses are there to be copied.
        console.print(Text(f"{what:<12}{where}"), soft_wrap=True)
        if command:
            console.print(Text(f"{'':<12}→ {command}", style="dim"), soft_wrap=True)
    if summary["status"] == "guarded":
        config = Path(pictures["curve"]).parent.parent / "config.yaml"
        console.print(f"to go on all the same: guard.mode: warn in {config}, then: digenrl resume {name}")
    elif summary["status"] != "completed":
        console.print(f"stopped early; continue with: digenrl resume {name}", highlight=False)


def _show_guard(console: Console, summary: dict[str, Any]) -> None:
    """Gold rewards, and what the guard has to say."""
    guard = summary["guard"]
    if guard is None:
        return
    for name, curve in guard["gold"].items():
        values = [curve[version] for version in sorted(curve, key=int)]
        console.print(f"{name}, not trained on  {values[0]:.3f} → {values[-1]:.3f}", highlight=False)
    if guard["reason"] is not None:
        style = "bold red" if guard["state"] == "stop" else "yellow"
        words = guard["reason"] if guard["state"] == "stop" else f"the guard warns: {guard['reason']}"
        console.print(Text(words, style=style))


def waits(shares: Mapping[str, float]) -> str:
    """Causes of bubbles with their share of the devices' time, the largest first; what rounds to nothing is left out.

    The cause `end` is no waiting: nothing was left to do.
    """
    ranked = sorted(shares.items(), key=lambda entry: -entry[1])
    return ", ".join(f"{cause} {share:.0%}" for cause, share in ranked if share >= 0.005 and cause != "end")


def _mean(values: dict[int, float]) -> float | None:
    return round(float(np.mean(list(values.values()))), 6) if values else None


def _finite_number(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None


def _finite(pair: tuple[float, float]) -> list[float] | None:
    return [round(bound, 6) for bound in pair] if all(map(math.isfinite, pair)) else None

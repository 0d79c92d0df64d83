"""The command line: `digenrl COMMAND`.

Each command lives in flows/commands and is imported when it runs, so that `--help` and a wrong argument answer at
once. A configuration error ends with exit code 2 and its sentence, any other expected failure with 1, a run that the
guard stopped with 3; a traceback is shown only with --debug.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from flows.cli_groups import checkpoints_app, config_app, rewards_app
from flows.cli_shared import Debug, Overrides, Run, guarded
from flows.startup import check_shadowing

app = typer.Typer(
    help="Reinforcement learning for image and video diffusion models. Start with: digenrl train tiny-ocr",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(config_app, name="config")
app.add_typer(rewards_app, name="rewards")
app.add_typer(checkpoints_app, name="checkpoints")

PrefectApi = Annotated[
    str | None,
    typer.Option(
        "--prefect-api",
        help="Use another Prefect server: its API URL, or 'current' for PREFECT_API_URL. Default: DigenRL's own.",
    ),
]
Planned = Annotated[str, typer.Argument(help="Preset by name, path to a YAML file, or a workload such as wan2.1-14b.")]
FleetFile = Annotated[
    Path | None, typer.Option(help="YAML list of {kind, count, rate, memory_gib, price_per_hour, ...}.")
]
ProfileFile = Annotated[
    Path | None, typer.Option(help="Costs by kind of worker (YAML or JSON); default: those of an earlier run.")
]
RunName = Annotated[str, typer.Argument(help="Name of a run below DIGENRL_HOME (default ./runs).")]


@app.command()
def train(
    preset: Annotated[str, typer.Argument(help="Preset by name (see `digenrl presets`) or path to a YAML file.")],
    overrides: Overrides = None,
    name: Annotated[str | None, typer.Option(help="Name of the run; default <preset>-<n>.")] = None,
    prefect_api: PrefectApi = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Run one small iteration with a tiny checkpoint on the CPU, say what the run needs, leave nothing.",
        ),
    ] = False,
    debug: Debug = False,
) -> None:
    """Train a model and show how it goes. Ctrl-C stops with a checkpoint; `digenrl resume RUN` goes on.

    Exit codes: 0 complete, 1 failed, 2 refused, 3 stopped by the guard (see `digenrl config explain guard`), 130
    stopped by Ctrl-C or a cancellation.
    """
    from flows.commands.train import run

    guarded(
        lambda: run(preset, overrides or [], name=name, prefect_api=prefect_api, dry_run=dry_run),
        debug,
    )


@app.command()
def presets(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of docs/presets.md.")] = False,
    debug: Debug = False,
) -> None:
    """Show the presets: model, algorithm, reward, what is trained, in which sizes."""
    from flows.commands.presets import run

    guarded(lambda: run(markdown=markdown), debug)


@app.command()
def resume(run: Run, prefect_api: PrefectApi = None, debug: Debug = False) -> None:
    """Continue a run from its newest checkpoint, in the same MLflow run. From a URL, on any machine."""
    from flows.commands.train import resume as continue_run

    guarded(lambda: continue_run(run, prefect_api=prefect_api), debug)


@app.command()
def sample(
    run_name: RunName,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Text to draw; may be repeated. The tiny presets draw three-digit numbers: --prompt 042."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the noise.", min=0)] = 0,
    out: Annotated[str | None, typer.Option(help="PNG to write; default <run>/samples/….png.")] = None,
    base: Annotated[
        bool, typer.Option("--base", help="Draw with the base model, not with the trained weights.")
    ] = False,
    scale: Annotated[int, typer.Option(help="Enlarge the picture this many times, without smoothing.", min=1)] = 1,
    debug: Debug = False,
) -> None:
    """Draw pictures with a run's trained weights."""
    from flows.commands.sample import run

    guarded(lambda: run(run_name, prompt or [], seed=seed, out=out, base=base, scale=scale), debug)


@app.command()
def evaluate(
    run_name: RunName,
    prompts: Annotated[int | None, typer.Option(help="Held-out prompts; default as configured.", min=1)] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the noise; default as configured.", min=0)] = None,
    debug: Debug = False,
) -> None:
    """Score a run's newest checkpoint against the base model on held-out prompts, with the same noise."""
    from flows.commands.evaluate import run

    guarded(lambda: run(run_name, prompts=prompts, seed=seed), debug)


@app.command()
def plan(
    name: Planned,
    overrides: Overrides = None,
    fleet: FleetFile = None,
    profile: ProfileFile = None,
    compare: Annotated[bool, typer.Option("--compare", help="Compare layouts and techniques, a row for each.")] = False,
    target_samples_per_s: Annotated[
        float | None, typer.Option(help="Also name the cheapest part of the fleet that is as fast as this.", min=0)
    ] = None,
    budget_per_hour: Annotated[
        float | None, typer.Option(help="Also name the fastest part of the fleet that costs no more than this.", min=0)
    ] = None,
    gantt: Annotated[Path, typer.Option(help="Directory for plan-<name>.png and .html.")] = Path(),
    debug: Debug = False,
) -> None:
    """Predict a run: seconds, bubbles by cause, memory, best role split, cost, what binds. Nothing is started."""
    from flows.commands.plan import run

    guarded(
        lambda: run(
            name,
            overrides or [],
            fleet=fleet,
            profile=profile,
            compare=compare,
            gantt=gantt,
            target=target_samples_per_s,
            budget=budget_per_hour,
        ),
        debug,
    )


@app.command()
def simulate(
    name: Planned,
    overrides: Overrides = None,
    workers: Annotated[int | None, typer.Option(help="Workers; default as configured.", min=1, max=4096)] = None,
    fleet: FleetFile = None,
    trainers: Annotated[int | None, typer.Option(help="How many of them train; default: a good number.", min=1)] = None,
    iterations: Annotated[
        int, typer.Option(help="Iterations to simulate; the first and last do not count.", min=3)
    ] = 4,
    profile: ProfileFile = None,
    timeline: Annotated[Path | None, typer.Option(help="Chrome trace to write, for ui.perfetto.dev.")] = None,
    debug: Debug = False,
) -> None:
    """Run a schedule on a virtual clock, on up to 4,096 workers."""
    from flows.commands.simulate import run

    guarded(
        lambda: run(
            name,
            overrides or [],
            workers=workers,
            fleet=fleet,
            trainers=trainers,
            iterations=iterations,
            profile=profile,
            timeline=timeline,
        ),
        debug,
    )


@app.command()
def serve(
    prefect_port: Annotated[
        int | None, typer.Option(help="Port of the Prefect page; default: first free from 4200.", min=1, max=65535)
    ] = None,
    mlflow_port: Annotated[
        int | None, typer.Option(help="Port of the MLflow page; default: first free from 5001.", min=1, max=65535)
    ] = None,
    debug: Debug = False,
) -> None:
    """Open the Prefect and MLflow pages of past runs until Ctrl-C."""
    from digenrl.preflight import check_home
    from flows.services.serve import serve as keep_serving
    from storage.home import home

    def work() -> None:
        check_home(home())
        keep_serving(home(), {"prefect": prefect_port, "mlflow": mlflow_port})

    guarded(work, debug)


@app.command()
def stop(
    force: Annotated[
        bool, typer.Option("--force", help="End the runs that use the servers too; a training saves a checkpoint.")
    ] = False,
    debug: Debug = False,
) -> None:
    """End Prefect and MLflow servers that nothing needs any more. Normally they end by themselves."""
    from flows.commands.stop import run

    guarded(lambda: run(force=force), debug)


@app.command()
def doctor(
    model: Annotated[
        str | None, typer.Option(help="Check this checkpoint instead: a directory, hub id, package:NAME, tiny:FAMILY.")
    ] = None,
    family: Annotated[str | None, typer.Option(help="With --model: its family, if it is a hub id.")] = None,
    dtype: Annotated[str, typer.Option(help="With --model: auto, float32 or bfloat16.")] = "auto",
    device: Annotated[str, typer.Option(help="With --model: cpu or cuda.")] = "cpu",
    debug: Debug = False,
) -> None:
    """Check this machine: versions, devices, ports, disk; what is missing and what to type.

    With --model, check a checkpoint against its own pipeline: a number and its limit for each check.
    """
    from flows.commands.doctor import run, run_model

    guarded(run if model is None else lambda: run_model(model, family, dtype, device), debug)


@app.command(
    "reward-server",
    add_help_option=False,  # the server, which must run where typer is not installed, reads its arguments itself
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def reward_server(context: typer.Context) -> None:
    """Serve a reward over HTTP, for scorers that need an environment of their own."""
    from digenrl.rewards.server import main as serve_reward

    guarded(lambda: serve_reward(context.args, "digenrl reward-server"), debug=False)


def _version(show: bool) -> None:
    if show:
        from importlib.metadata import version

        typer.echo(f"digenrl {version('digenrl')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of every command."""


def main() -> None:
    """Entry point of the `digenrl` program."""
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    problem = check_shadowing()
    if problem:
        print(f"digenrl: {problem}", file=sys.stderr)
        raise SystemExit(2)
    app()


if __name__ == "__main__":
    main()

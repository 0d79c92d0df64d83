"""The command line: `digenrl COMMAND`.

Each command lives in flows/commands and is imported when it runs, so that `--help` and a wrong argument answer at
once. A configuration error ends with exit code 2 and its sentence, any other expected failure with 1; a traceback is
shown only with --debug.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from flows.startup import check_shadowing

app = typer.Typer(
    help="Reinforcement learning for image and video diffusion models. Start with: digenrl train tiny-ocr",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Look at configurations: show, schema, explain.", no_args_is_help=True)
app.add_typer(config_app, name="config")
checkpoints_app = typer.Typer(help="Look after a run's checkpoints: list, verify, prune.", no_args_is_help=True)
app.add_typer(checkpoints_app, name="checkpoints")

Overrides = Annotated[
    list[str] | None, typer.Argument(help="Changes to the preset, e.g. iterations=20 optimizer.learning_rate=3e-4.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
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
Run = Annotated[
    str,
    typer.Argument(help="Name of a run below DIGENRL_HOME (default ./runs), or its checkpoints: s3://BUCKET/…/RUN."),
]


@app.command()
def train(
    preset: Annotated[str, typer.Argument(help="Preset by name (tiny-ocr) or path to a YAML file.")],
    overrides: Overrides = None,
    name: Annotated[str | None, typer.Option(help="Name of the run; default <preset>-<n>.")] = None,
    prefect_api: PrefectApi = None,
    debug: Debug = False,
) -> None:
    """Train a model and show how it goes. Ctrl-C stops with a checkpoint; `digenrl resume RUN` goes on."""
    from flows.commands.train import run

    guarded(lambda: run(preset, overrides or [], name=name, prefect_api=prefect_api), debug)


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
    base: Annotated[bool, typer.Option("--base", help="Draw with the base model, without the trained LoRA.")] = False,
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
    gantt: Annotated[Path, typer.Option(help="Directory for plan-<name>.png and .html.")] = Path(),
    debug: Debug = False,
) -> None:
    """Predict a run: seconds, bubbles by cause, memory, best role split, cost, what binds. Nothing is started."""
    from flows.commands.plan import run

    guarded(
        lambda: run(name, overrides or [], fleet=fleet, profile=profile, compare=compare, gantt=gantt),
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
def doctor(debug: Debug = False) -> None:
    """Check this machine: versions, devices, ports, disk; what is missing and what to type."""
    from flows.commands.doctor import run

    guarded(run, debug)


@checkpoints_app.command("list")
def checkpoints_list(run: Run, debug: Debug = False) -> None:
    """List the checkpoints of a run, oldest first."""
    from flows.commands.checkpoints import show

    guarded(lambda: show(run), debug)


@checkpoints_app.command("verify")
def checkpoints_verify(run: Run, debug: Debug = False) -> None:
    """Read every checkpoint of a run and compare sizes and hashes; exit code 1 if one is damaged."""
    from flows.commands.checkpoints import verify

    guarded(lambda: verify(run), debug)


@checkpoints_app.command("prune")
def checkpoints_prune(run: Run, debug: Debug = False) -> None:
    """Remove what checkpoint.keep does not name, and what interrupted saves left. Nobody may train the run."""
    from flows.commands.checkpoints import prune

    guarded(lambda: prune(run), debug)


@config_app.command("show")
def config_show(
    preset: Annotated[str, typer.Argument(help="Preset by name or path to a YAML file.")],
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Print a configuration as resolved."""
    from digenrl.config.load import load_config, show

    guarded(lambda: typer.echo(show(load_config(preset, overrides or [])), nl=False), debug)


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON schema of configurations."""
    import json

    from digenrl.config.load import schema

    typer.echo(json.dumps(schema(), indent=2))


@config_app.command("explain")
def config_explain(
    key: Annotated[str, typer.Argument(help="A key or section, e.g. algorithm.clip_range.")], debug: Debug = False
) -> None:
    """Explain a key: type, default, bounds, meaning, value in each preset."""
    from digenrl.config.load import ConfigError, explain

    def work() -> None:
        if not key.strip():
            raise ConfigError("config explain needs a key or a section, such as algorithm.clip_range or algorithm")
        typer.echo(explain(key))

    guarded(work, debug)


@config_app.command("presets")
def config_presets() -> None:
    """List the presets."""
    from digenrl.config.load import preset_names

    for preset in preset_names():
        typer.echo(preset)


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


def guarded(work: object, debug: bool) -> None:
    """Run a command; word its errors for a person.

    Raises:
        typer.Exit: 2 for a configuration error, 1 for any other failure, 130 after Ctrl-C, 141 (as after SIGPIPE) if
            the output goes to a program that has ended, such as `head`.
    """
    from flows.errors import exit_code, sentence

    try:
        work()  # type: ignore[operator]
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at exit
            raise typer.Exit(128 + signal.SIGPIPE) from None
        if debug:
            import traceback

            traceback.print_exc()
        typer.echo(f"digenrl: {sentence(error)}", err=True)
        raise typer.Exit(exit_code(error)) from None


def _nobody_reads() -> bool:
    """Whether the output is a pipe without a reader."""
    try:
        output = select.poll()
        output.register(sys.stdout.fileno(), 0)
        return any(event & select.POLLERR for _, event in output.poll(0))
    except (OSError, ValueError):  # no file at all
        return False


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

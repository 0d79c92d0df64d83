"""Commands of a second level: `digenrl config …`, `rewards …` and `checkpoints …`."""

from __future__ import annotations

from typing import Annotated

import typer

from flows.cli_shared import Debug, Overrides, Run, guarded

config_app = typer.Typer(help="Look at configurations: show, schema, explain.", no_args_is_help=True)
rewards_app = typer.Typer(help="Look at rewards: list, check.", no_args_is_help=True)
checkpoints_app = typer.Typer(help="Look after a run's checkpoints: list, verify, prune.", no_args_is_help=True)


@rewards_app.command("list")
def rewards_list(debug: Debug = False) -> None:
    """List the rewards: range, media, licence, where the weights come from."""
    from flows.commands.rewards import show

    guarded(show, debug)


@rewards_app.command("check")
def rewards_check(
    name: Annotated[str, typer.Argument(help="Registered reward, or python:MODULE:FUNCTION.")],
    image: Annotated[str, typer.Option(help="Picture: a file or an address.")],
    settings: Annotated[list[str] | None, typer.Argument(help="Settings of the reward, e.g. path=OWNER/NAME.")] = None,
    prompt: Annotated[str, typer.Option(help="Text of the prompt.")] = "",
    field: Annotated[list[str] | None, typer.Option(help="KEY=VALUE of the prompt record; may be repeated.")] = None,
    expect: Annotated[float | None, typer.Option(help="The published value.")] = None,
    tolerance: Annotated[float, typer.Option(help="How far the value may be away.", min=0)] = 1e-3,
    debug: Debug = False,
) -> None:
    """Score one picture; with --expect, fail if the value is another one."""
    from flows.commands.rewards import check

    guarded(
        lambda: check(
            name,
            settings or [],
            image=image,
            prompt=prompt,
            fields=field or [],
            expect=expect,
            tolerance=tolerance,
        ),
        debug,
    )


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
    """List the presets' names; `digenrl presets` says more."""
    from digenrl.config.load import preset_names

    for preset in preset_names():
        typer.echo(preset)

"""`digenrl presets`: a table to choose from, for the terminal or for docs/presets.md."""

from __future__ import annotations

from collections.abc import Sequence

from rich.padding import Padding
from rich.text import Text

from digenrl import runspec
from digenrl.config import RunConfig
from digenrl.config.presets import Preset, presets
from flows.dryrun.needs import memory_of, smallest_gpu
from flows.plan.tables import console

#: What a table says of each preset beside its name.
FACTS = ("reward", "trained", "samples", "steps", "size", "GPU")


def run(*, markdown: bool) -> None:
    """Print the table."""
    found = presets()
    out = console()
    if markdown:
        out.print(markdown_table(found), soft_wrap=True)
        return
    rows = [("preset", *FACTS), *((p.name, *facts(p.config)) for p in found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row, title in zip(rows, ("", *(preset.title for preset in found)), strict=True):
        cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)]
        name, text = cells[0], "  ".join(("", *cells[1:])).rstrip()
        out.print(Text.assemble((name, "bold"), (text, "" if title else "bold")), no_wrap=True, overflow="ellipsis")
        if title:
            out.print(Padding(Text(title, "dim"), (0, 0, 0, 2)))
    out.print(
        "\nsee one run here: digenrl train PRESET --dry-run; what it sets: digenrl config show PRESET", style="dim"
    )


def markdown_table(found: Sequence[Preset]) -> str:
    """The table of docs/presets.md."""
    heads = ("preset", "what it does", *FACTS)
    rows = [heads, ("---",) * len(heads)]
    rows += [(f"`{preset.name}`", preset.title, *facts(preset.config)) for preset in found]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def facts(config: RunConfig) -> tuple[str, ...]:
    """Rewards; what is trained; groups and their size; trained of all steps; pixels and frames; a worker's GPU."""
    algorithm, model = config.algorithm, config.model
    return (
        ", ".join(term.called for term in config.rewards),
        "all" if config.adapter is None else f"LoRA {config.adapter.rank}/{config.adapter.alpha}",
        f"{algorithm.prompts_per_iteration}x{algorithm.samples_per_prompt}",
        f"{runspec.trained_step_count(config)} of {algorithm.num_steps}",
        f"{model.height}x{model.width}" + (f"x{model.frames}" if model.frames > 1 else ""),
        _gpu(config),
    )


def _gpu(config: RunConfig) -> str:
    """What a worker needs, as estimated."""
    if config.cluster.device == "cpu":
        return "none"
    memory = memory_of(config)
    return "?" if memory is None else f"{smallest_gpu(memory.most)} GB"

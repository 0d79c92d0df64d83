"""`digenrl presets`: a table to choose from, for the terminal or for docs/presets.md."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from digenrl import runspec
from digenrl.config import RunConfig
from digenrl.config.presets import Preset, presets
from flows.plan.tables import console


def run(*, markdown: bool) -> None:
    """Print the table."""
    found = presets()
    out = console()
    if markdown:
        out.print(markdown_table(found), soft_wrap=True)
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("preset", "algorithm", "reward", "trained", "samples", "steps", "size"):
        table.add_column(column, no_wrap=True)
    for preset in found:
        config = preset.config
        cells = (config.algorithm.name, *facts(config))
        table.add_row(Text(preset.name, "bold"), *cells)
    out.print(table)
    out.print()
    out.print("see one run here: digenrl train PRESET --dry-run; what it sets: digenrl config show PRESET", style="dim")


def markdown_table(found: Sequence[Preset]) -> str:
    """The table of docs/presets.md."""
    heads = ("preset", "what it does", "reward", "trained", "samples", "steps", "size")
    rows = [heads, ("---",) * len(heads)]
    rows += [(f"`{preset.name}`", preset.title, *facts(preset.config)) for preset in found]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def facts(config: RunConfig) -> tuple[str, ...]:
    """Rewards; what is trained; groups and their size; trained of all steps; pixels and frames."""
    algorithm, model, lora = config.algorithm, config.model, config.lora
    return (
        ", ".join(term.name for term in config.rewards),
        f"LoRA {lora.rank}/{lora.alpha}",
        f"{algorithm.prompts_per_iteration} x {algorithm.samples_per_prompt}",
        f"{runspec.trained_step_count(config)} of {algorithm.num_steps}",
        f"{model.height} x {model.width}" + (f" x {model.frames}" if model.frames > 1 else ""),
    )

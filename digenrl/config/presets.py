"""The presets that ship, with what they say about themselves.

    presets() -> list[Preset]       all of them

A preset's file begins with comments: first a sentence that describes it, then where its numbers are from, then how it
deviates from that.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from digenrl.config.layers import preset_names, preset_text
from digenrl.config.load import load_config
from digenrl.config.run import RunConfig

_SOURCE = "Source: "


@dataclass(frozen=True)
class Preset:
    """One preset.

    Attributes:
        name: what `train` takes.
        title: one sentence.
        source: repository and files the numbers are from; empty: they are our own.
        config: as resolved.
    """

    name: str
    title: str
    source: str
    config: RunConfig

    @property
    def is_published(self) -> bool:
        """Whether it is for a published model, not for one that ships with DigenRL."""
        return bool(self.source)


def presets() -> list[Preset]:
    """All presets: those that run anywhere first, then by model."""
    return sorted(map(_preset, preset_names()), key=lambda preset: (preset.is_published, preset.name))


def _preset(name: str) -> Preset:
    lines = []
    for line in preset_text(name).splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    sources = [line.removeprefix(_SOURCE) for line in lines if line.startswith(_SOURCE)]
    text = " ".join(lines)
    title = re.split(r"(?<=[a-z0-9)])\.(?: |$)", text, maxsplit=1)[0]
    return Preset(name, title, sources[0].rstrip(".") if sources else "", load_config(name))

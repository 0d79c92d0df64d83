"""The "scenes" and "styles" sets: prompts for models that draw more than digits, written for this project.

    scenes()          counts, colours and places of everyday things; what must be seen is in the field `expects`
    styles()          subjects in ways of drawing; the fields `subject` and `style` say which
    write_prompts()   the four prompt sets that ship with the package

Scenes say one thing that is easily checked by looking: how many there are, which colour belongs to which thing, where
one stands to the other.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

from digenrl.rewards.base import PromptRecord

SPLIT_SEED = 123
SCENES, SCENES_HELD_OUT, STYLES_HELD_OUT = 600, 120, 80

_COLOURS = ("red", "blue", "green", "yellow", "white", "black", "orange", "purple")
#: One and several.
_THINGS = {
    "cup": "cups",
    "apple": "apples",
    "book": "books",
    "lamp": "lamps",
    "chair": "chairs",
    "bicycle": "bicycles",
    "kettle": "kettles",
    "umbrella": "umbrellas",
    "suitcase": "suitcases",
    "clock": "clocks",
    "boat": "boats",
    "pumpkin": "pumpkins",
}
_COUNTS = {"two": 2, "three": 3, "four": 4, "five": 5}
_PLACES = ("on a wooden table", "in an empty room", "on a beach", "in fresh snow", "on a stone floor")
_RELATIONS = ("to the left of", "to the right of", "behind", "in front of", "on top of", "below")
_SUBJECTS = (
    "a lighthouse in a storm",
    "an old bridge over a river",
    "a fox in tall grass",
    "a market at dawn",
    "a train crossing a viaduct",
    "a baker kneading dough",
    "a glass of water on a window sill",
    "a city roof with chimneys",
    "a heron at the edge of a lake",
    "a workshop full of clocks",
    "a child flying a kite",
    "a mountain hut in winter",
    "a bowl of lemons",
    "a sleeping cat on a piano",
    "a harbour with fishing boats",
    "an orchard after rain",
    "a violin on a chair",
    "a desert road at noon",
    "a library staircase",
    "a field of sunflowers",
)
_STYLES = (
    "watercolour",
    "charcoal drawing",
    "linocut print",
    "oil painting with thick brush strokes",
    "pencil sketch",
    "stained glass window",
    "paper collage",
    "pixel art",
    "black-and-white photograph",
    "mosaic of small tiles",
    "embroidery on linen",
    "blueprint with white lines",
    "woodcut",
    "pastel drawing",
    "low-poly rendering",
    "ink wash painting",
    "felt-tip drawing by a child",
    "art deco poster",
    "clay model",
    "long-exposure photograph",
)


def scenes() -> tuple[list[PromptRecord], list[PromptRecord]]:
    """(train, held out), both shuffled, so that any prefix is a fair sample."""
    rng = random.Random(SPLIT_SEED)
    kinds = [list(_counted()), list(_coloured()), list(_placed())]
    chosen = [scene for kind in kinds for scene in rng.sample(kind, SCENES // len(kinds))]
    return _divided(chosen, SCENES_HELD_OUT, "scene", rng)


def styles() -> tuple[list[PromptRecord], list[PromptRecord]]:
    """(train, held out), both shuffled. Every subject meets every style once."""
    found = [
        (f"{subject}, {style}", {"subject": subject, "style": style}) for subject, style in product(_SUBJECTS, _STYLES)
    ]
    return _divided(found, STYLES_HELD_OUT, "style", random.Random(SPLIT_SEED))


def write_prompts(directory: Path) -> None:
    """Write `scenes-train.jsonl`, `scenes-held-out.jsonl` and the same of `styles`."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, (train, held_out) in (("scenes", scenes()), ("styles", styles())):
        for part, records in (("train", train), ("held-out", held_out)):
            lines = [json.dumps({"id": r.uid, "text": r.text, **r.fields}) for r in records]
            (directory / f"{name}-{part}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _counted() -> Iterator[tuple[str, dict[str, str]]]:
    for (word, count), colour, thing, place in product(_COUNTS.items(), _COLOURS, _THINGS, _PLACES):
        yield f"{word} {colour} {_THINGS[thing]} {place}", {"kind": "count", "expects": f"{count} x {colour} {thing}"}


def _coloured() -> Iterator[tuple[str, dict[str, str]]]:
    for (one, other), (first, second), place in product(_pairs(_COLOURS), _pairs(tuple(_THINGS)), _PLACES):
        text = f"{_a(one)} {first} and {_a(other)} {second} {place}"
        yield text, {"kind": "colour", "expects": f"{one} {first}, {other} {second}"}


def _placed() -> Iterator[tuple[str, dict[str, str]]]:
    for (first, second), relation in product(_pairs(tuple(_THINGS)), _RELATIONS):
        yield f"{_a(first)} {relation} {_a(second)}", {"kind": "place", "expects": f"{first} {relation} {second}"}


def _pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    return [(one, other) for one, other in product(names, names) if one != other]


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _divided(
    found: Sequence[tuple[str, Mapping[str, str]]], held_out: int, stem: str, rng: random.Random
) -> tuple[list[PromptRecord], list[PromptRecord]]:
    records = [PromptRecord(f"{stem}-{i:03d}", text, fields) for i, (text, fields) in enumerate(found)]
    rng.shuffle(records)
    return records[held_out:], records[:held_out]

"""The "words" set: prompts for real models, each asking for a picture with one or two words in it.

split()           200 prompts to train on and 50 held out; no text to be written is in both
write_prompts()   the two prompt sets that ship with the package
"""

from __future__ import annotations

import json
import random
from pathlib import Path

HELD_OUT, TRAIN = 50, 200
SEED = 321

#: Where the text is to stand. Whether it is there once, large and legible is what the reward sees.
SCENES = (
    'a plain white poster with the word "{}" in large black letters',
    'a wooden shop sign that reads "{}"',
    'a chalkboard in a café with "{}" written on it in white chalk',
    'a neon sign on a brick wall at night that says "{}"',
    'a red road sign with the white text "{}"',
    'the cover of a blue notebook with the title "{}"',
    'a birthday cake with "{}" in icing on top',
    'a yellow T-shirt on a hanger, printed with "{}"',
    'a white coffee mug with the word "{}" on its side',
    'a theatre marquee at dusk announcing "{}"',
    'a vintage travel poster with the headline "{}"',
    'a cardboard box stamped "{}"',
    'a brass door plate engraved with "{}"',
    'a banner across a street that says "{}"',
    'a paper tag tied to a suitcase, reading "{}"',
    'the side of a green delivery van with the lettering "{}"',
    'a stone arch with "{}" carved above the gate',
    'a digital departure board that shows only "{}"',
    'a jar of jam with the handwritten label "{}"',
    'a hot-air balloon over fields, with "{}" on its envelope',
    'a page of a typewriter with the single line "{}"',
    'footprints beside the word "{}" drawn in wet sand',
    'a mural on a garage door that spells "{}"',
    'a school bus with "{}" above its windscreen',
    'a silver trophy with the inscription "{}"',
)

_FIRST = (
    *("OPEN", "FRESH", "QUIET", "NORTH", "GOLDEN", "SLOW", "BRIGHT", "LITTLE", "WILD", "GRAND", "HIDDEN", "SILVER"),
    *("SUMMER", "WINTER", "CENTRAL", "ROYAL", "COSMIC", "HAPPY", "URBAN", "EASY", "BRAVE", "VELVET", "LUCKY", "SALTY"),
)
_SECOND = (
    *("GARDEN", "HARBOR", "BAKERY", "STATION", "RIVER", "MARKET", "LIGHT", "ISLAND", "MUSEUM", "ORCHARD", "WINDOW"),
    *("BRIDGE", "COFFEE", "PLANET", "CASTLE", "THUNDER", "LIBRARY", "FOREST", "MIRROR", "PEPPER", "ROCKET", "VALLEY"),
)


def split() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """(training, held-out) records with id, text and target, shuffled, so that any prefix is a fair sample."""
    rng = random.Random(SEED)
    pairs = [f"{first} {second}" for first in _FIRST for second in _SECOND]
    singles = [*_FIRST, *_SECOND]
    targets = [*singles, *rng.sample(pairs, HELD_OUT + TRAIN - len(singles))]
    rng.shuffle(targets)
    records = [
        {"id": f"w{number:03d}", "text": SCENES[number % len(SCENES)].format(target), "target": target}
        for number, target in enumerate(targets)
    ]
    return records[HELD_OUT:], records[:HELD_OUT]


def write_prompts(directory: Path) -> None:
    """Write `words-train.jsonl` and `words-held-out.jsonl`, one object a line."""
    for name, records in zip(("words-train", "words-held-out"), split(), strict=True):
        lines = [json.dumps(record, ensure_ascii=False) for record in records]
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")

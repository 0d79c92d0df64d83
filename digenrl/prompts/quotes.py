"""What stands in quotation marks in a prompt.

    quoted_text('A sign that reads “NO” and “ENTRY”') -> "NO ENTRY"

Straight and curly double marks, guillemets and corner brackets count. Single marks count only in a prompt without any
of those, as a straight or curly one may be an apostrophe: they must stand at the edges of words.
"""

from __future__ import annotations

import re

#: Opening mark -> what may close it. English, German, Swedish, French, Chinese and Japanese habits.
_DOUBLE = {
    '"': '"',
    "“": "”",
    "„": "“”",
    "”": "”",
    "«": "»",
    "»": "«",
    "「": "」",
    "『": "』",
}
_MARKS = frozenset("".join(_DOUBLE) + "".join(_DOUBLE.values()))
_SINGLE = re.compile(r"(?<![^\s(\[{])(?:'(?P<straight>\S(?:.*?\S)?)'|‘(?P<curly>\S(?:.*?\S)?)’)(?!\w)")
_WRITE = "add a field 'target', or write each quoted part in one pair of marks"


def quoted_text(prompt: str) -> str:
    """The quoted parts, in order and joined by a space.

    Raises:
        ValueError: there is none, a mark has no partner, or marks stand within marks.
    """
    parts = _double(prompt) or [found["straight"] or found["curly"] for found in _SINGLE.finditer(prompt)]
    if not parts:
        raise ValueError(f"nothing in the prompt stands in quotation marks; {_WRITE}")
    return " ".join(parts)


def _double(prompt: str) -> list[str]:
    parts = []
    position = 0
    while (opening := _first(prompt, _MARKS, position)) is not None:
        closing = _first(prompt, _DOUBLE.get(prompt[opening], ""), opening + 1)
        if closing is None:
            raise ValueError(f"the mark {prompt[opening]} (character {opening + 1}) has no partner; {_WRITE}")
        part = prompt[opening + 1 : closing].strip()
        if (inner := _first(part, _MARKS, 0)) is not None:
            raise ValueError(f"the mark {part[inner]} stands within other quotation marks; {_WRITE}")
        if not part:
            raise ValueError(f"nothing stands between the marks at character {opening + 1}; {_WRITE}")
        parts.append(part)
        position = closing + 1
    return parts


def _first(text: str, marks: str | frozenset[str], start: int) -> int | None:
    return next((index for index in range(start, len(text)) if text[index] in marks), None)

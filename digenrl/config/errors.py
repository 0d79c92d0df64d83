"""How a configuration error reads.

ConfigError     one or several problems, each a sentence
nearest(...)    the valid name a person most likely meant
did_you_mean    the same as the end of a sentence
shown(...)      a value as it would be written in YAML, shortened
dotted(...)     a key path as a person writes it: `algorithm.clip_range`, `rewards.0.name`
encoding_problem(...)   what keeps a text from being written as UTF-8
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable

#: Where a value sits in the document: keys of mappings and indices of lists.
KeyPath = tuple[str | int, ...]

_SHOWN_PROBLEMS = 5
_SHOWN_CHARACTERS = 60
_SHOWN_NAMES = 16


class ConfigError(ValueError):
    """A configuration that cannot run. `problems` holds every sentence, the message at most five of them."""

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        lines = [f"{len(self.problems)} problems in the configuration:"]
        lines += [f"  - {problem}" for problem in self.problems[:_SHOWN_PROBLEMS]]
        hidden = len(self.problems) - _SHOWN_PROBLEMS
        if hidden > 0:
            lines.append(f"  - and {hidden} more")
        return "\n".join(lines)


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name most like `name`, or None where none is close."""
    by_lower = {candidate.lower(): candidate for candidate in valid}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return by_lower[matches[0]] if matches else None


def did_you_mean(name: str, valid: Iterable[str], kind: str = "valid names") -> str:
    """`; did you mean X?`, or (the first of) the valid names where none is close."""
    names = list(valid)
    close = nearest(name, names)
    if close is not None:
        return f"; did you mean {close}?"
    if not names:
        return ""
    more = ", …" if len(names) > _SHOWN_NAMES else ""
    return f"; {kind}: {', '.join(names[:_SHOWN_NAMES])}{more}"


def shown(value: object) -> str:
    """`value` as short YAML in flow style."""
    text = json.dumps(value, ensure_ascii=False, default=str) if not isinstance(value, str) else repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"


def dotted(path: KeyPath) -> str:
    """The path joined by dots."""
    return ".".join(map(str, path))


def encoding_problem(text: str) -> str | None:
    """What in a text can be neither written as UTF-8 nor tokenized, as the end of a sentence; None if all is well.

    JSON and YAML may spell half of a surrogate pair (`"\\ud800"`), a command line bytes that are not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        return f"the lone surrogate U+{code:04X} as its character {error.start + 1}; expected Unicode text"
    return None

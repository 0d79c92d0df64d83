"""From what a file holds of one prompt to a PromptRecord.

    record_of(item, source) -> PromptRecord
    derived_id(text)            id of a prompt that has none
    key_of(uid)                 64 bits of an id

Problems are ValueErrors without the place, which the reader of the file adds.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from digenrl.config.data import PromptSource
from digenrl.config.errors import did_you_mean, encoding_problem, shown
from digenrl.prompts.quotes import quoted_text
from digenrl.rewards.base import PromptRecord

ID, TARGET, REWARDS = "id", "target", "rewards"
EXAMPLE = 'expected an object such as {"id": "n042", "text": "042", "target": "042"}'
_DERIVED = re.compile(r"text-[0-9a-f]{16}(-\d+)?")


def derived_id(text: str) -> str:
    """The id of a prompt that has none; the second prompt with the same text is called `<this>-2`, and so on."""
    return f"text-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def key_of(uid: str) -> int:
    """The first 8 bytes of the id's SHA-256: prompts are told apart and held out by them."""
    return int.from_bytes(hashlib.sha256(uid.encode()).digest()[:8], "big")


def record_of(item: Mapping[str, Any], source: PromptSource) -> PromptRecord:
    """Make a record.

    Args:
        item: text under `source.text_key`; perhaps `id`, `rewards` and more strings. None counts as absent.
        source: how to read it.

    Raises:
        ValueError: what is wrong, without the place.
    """
    fields: dict[str, str] = {}
    rewards = source.rewards
    for key, value in item.items():
        if value is None:
            continue
        if key == REWARDS:
            rewards = _names(value)
            continue
        if not isinstance(value, str):
            raise ValueError(f"{key!r} is {shown(value)}; expected a string{_quoted(value)}")
        if not (key.isascii() and value.isascii()) and (problem := encoding_problem(key) or encoding_problem(value)):
            raise ValueError(f"{key!r} holds {problem}")
        fields[key] = value
    if source.text_key not in fields:
        hint = did_you_mean(source.text_key, fields, "its keys") if source.text_key != "text" else f"; {EXAMPLE}"
        raise ValueError(f"has no {source.text_key!r}{hint}")
    text, uid = fields.pop(source.text_key), fields.pop(ID, None)
    if not text.strip():
        raise ValueError(f"{source.text_key!r} is blank; expected some text")
    if uid is None:
        uid = derived_id(text)
    elif not uid.strip():
        raise ValueError(f"{ID!r} is blank; expected some text")
    elif _DERIVED.fullmatch(uid):
        raise ValueError(f"the id {uid!r} is of the form that prompts without an id get; leave it out or use another")
    if source.target == "quoted" and TARGET not in fields:
        fields[TARGET] = quoted_text(text)
    return PromptRecord(uid, text, fields, rewards)


def _quoted(value: object) -> str:
    return f', such as "{value}"' if isinstance(value, int | float) and not isinstance(value, bool) else ""


def _names(value: object) -> tuple[str, ...]:
    """Rewards by name: a list, or a string in which commas or spaces separate them."""
    names = re.split(r"[,\s]+", value.strip()) if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f'{REWARDS!r} is {shown(value)}; expected names of rewards, such as ["ocr"]')
    if not any(names):
        raise ValueError(f"{REWARDS!r} names no reward; name at least one, or leave the key out for all of the run's")
    if len(set(names)) != len(names):
        raise ValueError(f"{REWARDS!r} is {shown(value)}; expected each name once")
    return tuple(names)

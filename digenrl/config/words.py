"""Sentences for what pydantic found wrong.

    problems_of(error, value, origin_of) -> list[str]

Each sentence names the key, the value, what was expected, the nearest valid name, and where the value was written.
Several findings about one value (the branches of a union) become one sentence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from digenrl.config.errors import KeyPath, did_you_mean, dotted, nearest, shown
from digenrl.config.schema import branches_of, children_of, expectation, leaf_paths, node_at, plain

OriginOf = Callable[[KeyPath], str]


def problems_of(error: ValidationError, value: Any, origin_of: OriginOf) -> list[str]:
    """One sentence for each key that is wrong.

    Args:
        error: raised by validating `value`.
        value: the merged document.
        origin_of: where the value at a path was written, e.g. "my.yaml, line 7".
    """
    sentences: dict[tuple[KeyPath, bool], str] = {}
    details = error.errors(include_url=False)
    for detail in details:
        path = _key_path(detail)
        if detail["type"] == "too_short" and any(_lies_within(other, path) for other in details):
            continue  # pydantic does not count entries that are wrong themselves
        if any(_key_path(other)[: len(path)] == path != _key_path(other) for other in details):
            continue  # it is one of several things, and not this one: what is wrong lies in an entry
        unknown = detail["type"] == "extra_forbidden"
        sentence = unknown_key(path) if unknown else _sentence(detail, path, value)
        sentences.setdefault((path, unknown), f"{sentence} ({origin_of(plain(path))})")
    return list(sentences.values())


def _lies_within(detail: ErrorDetails, path: KeyPath) -> bool:
    return len(detail["loc"]) > len(path) and detail["loc"][: len(path)] == path


def unknown_key(path: KeyPath) -> str:
    """The sentence for a key that does not exist."""
    name, section = str(path[-1]), path[:-1]
    node = node_at(section)
    siblings = children_of(node) if node else []
    above = plain(section)
    key, prefix = dotted((*above, name)), f"{dotted(above)}." if above else ""
    close = nearest(name, siblings)
    elsewhere = [leaf for leaf in leaf_paths() if name in _names_of(leaf) and leaf != key]
    if others := _others_with(name, section):
        return f"{key} is not a key of {section[-1]}, only of {', '.join(others)}" + (
            f"; did you mean {prefix}{close}?" if close else ""
        )
    if elsewhere and (close is None or len(name) < 4):
        return f"{key} is not a key; did you mean {' or '.join(elsewhere)}?"
    hint = did_you_mean(name, siblings, "valid keys") if close is None else f"; did you mean {prefix}{close}?"
    return f"{key} is not a key{hint}"


def _others_with(name: str, section: KeyPath) -> list[str]:
    """If a section is one of several, those of the others that have the key."""
    branches = branches_of(node_at(section[:-1]) or {}) if section else {}
    if not section or section[-1] not in branches:
        return []
    return [branch for branch, node in branches.items() if name in children_of(node)]


def _names_of(leaf: str) -> tuple[str, str]:
    """The last part of a key and its initials: learning_rate is often called lr."""
    name = leaf.rpartition(".")[2]
    return name, "".join(word[0] for word in name.split("_"))


def _key_path(detail: ErrorDetails) -> KeyPath:
    """The longest prefix of the location that is a key: pydantic appends the branch of a union to it."""
    path: KeyPath = ()
    if detail["type"] == "union_tag_invalid":
        return (*detail["loc"], "name")
    for part in detail["loc"]:
        if node_at((*path, part)) is None:
            if _is_label(part, path):
                continue
            return (*path, part) if detail["type"] == "extra_forbidden" else path
        path = (*path, part)
    # A list that is too short misses an entry; what is wrong is the list.
    return path[:-1] if detail["type"] == "missing" and isinstance(path[-1], int) else path


def _is_label(part: str | int, path: KeyPath) -> bool:
    """Whether this is how pydantic calls one of several things that a key may be, and the rest leads into it."""
    return isinstance(part, str) and part.startswith("tuple[") and "anyOf" in (node_at(path) or {})


def _sentence(detail: ErrorDetails, path: KeyPath, value: Any) -> str:
    kind, key = detail["type"], dotted(plain(path))
    node = node_at(path)
    assert node is not None, f"{key} was checked to be a key"
    if kind == "value_error":
        reason = str(detail["ctx"]["error"])
        if not path:
            return reason
        return f"{key}: {reason}" if children_of(node) else f"{key} {reason}, got {shown(_lookup(value, plain(path)))}"
    if kind == "missing" and path[-1:] == detail["loc"][-1:]:
        meaning = node.get("description", "").rstrip(".")
        return f"{key} is missing: it must be {expectation(node)}" + (f" ({meaning})" if meaning else "")
    given = _lookup(value, plain(path))
    sentence = f"{key} must be {expectation(node)}, got {shown(given)}"
    names = [str(name) for option in node.get("anyOf", [node]) for name in _names(option)]
    close = nearest(given, names) if isinstance(given, str) else None
    return sentence + (f"; did you mean {close}?" if close else _type_hint(given, path, node))


def _names(option: dict[str, Any]) -> list[Any]:
    return option.get("enum", []) or ([option["const"]] if "const" in option else [])


def _type_hint(given: object, path: KeyPath, node: dict[str, Any]) -> str:
    kinds = {option.get("type") for option in node.get("anyOf", [node])}
    if given is None:
        section = node_at(path[:-1]) or {}
        return "" if path[-1] in section.get("required", []) else "; delete the line to keep the default"
    if isinstance(given, str):
        if "boolean" in kinds and given.lower() in {"yes", "no", "on", "off", "y", "n"}:
            return f"; write {'true' if given.lower() in {'yes', 'on', 'y'} else 'false'}"
        if kinds & {"integer", "number"} and _is_number(given):
            return "; write it without quotes"
    if isinstance(given, float) and given.is_integer() and "integer" in kinds:
        return f"; write {int(given)}"
    return ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _lookup(value: Any, path: KeyPath) -> Any:
    for part in path:
        value = value[part]
    return value

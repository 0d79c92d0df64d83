"""What a configuration key means.

explain(key) -> str     one key, one section, or (for the empty key) the list of sections
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from digenrl.config.errors import ConfigError, KeyPath, dotted, shown
from digenrl.config.layers import preset_names, read_layers
from digenrl.config.schema import Node, branches_of, children_of, expectation, is_section, node_at, plain
from digenrl.config.words import unknown_key

_ABSENT = object()


def explain(key: str) -> str:
    """Type, bounds, default, meaning and the presets' values of one key; the keys of a section.

    Args:
        key: `section.key`, `section`, or "" for all sections. Entries of a list may be written with or without an
            index: `rewards.0.name`, `rewards.name`.

    Raises:
        ConfigError: no such key; names the nearest one.
    """
    path = _path(key)
    node = node_at(path)
    assert node is not None, "_path returns only keys that exist"
    return _section_text(path, node) if children_of(node) else _value_text(path, node)


def _path(key: str) -> KeyPath:
    path: KeyPath = ()
    for part in key.split(".") if key else ():
        if node_at((*path, part)) is not None:
            path = (*path, int(part) if part.isdecimal() else part)
        elif node_at((*path, 0, part)) is not None:
            path = (*path, 0, part)
        else:
            raise ConfigError(unknown_key((*path, part)))
    return path


def _value_text(path: KeyPath, node: Node) -> str:
    holders = _holders(path)
    nodes = holders or {"": node}
    rows = [("type", _differing(nodes, expectation)), ("default", _differing(nodes, _default))]
    rows += [("algorithms", ", ".join(holders))] if holders else []
    rows += [(f"in {name}", shown(value)) for name, value in _preset_values(plain(path))]
    width = max(len(label) for label, _ in rows)
    lines = [f"  {label:<{width}}  {text}" for label, text in rows]
    return "\n".join([dotted(plain(path)), f"  {node.get('description', '')}", "", *lines])


def _holders(path: KeyPath) -> dict[str, Node]:
    """Of a key of `algorithm`: the algorithms that have it, with what it is there."""
    branches = branches_of(node_at(path[:-1]) or {}) if path[-1:] != ("name",) else {}
    found = {name: node_at((*path[:-1], name, path[-1])) for name in branches}
    return {name: node for name, node in found.items() if node is not None}


def _differing(nodes: dict[str, Node], words: Callable[[Node], str]) -> str:
    """What is said of all nodes, or of each where it is not the same."""
    said = {name: words(node) for name, node in nodes.items()}
    if len(set(said.values())) == 1:
        return next(iter(said.values()))
    return ", ".join(f"{text} ({name})" for name, text in said.items())


def _default(node: Node) -> str:
    if children_of(node):
        return "section" if is_section(node) else "list"
    return shown(node["default"]) if "default" in node else "required"


def _preset_values(path: KeyPath) -> list[tuple[str, Any]]:
    """Presets that set the key, with the value."""
    found = [(name, _lookup(value, path)) for name, value in _presets()]
    return [(name, value) for name, value in found if value is not _ABSENT]


@functools.cache
def _presets() -> list[tuple[str, dict[str, Any]]]:
    """Every preset with what it and all it extends say."""
    return [(name, read_layers(name).value) for name in preset_names()]


def _lookup(value: Any, path: KeyPath) -> Any:
    for part in path:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return _ABSENT
    return value


def _section_text(path: KeyPath, node: Node) -> str:
    """Name and meaning, then one line for each key: name, default, meaning."""
    section: KeyPath = path if is_section(node) else (*path, 0)
    rows = []
    for name in children_of(node):
        child = node_at((*section, name))
        assert child is not None, "children are keys"
        holders = _holders((*section, name))
        defaults = {_default(held) for held in holders.values()} or {_default(child)}
        only = f" [{', '.join(holders)}]" if len(holders) < len(branches_of(node)) and holders else ""
        rows.append((name, defaults.pop() if len(defaults) == 1 else "differs", child.get("description", "") + only))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"  {name:<{widths[0]}}  {default:<{widths[1]}}  {text}".rstrip() for name, default, text in rows]
    title = dotted(plain(path)) or "configuration"
    kind = "" if is_section(node) else " (a list; each entry has these keys)"
    return "\n".join([f"{title}{kind}", f"  {node.get('description', '')}", "", *lines])

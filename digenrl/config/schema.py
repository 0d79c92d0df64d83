"""The configuration's JSON schema, and walking it.

schema()              for editors and other tools; a configuration file that follows it is well formed
node_at(path)         the part of the schema that describes one key, None for an unknown key
branches_of(node)     where a section is one of several, told apart by their name: each of them
plain(path)           the path without the name of such a section
children_of(node)     keys a section may hold
expectation(node)     what a value must be, in words: "a number > 0 and < 1"
leaf_paths()          every key that holds a value, dotted; entries of lists carry the index 0
"""

from __future__ import annotations

from functools import cache
from typing import Any

from digenrl.config.errors import KeyPath, dotted, shown
from digenrl.config.run import RunConfig

Node = dict[str, Any]

_EXTENDS: Node = {
    "type": "string",
    "description": "Preset or YAML file (relative to this file) whose settings apply where this file is silent.",
}
_BOUNDS = {
    "minimum": ">=",
    "exclusiveMinimum": ">",
    "maximum": "<=",
    "exclusiveMaximum": "<",
    "multipleOf": "a multiple of",
}
_SIMPLE = {
    "integer": ("an integer", "integers"),
    "number": ("a number", "numbers"),
    "boolean": ("true or false", "booleans"),
    "string": ("a string", "strings"),
    "null": ("null", "nulls"),
}


def schema() -> Node:
    """JSON schema (draft 2020-12) of a configuration file. With `extends`, required keys may come from the base."""
    run = RunConfig.model_json_schema()
    required = run.pop("required")
    run["properties"] = {"extends": _EXTENDS, **run["properties"]}
    run["anyOf"] = [{"required": ["extends"]}, {"required": required}]
    for definition in run["$defs"].values():
        # A section of a file that extends another may name any subset of its keys.
        definition.pop("required", None)
    run["$defs"]["RewardConfig"]["required"] = ["name"]
    run["$defs"]["PromptSource"]["required"] = ["path"]
    # Without its name, which may come from the base, the same keys may belong to several algorithms.
    algorithm = run["properties"]["algorithm"]
    algorithm["anyOf"] = algorithm.pop("oneOf")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **run}


@cache
def _run_schema() -> Node:
    return RunConfig.model_json_schema()


def node_at(path: KeyPath) -> Node | None:
    """The schema of the key at `path`, references resolved; the whole schema for the empty path.

    Where a section is one of several, the name of one of them may follow its key: `algorithm.dance_grpo.eta`. Without
    it, a key is that of the first section that has it.
    """
    node = _run_schema()
    for part in path:
        found = _step(node, part)
        if found is None:
            return None
        node = found
    return node


def _step(node: Node, part: str | int) -> Node | None:
    branches = branches_of(node)
    if part in branches:
        return branches[str(part)]
    if part == "name" and branches:
        first = _resolve(next(iter(branches.values()))["properties"]["name"])
        return {**{k: v for k, v in first.items() if k != "const"}, "enum": list(branches)}
    for option in branches.values() or node.get("anyOf", [node]):
        resolved = _resolve(option)
        if isinstance(part, str) and part in resolved.get("properties", {}):
            return _resolve(resolved["properties"][part])
        if str(part).isdecimal() and resolved.get("type") == "array":
            entries = resolved.get("prefixItems")
            if entries is not None:
                return _resolve(entries[int(part)]) if int(part) < len(entries) else None
            return _resolve(resolved["items"])
    return None


def _resolve(node: Node) -> Node:
    if "$ref" not in node:
        return node
    definition = _run_schema()["$defs"][node["$ref"].rpartition("/")[2]]
    return {**definition, **{key: value for key, value in node.items() if key != "$ref"}}


def branches_of(node: Node) -> dict[str, Node]:
    """The sections by name of which a key holds one; empty if it does not."""
    sections = [_resolve(option) for option in node.get("oneOf", [])]
    return {section["properties"]["name"]["const"]: section for section in sections}


def plain(path: KeyPath) -> KeyPath:
    """The path as a file has it: without the names of branches."""
    return tuple(part for index, part in enumerate(path) if part not in branches_of(node_at(path[:index]) or {}))


def children_of(node: Node) -> list[str]:
    """Keys of a section in the order of its life; for a list of sections those of one entry; else none.

    Where the section is one of several, the keys that any of them has.
    """
    if branches := branches_of(node):
        return list(dict.fromkeys(key for branch in branches.values() for key in children_of(branch)))
    if "properties" in node:
        return list(node["properties"])
    items = node.get("items")
    return children_of(_resolve(items)) if items else []


def is_section(node: Node) -> bool:
    """Whether the key holds keys."""
    return "properties" in node or bool(branches_of(node))


def is_value(node: Node) -> bool:
    """Whether the key holds one value, not a section and not a list."""
    return not is_section(node) and not any(o.get("type") == "array" for o in node.get("anyOf", [node]))


def expectation(node: Node) -> str:
    """What a value of this key must be, as the end of "must be ..."."""
    if "anyOf" in node:
        return " or ".join(expectation(_resolve(option)) for option in node["anyOf"])
    if "enum" in node:
        return f"one of {', '.join(map(str, node['enum']))}"
    if "const" in node:
        return str(node["const"])
    if is_section(node):
        return f"a section with keys such as {', '.join(children_of(node)[:3])}"
    if node["type"] == "array":
        return _list_expectation(node)
    text = _SIMPLE[node["type"]][0]
    bounds = [f"{sign} {shown(node[key])}" for key, sign in _BOUNDS.items() if key in node]
    if node.get("minLength"):
        text += " that is not empty"
    return " ".join([text, " and ".join(bounds)]) if bounds else text


def _list_expectation(node: Node) -> str:
    if "prefixItems" in node:
        entries = node["prefixItems"]
        return f"a list of {len(entries)} {_SIMPLE[entries[0]['type']][1]}"
    items = _resolve(node["items"])
    size = " with at least one entry" if node.get("minItems") else ""
    if is_section(items):
        return f"a list of sections with the keys {', '.join(children_of(items))}{size}"
    return f"a list of {_SIMPLE[items['type']][1]}{size}"


@cache
def leaf_paths() -> tuple[str, ...]:
    """Every key that holds a value, in order."""
    return tuple(dotted(path) for path in _leaves(_run_schema(), ()))


def _leaves(node: Node, path: KeyPath) -> list[KeyPath]:
    items = _resolve(node["items"]) if "items" in node else None
    if items is not None and is_section(items):
        return _leaves(items, (*path, 0))
    if not is_section(node):
        return [path]
    children = {key: _step(node, key) for key in children_of(node)}
    return [leaf for key, child in children.items() if child for leaf in _leaves(child, (*path, key))]

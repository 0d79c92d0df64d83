"""YAML for configuration: YAML 1.2's plain values, the line of every value, and errors a person can act on.

PyYAML follows YAML 1.1, where `1e-3` is a string, `no` is false and `12:30` is 750. Here the core schema of YAML 1.2
holds instead (https://yaml.org/spec/1.2.2/#103-core-schema). Duplicate keys, aliases, tags and keys that are not
strings are refused: nothing but null, booleans, numbers, strings, lists and mappings can come out.

    parse(text, source) -> Document     raises ConfigError
    read(data, source) -> Document      the same from bytes
    dump(value) -> str                  block style, keys in the given order; `parse` gives the same value back
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar

import yaml
from yaml.composer import ComposerError

from digenrl.config.errors import ConfigError, KeyPath, dotted, encoding_problem

_TAG = "tag:yaml.org,2002:"
_CORE_SCHEMA: tuple[tuple[str, str, list[str]], ...] = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
)


@dataclass(frozen=True)
class Document:
    """A parsed document.

    Attributes:
        value: None, bool, int, float, str, list or dict with string keys.
        lines: 1-based line of every mapping entry and list item.
    """

    value: Any
    lines: dict[KeyPath, int]


class _Loader(yaml.SafeLoader):
    """Composes nodes with the core schema; aliases are refused, so a small file cannot become a large value."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}  # type: ignore[misc]

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise ComposerError(
                None,
                None,
                "aliases (*name) are not supported; share settings with extends",
                self.peek_event().start_mark,  # type: ignore[no-untyped-call]
            )
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """Quotes every string that either YAML 1.1 or the core schema would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _kind, _pattern, _first in _CORE_SCHEMA:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG + _kind, re.compile(f"(?:{_pattern})$"), _first)


def _represent_list(dumper: yaml.SafeDumper, value: list[Any]) -> yaml.Node:
    scalars = not any(isinstance(item, list | dict) for item in value)
    return dumper.represent_sequence(_TAG + "seq", value, flow_style=scalars)


def _represent_str(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    # In any other style, the line breaks that only Unicode knows (such as NEL) would come back as spaces.
    return dumper.represent_scalar(_TAG + "str", value, style=None if value.isprintable() else '"')


_Dumper.add_representer(list, _represent_list)
_Dumper.add_representer(str, _represent_str)


def dump(value: Any) -> str:
    """Block-style YAML with keys in their order; lists of plain values stay on one line."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=110)


def read(data: bytes, source: str) -> Document:
    """Parse UTF-8 bytes.

    Raises:
        ConfigError: not UTF-8, or any error of `parse`.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"{source}, line {line}: not UTF-8 text (byte 0x{data[error.start]:02x}); save the file as UTF-8"
        ) from None
    return parse(text, source)


def parse(text: str, source: str) -> Document:
    """Parse one YAML document.

    Args:
        text: the document.
        source: how errors name it, e.g. a file name.

    Raises:
        ConfigError: malformed YAML, a duplicate key, an alias, a tag, or a key that is not a string.
    """
    _refuse_control_characters(text, source)
    loader = _Loader(text)
    builder = _Builder(source)
    try:
        node = loader.get_single_node()
        value = None if node is None else builder.build(node, ())
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_syntax_problem(error, source)) from None
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply for a configuration") from None
    finally:
        loader.dispose()
    if builder.problems:
        raise ConfigError(*builder.problems)
    return Document(value, builder.lines)


def _refuse_control_characters(text: str, source: str) -> None:
    match = yaml.reader.Reader.NON_PRINTABLE.search(text)
    if match is not None:
        line = text.count("\n", 0, match.start()) + 1
        code = ord(match.group())
        raise ConfigError(f"{source}, line {line}: the control character U+{code:04X} is not allowed in YAML")


def _syntax_problem(error: yaml.MarkedYAMLError, source: str) -> str:
    problem = (error.problem or error.context or "malformed").replace("\n", " ")
    # What is never closed is reported at the end of the file; where it was opened helps more.
    unclosed = "end>" in problem or "end of stream" in problem
    mark = error.context_mark if unclosed and error.context_mark else error.problem_mark or error.context_mark
    where = f"{source}, line {mark.line + 1}" if mark else source
    if "'\\t'" in problem:
        return f"{where}: YAML is indented with spaces, found a tab"
    if problem.startswith("but found another document"):
        return f"{where}: expected one document, found a second one after ---"
    hint = " (a missing quote, colon or line break?)" if "mapping values" in problem or "expected" in problem else ""
    return f"{where}: not valid YAML: {problem}{hint}"


@dataclass
class _Builder:
    """Turns nodes into plain values; remembers lines and collects what is refused."""

    source: str
    lines: dict[KeyPath, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def build(self, node: yaml.Node, path: KeyPath) -> Any:
        if isinstance(node, yaml.MappingNode):
            self._check_tag(node, path, "map")
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            self._check_tag(node, path, "seq")
            items = []
            for index, child in enumerate(node.value):
                self.lines[(*path, index)] = child.start_mark.line + 1
                items.append(self.build(child, (*path, index)))
            return items
        return self._scalar(node, path)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != _TAG + "str":
                text = key_node.value if isinstance(key_node, yaml.ScalarNode) else "a collection"
                self._refuse(
                    line, f"keys are names, got {text or 'nothing'}" + (f" below {dotted(path)}" if path else "")
                )
                continue
            if problem := encoding_problem(key_node.value):
                self._refuse(line, f"the key {key_node.value!r} holds {problem}")
                continue
            here = (*path, key_node.value)
            if key_node.value in result:
                self._refuse(line, f"{dotted(here)} is given twice, first in line {self.lines[here]}; keep one")
                continue
            self.lines[here] = line
            result[key_node.value] = self.build(value_node, here)
        return result

    def _scalar(self, node: yaml.Node, path: KeyPath) -> Any:
        kind, text = node.tag.removeprefix(_TAG), str(node.value)
        try:
            match kind:
                case "str":
                    if problem := encoding_problem(text):
                        self._refuse(node.start_mark.line + 1, f"{dotted(path) or 'the document'} holds {problem}")
                        return None
                    return text
                case "null":
                    return None
                case "bool":
                    return {"true": True, "false": False}[text.lower()]
                case "int":
                    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
                case "float":
                    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        except (KeyError, ValueError):
            self._refuse(node.start_mark.line + 1, f"{dotted(path)}={text[:40]} cannot be read as {kind}")
            return None
        self._check_tag(node, path, "str")
        return None

    def _check_tag(self, node: yaml.Node, path: KeyPath, kind: str) -> None:
        if node.tag != _TAG + kind:
            where = dotted(path) or "the document"
            self._refuse(node.start_mark.line + 1, f"{where} has the tag {node.tag}; configuration takes no tags")

    def _refuse(self, line: int, sentence: str) -> None:
        self.problems.append(f"{self.source}, line {line}: {sentence}")

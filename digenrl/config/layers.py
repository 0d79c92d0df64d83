"""Layers of configuration: presets, files that extend one another, overrides; and where each value was written.

    preset_names()                  the presets that ship
    preset_text(name)               one of them as it is written, comments included
    read_layers(name) -> Layer      a preset or file with everything it extends, merged
    override(layer, text) -> Layer  one `section.key=value` on top

Mappings merge key by key; every other value, lists included, replaces what is below it. A layer that names another
algorithm leaves behind what that algorithm has no key for.
"""

from __future__ import annotations

import errno
import stat
from dataclasses import dataclass, replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from digenrl.config import yaml as config_yaml
from digenrl.config.algorithm import DEFAULT
from digenrl.config.errors import ConfigError, KeyPath, did_you_mean, dotted, encoding_problem, shown
from digenrl.config.schema import branches_of, is_value, node_at

#: A configuration is far smaller; a larger file is some other file.
MOST_BYTES = 1_000_000
_SUFFIXES = (".yaml", ".yml")
_OVERRIDDEN = " with overrides"
#: Begins the name of what several presets extend.
_BASES = "bases/"


@dataclass(frozen=True)
class Layer:
    """Merged settings.

    Attributes:
        value: plain nested dicts, lists and scalars.
        origins: where a value was written, by key path; a path without an entry has that of its nearest parent.
        source: the file or preset on top.
    """

    value: dict[str, Any]
    origins: dict[KeyPath, str]
    source: str

    def origin_of(self, path: KeyPath) -> str:
        """Where the value at `path` was written."""
        for length in range(len(path), 0, -1):
            if (origin := self.origins.get(path[:length])) is not None:
                return origin
        return self.source


@dataclass(frozen=True)
class _Source:
    """One readable document: `label` names it, `key` identifies it, `directory` is what its paths are relative to."""

    label: str
    key: str
    directory: Path
    data: bytes


def preset_names() -> list[str]:
    """Names of the presets that ship with DigenRL; first those that run anywhere."""
    names = (entry.name.removesuffix(".yaml") for entry in _presets().iterdir() if entry.name.endswith(".yaml"))
    return sorted(names, key=lambda name: (not name.startswith("tiny-"), name))


def base_names() -> list[str]:
    """Names of what several presets extend; a file of a user's own may extend them too."""
    entries = _presets().joinpath(_BASES).iterdir()
    return sorted(f"{_BASES}{entry.name.removesuffix('.yaml')}" for entry in entries if entry.name.endswith(".yaml"))


def preset_text(name: str) -> str:
    """A preset's file.

    Raises:
        FileNotFoundError: there is none of that name.
    """
    return _presets().joinpath(f"{name}.yaml").read_text(encoding="utf-8")


def _presets() -> Traversable:
    return files("digenrl.data").joinpath("presets")


def read_layers(name: str) -> Layer:
    """Read a preset or a YAML file and everything it extends.

    Raises:
        ConfigError: nothing of that name, a cycle of `extends`, or a malformed document.
    """
    return _read(_open(name, Path(), ""), ())


def _read(source: _Source, chain: tuple[_Source, ...]) -> Layer:
    chain = (*chain, source)
    if source.key in [earlier.key for earlier in chain[:-1]]:
        raise ConfigError(f"extends goes round in a circle: {' -> '.join(link.label for link in chain)}")
    document = config_yaml.read(source.data, source.label)
    if document.value is None:
        raise ConfigError(f"{source.label} is empty; start from a preset, such as extends: tiny-ocr")
    if not isinstance(document.value, dict):
        raise ConfigError(f"{source.label} must hold sections and keys, got {shown(document.value)}")
    value = dict(document.value)
    origins = {path: f"{source.label}, line {line}" for path, line in document.lines.items()}
    layer = Layer(value, origins, source.label)
    if "extends" not in value:
        return layer
    base = value.pop("extends")
    where = origins.pop(("extends",))
    if not isinstance(base, str):
        raise ConfigError(f"extends must be the name of one preset or YAML file, got {shown(base)} ({where})")
    return _merge(_read(_open(base, source.directory, f" ({where})"), chain), layer)


def _open(name: str, directory: Path, where: str) -> _Source:
    """Find `name`: a preset, else a file relative to `directory`. `where` ends the sentence of an error."""
    if name in (*preset_names(), *base_names()):
        return _Source(f"preset {name}", f"preset:{name}", Path(), preset_text(name).encode())
    path = directory / Path(name).expanduser()
    if not name.strip():
        raise ConfigError(
            f"expected a preset such as tiny-ocr (see `digenrl presets`) or a YAML file, got an empty name{where}"
        )
    try:
        data = _read_file(path, where)
        return _Source(str(path), str(path.resolve()), path.parent, data)
    except ConfigError:
        raise
    except PermissionError:
        raise ConfigError(f"{path} cannot be read: permission denied{where}") from None
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno == errno.ELOOP:
            raise ConfigError(f"{path} cannot be read: its symbolic links go round in a circle{where}") from None
        raise ConfigError(_not_found(name, path, where)) from None


def _read_file(path: Path, where: str) -> bytes:
    """The bytes of a regular file: a pipe would be waited for, and a device may have no end."""
    found = path.stat()
    if stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{path} is a directory, expected a preset or a YAML file{where}")
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{path} is a device or pipe, expected a preset or a YAML file{where}")
    if found.st_size > MOST_BYTES:
        raise ConfigError(
            f"{path} has {found.st_size:,} bytes, expected a YAML file of settings, at most {MOST_BYTES:,}{where}"
        )
    return path.read_bytes()


def _not_found(name: str, path: Path, where: str) -> str:
    if len(name) > 255:
        return f"no preset or file {shown(name)}{where}"
    if name.startswith(_BASES) and not path.parent.is_dir():
        return f"no base {shown(name)}{did_you_mean(name, base_names(), 'bases')}{where}"
    neighbours: list[str] = []
    if "/" in name or path.suffix in _SUFFIXES:
        folder = path.parent
        if not folder.is_dir():
            return f"no file {shown(name)}: there is no directory {folder}{where}"
        near = sorted(entry.name for entry in folder.iterdir() if entry.suffix in _SUFFIXES)
        neighbours = [str(Path(name).parent / entry) for entry in near]
    hint = did_you_mean(name, [*neighbours, *preset_names()], "presets and files")
    return f"no preset or file {shown(name)}{hint}{where}"


def override(layer: Layer, text: str) -> Layer:
    """Put `section.key=value` on top of a layer. The value is read as YAML; a key may pass through list indices.

    Raises:
        ConfigError: no `=`, no key, no value, a value that is not YAML, or a key below a plain value.
    """
    key, equals, raw = text.partition("=")
    key = key.strip()
    parts = key.split(".")
    if not equals:
        raise ConfigError(f"override {shown(text)} has no '='; write section.key=value")
    if not all(parts):
        raise ConfigError(f"override {shown(text)} has no complete key before '='; write section.key=value")
    if problem := encoding_problem(key):
        raise ConfigError(f"override {shown(text)}: its key holds {problem}")
    if not raw.strip():
        raise ConfigError(f"override {shown(text)} has no value; write {key}=null to unset it")
    value = config_yaml.parse(raw, f"override {shown(text)}").value
    path: KeyPath = tuple(_part(part, index, parts, layer.value, text) for index, part in enumerate(parts))
    source = f"{layer.source.removesuffix(_OVERRIDDEN)}{_OVERRIDDEN}"
    return replace(_merge(layer, _nested(layer, path, value, f"override {text}")), source=source)


def _part(part: str, index: int, parts: list[str], value: dict[str, Any], text: str) -> str | int:
    """One step of an override's key, checked against the schema and the lists that are there."""
    above = tuple(parts[:index])
    node = node_at(above)
    if node is not None and is_value(node):
        raise ConfigError(f"override {shown(text)}: {dotted(above)} is a value, it has no key {part}")
    current: Any = value
    for step in above:
        if isinstance(current, dict):
            current = current.get(step, {})
        elif isinstance(current, list) and step.isdecimal() and int(step) < len(current):
            current = current[int(step)]
    if isinstance(current, list):
        if not part.isdecimal() or int(part) >= len(current):
            raise ConfigError(
                f"override {shown(text)}: {dotted(above)} is a list of {len(current)}; "
                f"{part} is not one of its indices 0 to {len(current) - 1}"
            )
        return int(part)
    if current is not None and not isinstance(current, dict):
        raise ConfigError(f"override {shown(text)}: {dotted(above)} is {shown(current)}, it has no key {part}")
    if current is None and above:
        raise ConfigError(f"override {shown(text)}: {dotted(above)} is null, it has no key {part}")
    return part


def _nested(layer: Layer, path: KeyPath, value: Any, source: str) -> Layer:
    """A layer that holds only `value` at `path`. A list on the way is copied whole, with one entry changed."""
    origins = {path: source}
    for length in range(len(path) - 1, -1, -1):
        part = path[length]
        if isinstance(part, int):
            entries = list(_at(layer.value, path[:length]))
            entries[part] = _merged(entries[part], value)
            value = entries
            origins |= {p: o for p, o in layer.origins.items() if p[:length] == path[:length] and p not in origins}
        else:
            value = {part: value}
    return Layer(value, origins, layer.source)


def _at(value: Any, path: KeyPath) -> Any:
    for part in path:
        value = value[part]
    return value


def _merged(base: Any, top: Any) -> Any:
    if isinstance(base, dict) and isinstance(top, dict):
        return {**base, **{key: _merged(base.get(key), value) for key, value in top.items()}}
    return top


def _merge(base: Layer, top: Layer) -> Layer:
    """`top` over `base`. Values that `top` replaces lose their origins in `base`."""
    base = _for_algorithm_of(base, top)
    origins = {path: origin for path, origin in base.origins.items() if not _replaced(path, base.value, top.value)}
    return Layer(_merged(base.value, top.value), {**origins, **top.origins}, top.source)


def _replaced(path: KeyPath, base: Any, top: Any) -> bool:
    for part in path:
        if not (isinstance(base, dict) and isinstance(top, dict)):
            return True
        if part not in top:
            return False
        base, top = base[part], top[part]
    return True


def _for_algorithm_of(base: Layer, top: Layer) -> Layer:
    """`base` without the settings of its algorithm that the one `top` names does not have."""
    below, above = (layer.value.get("algorithm", {}) for layer in (base, top))
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return base
    name = above.get("name", below.get("name", DEFAULT))
    section = branches_of(node_at(("algorithm",)) or {}).get(name) if isinstance(name, str) else None
    if section is None or name == below.get("name", DEFAULT):
        return base
    kept = {key: value for key, value in below.items() if key in section["properties"]}
    lost = below.keys() - kept.keys()
    origins = {path: o for path, o in base.origins.items() if path[:1] != ("algorithm",) or not lost & set(path[1:2])}
    return Layer({**base.value, "algorithm": kept}, origins, base.source)

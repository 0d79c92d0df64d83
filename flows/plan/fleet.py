"""A fleet file: which workers there are, of which kind, how fast, how dear.

read_fleet(path) -> tuple[Member, ...]      raises ConfigError

- kind: a100            # any name
  count: 8
  rate: 0.4             # speed relative to the profile's first kind; or `profile: NAME` of a kind in the profile
  memory_gib: 80        # of one worker
  price_per_hour: 1.9   # of one worker, in any currency
  capabilities: [rollout, train, score]
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from digenrl.config import yaml as config_yaml
from digenrl.config.errors import ConfigError, KeyPath, did_you_mean, dotted, shown
from digenrl.config.schema import expectation

#: The scheduler is tested up to here.
MOST_WORKERS = 4096

_CAPABILITIES = "a list of capabilities: rollout, train, score"


class Member(BaseModel):
    """Workers of one kind."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    kind: Annotated[str, Field(min_length=1)]
    count: Annotated[int, Field(ge=1, le=MOST_WORKERS)]
    rate: Annotated[float, Field(gt=0)] | None = None
    profile: str | None = None
    memory_gib: Annotated[float, Field(gt=0)] | None = None
    price_per_hour: Annotated[float, Field(ge=0)] | None = None
    capabilities: tuple[Literal["rollout", "train", "score"], ...] = ("rollout", "train", "score")


def read_fleet(path: Path) -> tuple[Member, ...]:
    """The members, in the order of the file.

    Raises:
        ConfigError: everything that is wrong, one sentence each with its line.
    """
    try:
        document = config_yaml.read(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"the fleet {path} cannot be read: {(error.strerror or str(error)).lower()}") from None
    if not isinstance(document.value, list) or not document.value:
        expected = "such as [{kind: a100, count: 8, rate: 0.4}]"
        raise ConfigError(f"{path} must hold a list of workers {expected}, got {shown(document.value)}")
    members, problems = [], []
    for index, entry in enumerate(document.value):
        try:
            members.append(Member.model_validate_json(json.dumps(entry), strict=True))
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                where = _line(document.lines, (index, *detail["loc"]))
                problems.append(f"{path}, line {where}: {_sentence(detail, entry)}")
    problems = list(dict.fromkeys(problems)) + _cross(path, members)
    if problems:
        raise ConfigError(*problems)
    return tuple(members)


def _cross(path: Path, members: list[Member]) -> list[str]:
    problems = []
    kinds = [member.kind for member in members]
    for kind in dict.fromkeys(kind for kind in kinds if kinds.count(kind) > 1):
        problems.append(f"{path}: kind {shown(kind)} is given {kinds.count(kind)} times; write one entry per kind")
    for member in members:
        if member.rate is not None and member.profile is not None:
            problems.append(
                f"{path}: kind {shown(member.kind)} has rate={member.rate:g} and profile={shown(member.profile)}; "
                f"give the speed in one of the two ways"
            )
    total = sum(member.count for member in members)
    if total > MOST_WORKERS:
        problems.append(f"{path}: a fleet may have up to {MOST_WORKERS} workers, got {total}")
    return problems


def _line(lines: dict[KeyPath, int], path: KeyPath) -> int:
    """Where a value was written, or what holds it."""
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path, 1)


def _sentence(detail: ErrorDetails, entry: Any) -> str:
    fields: dict[str, Any] = Member.model_json_schema()["properties"]
    if not detail["loc"]:
        return f"an entry must be a mapping with kind and count, got {shown(entry)}"
    name = str(detail["loc"][0])
    if detail["type"] == "extra_forbidden":
        return f"{dotted(detail['loc'])} is not a key{did_you_mean(name, fields, 'keys')}"
    expected = _CAPABILITIES if name == "capabilities" else expectation(fields[name])
    if detail["type"] == "missing":
        return f"{name} is missing: it must be {expected}"
    return f"{name} must be {expected}, got {shown(entry[name])}"

"""Fleet files: what is read, and what every mistake is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from digenrl.config.errors import ConfigError
from flows.plan.fleet import Member, read_fleet


def written(folder: Path, text: str) -> Path:
    path = folder / "fleet.yaml"
    path.write_text(text)
    return path


def test_members_in_order_with_defaults(tmp_path: Path) -> None:
    text = (
        "- kind: h100\n  count: 2\n  price_per_hour: 2.5\n- {kind: l4, count: 3, rate: 0.1, capabilities: [rollout]}\n"
    )
    first, second = read_fleet(written(tmp_path, text))
    assert first == Member(kind="h100", count=2, price_per_hour=2.5)
    assert first.capabilities == ("rollout", "train", "score")
    assert (second.rate, second.capabilities) == (0.1, ("rollout",))


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("", ("must hold a list of workers",)),
        ("kind: a\ncount: 1\n", ("must hold a list of workers", "kind: a100")),
        ("- 3\n", ("line 1", "an entry must be a mapping", "got 3")),
        ("- kind: a\n", ("line 1", "count is missing", "an integer >= 1 and <= 4096")),
        ("- kind: a\n  count: 0\n", ("line 2", "count must be an integer >= 1", "got 0")),
        ("- kind: a\n  count: '2'\n", ("count must be an integer", "got '2'")),
        ("- {kind: a, count: 1, rate: -1}\n", ("rate must be a number > 0 or null", "got -1")),
        ("- {kind: a, count: 1, pric_per_hour: 1}\n", ("pric_per_hour is not a key", "did you mean price_per_hour?")),
        ("- {kind: a, count: 1, capabilities: [trian]}\n", ("capabilities must be", "rollout, train, score", "trian")),
        ("- {kind: a, count: 1}\n- {kind: a, count: 2}\n", ("kind 'a' is given 2 times",)),
        ("- {kind: a, count: 1, rate: 1, profile: b}\n", ("rate=1 and profile='b'", "one of the two")),
        ("- {kind: a, count: 4000}\n- {kind: b, count: 97}\n", ("up to 4096 workers", "got 4097")),
    ],
)
def test_mistakes_are_named_with_their_line(tmp_path: Path, text: str, fragments: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        read_fleet(written(tmp_path, text))
    for fragment in ("fleet.yaml", *fragments):
        assert fragment in str(refused.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"fleet .*no\.yaml cannot be read: no such file"):
        read_fleet(tmp_path / "no.yaml")

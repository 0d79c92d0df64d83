"""The scenes and styles that ship with the package."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

from digenrl.data.scenes import scenes, styles, write_prompts
from digenrl.prompts import load_prompts
from digenrl.rewards.base import PromptRecord

SHIPPED = Path(str(files("digenrl.data").joinpath("prompts")))


def test_the_files_are_what_the_module_writes(tmp_path: Path) -> None:
    write_prompts(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"{s}-{part}.jsonl" for s in ("scenes", "styles") for part in ("held-out", "train")]
    assert all((tmp_path / name).read_bytes() == (SHIPPED / name).read_bytes() for name in names)


@pytest.mark.parametrize(
    ("name", "sets", "fields"),
    [("scenes", scenes(), {"kind", "expects"}), ("styles", styles(), {"subject", "style"})],
)
def test_the_halves_share_nothing(
    name: str, sets: tuple[list[PromptRecord], list[PromptRecord]], fields: set[str]
) -> None:
    train, held_out = sets
    assert (tuple(load_prompts(f"package:{name}-train")), tuple(load_prompts(f"package:{name}-held-out"))) == (
        tuple(train),
        tuple(held_out),
    )
    assert len({p.text for p in train + held_out}) == len(train) + len(held_out)
    assert all(set(p.fields) == fields for p in train + held_out)
    kinds = {p.fields.get("kind") for p in held_out}
    assert kinds == {p.fields.get("kind") for p in train}


def test_a_scene_says_what_is_expected() -> None:
    for prompt in [*scenes()[0], *scenes()[1]]:
        kind, expects = prompt.fields["kind"], prompt.fields["expects"]
        words = [w for w in expects.replace(",", "").split() if w not in ("x", "2", "3", "4", "5")]
        assert all(word in prompt.text for word in words), (kind, expects, prompt.text)

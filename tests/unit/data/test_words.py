"""The words set."""

from importlib.resources import files
from pathlib import Path

import pytest

from digenrl.data.words import HELD_OUT, SCENES, TRAIN, split, write_prompts
from digenrl.prompts import load_prompts


def test_no_text_is_in_both_parts_and_every_scene_is_in_each() -> None:
    train, held_out = split()
    assert (len(train), len(held_out)) == (TRAIN, HELD_OUT)
    targets = [{record["target"] for record in records} for records in (train, held_out)]
    assert len(targets[0]) == TRAIN and len(targets[1]) == HELD_OUT and not targets[0] & targets[1]
    for records in (train, held_out):
        assert {record["text"].replace(record["target"], "{}") for record in records} == set(SCENES)


@pytest.mark.parametrize("name", ["words-train", "words-held-out"])
def test_shipped_prompt_sets_are_what_the_script_writes(tmp_path: Path, name: str) -> None:
    write_prompts(tmp_path)
    shipped = files("digenrl.data") / "prompts" / f"{name}.jsonl"
    assert (tmp_path / f"{name}.jsonl").read_bytes() == shipped.read_bytes()
    assert all(f'"{record.fields["target"]}"' in record.text for record in load_prompts(f"package:{name}"))

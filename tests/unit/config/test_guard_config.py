"""The section `guard`: what it refuses, and that every key is explained."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from digenrl.choices import settle
from digenrl.config import GuardConfig, RewardConfig
from digenrl.config.changes import forbidden_changes
from digenrl.config.errors import ConfigError
from digenrl.config.explain import explain
from digenrl.config.load import load_config
from digenrl.preflight import check


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check(load_config("tiny-ocr", list(overrides)))
    return str(caught.value)


def test_a_gold_reward_must_not_be_trained_on() -> None:
    assert "guard.gold names ocr, which rewards trains on" in refused('guard.gold=["ocr"]')
    both = refused('rewards=[{"name": "jpeg_compressibility"}, {"name": "ocr_ddddocr"}]', 'guard.gold=["ocr_ddddocr"]')
    assert "guard.gold names ocr_ddddocr" in both
    assert "guard.gold names ocr" in refused('guard.gold=[{"name": "ocr", "label": "another", "weight": 2}]')
    settings = 'guard.gold=["ocr_ddddocr", {"name": "ocr", "label": "exact", "match": "exact"}]'
    assert [gold.called for gold in load_config("tiny-ocr", [settings]).guard.gold or ()] == ["ocr_ddddocr", "exact"]


def test_a_gold_reward_must_exist_and_suit_the_held_out_prompts(tmp_path: Path) -> None:
    assert "did you mean ocr_ddddocr?" in refused('guard.gold=["ocr_dddocr"]')
    assert "each reward may be named once" in refused('guard.gold=["ocr_ddddocr", "ocr_ddddocr"]')
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat\n")
    text = refused('rewards=[{"name": "jpeg_compressibility"}]', 'guard.gold=["ocr"]', f"data.held_out={prompts}")
    assert "data.held_out lacks what guard.gold needs: reward ocr: prompt" in text


@pytest.mark.parametrize("limits", ["[0.5, 0.2]", "[-1, 2]"])
def test_limits_are_in_order(limits: str) -> None:
    assert "guard.dark must be [warn, stop] with 0 <= warn <= stop" in refused(f"guard.dark={limits}")


def test_every_key_is_explained_with_its_unit() -> None:
    for name, field in GuardConfig.model_fields.items():
        text = explain(f"guard.{name}")
        assert field.description in text and "default" in text
        if isinstance(field.default, tuple):
            assert re.search(r"as a share|factor|share of|deviations|\[0, 1\]", text, re.IGNORECASE), name


def test_what_is_open_is_settled_once() -> None:
    config, reasons = settle(load_config("tiny-ocr", []), 200, ())
    assert config.guard.gold == (RewardConfig(name="ocr_ddddocr"),) and "guard.gold: ocr_ddddocr" in reasons
    again, none = settle(config, 200, ())
    assert again == config and not any("gold" in reason for reason in none)


def test_the_guard_may_be_changed_between_attempts() -> None:
    config = load_config("tiny-ocr", [])
    assert not forbidden_changes(config.model_dump(mode="json"), load_config("tiny-ocr", ["guard.mode=warn"]))


def test_a_guard_without_held_out_prompts_sees_nothing_and_says_so() -> None:
    notes = check(load_config("tiny-ocr", ["data.held_out=null"]))
    assert any("the guard sees nothing" in note for note in notes)


def test_the_documented_limits_are_the_defaults() -> None:
    page = (Path(__file__).parents[3] / "docs" / "guardrails.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| `")]
    documented = {row[0].strip("`"): (float(row[-2]), float(row[-1])) for row in rows}
    defaults = {name: f.default for name, f in GuardConfig.model_fields.items() if isinstance(f.default, tuple)}
    assert documented == defaults

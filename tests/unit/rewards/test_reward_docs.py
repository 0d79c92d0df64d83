"""What docs/rewards.md says is so."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from digenrl.config import GatesConfig, RequestConfig, RewardConfig
from digenrl.rewards.base import Failed, PromptRecord, Scored
from digenrl.rewards.cards import card_table
from digenrl.rewards.registry import make_reward

REPOSITORY = Path(__file__).parents[3]
PAGE = (REPOSITORY / "docs/rewards.md").read_text()
RECIPES = sorted((REPOSITORY / "docs/rewards").glob("*.md"))


def test_the_table_is_that_of_the_registry() -> None:
    titles, *rows = card_table()
    for cells in (titles, *((f"`{name}`", *rest) for name, *rest in rows)):
        assert f"| {' | '.join(cells)} |\n" in PAGE


def test_the_reward_of_ones_own_works_and_has_15_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(code.splitlines()) <= 15
    (tmp_path / "brightness.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    images = np.stack([np.full((2, 4, 4, 3), value, np.uint8) for value in (0, 51)])
    reward = make_reward(RewardConfig(name="python:brightness:bright"))
    assert list(reward(images, [PromptRecord("a", ""), PromptRecord("b", "")])) == [
        Failed("reward bright returned None"),
        Scored(pytest.approx(0.2)),
    ]
    monkeypatch.delitem(sys.modules, "brightness")


def test_defaults_are_those_of_the_configuration() -> None:
    defaults = {**RequestConfig().model_dump(), **{f"gates.{k}": v for k, v in GatesConfig().model_dump().items()}}
    found = re.findall(r"`([a-z_.]+)` \((\d[\d.]*)\)", PAGE)
    assert len(found) >= 10
    for key, value in found:
        assert float(defaults[key]) == float(value), key


@pytest.mark.parametrize("page", RECIPES, ids=lambda page: page.stem)
def test_a_recipe_has_a_requirements_file_valid_settings_and_code_that_compiles(page: Path) -> None:
    text = page.read_text()
    requirements = REPOSITORY / f"recipes/rewards/{page.stem}.txt"
    assert f"-r {requirements.relative_to(REPOSITORY)}" in text and requirements.is_file()
    assert f"](rewards/{page.name})" in PAGE
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        compile(code, str(page), "exec")
    (settings,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    found = yaml.safe_load(settings)
    for entry in found["rewards"] if isinstance(found, dict) else found:
        make_reward(RewardConfig.model_validate(entry))

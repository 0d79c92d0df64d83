"""What a key means, and the JSON schema of a configuration file."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest

from digenrl.config import yaml as config_yaml
from digenrl.config.load import ConfigError, explain, preset_names, schema
from digenrl.config.schema import leaf_paths


def test_explain_every_key() -> None:
    for key in leaf_paths():
        text = explain(key)
        assert text.startswith(key)
        assert "type " in text and "default " in text


@pytest.mark.parametrize(
    ("key", "fragments"),
    [
        ("algorithm.clip_range", ["PPO clip range", "a number > 0 and < 1", "0.001", "in tiny-ocr"]),
        ("schedule.micro_batch", ["an integer or auto", "'auto'"]),
        ("rewards.name", ["rewards.0.name", "required", "in tiny-ocr", "'ocr'"]),
        ("rewards", ["a list", "name", "weight"]),
        (
            "algorithm",
            ["noise_level", "Noise level a", "[flow_grpo, grpo_guard, flow_dppo]", "differs", "[dance_grpo]"],
        ),
        ("algorithm.clip_range", ["0.001 (flow_grpo)", "0.0001 (dance_grpo)", "algorithms", "in tiny-smoke"]),
        ("algorithm.eta", ["default 0.3", "algorithms dance_grpo", "in flux1-dev-dance_grpo 0.3"]),
        ("algorithm.sampler", ["one of flow_sde, cps, wan_sde (flow_grpo), one of flow_sde, wan_sde (grpo_guard)"]),
        ("algorithm.name", ["one of flow_grpo, dance_grpo", "'flow_grpo'"]),
        ("algorithm.dance_grpo", ["DanceGRPO", "trained_fraction"]),
        ("", ["algorithm", "section", "iterations", "RL iterations"]),
    ],
)
def test_explain(key: str, fragments: list[str]) -> None:
    text = re.sub(" +", " ", explain(key))
    assert all(fragment in text for fragment in fragments), text


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("algoritm", "algorithm"),
        ("algorithm.cliprange", "algorithm.clip_range"),
        ("clip_range", "algorithm.clip_range"),
    ],
)
def test_explain_of_an_unknown_key_names_the_nearest(key: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean {meant}"):
        explain(key)


def test_schema_describes_every_key() -> None:
    text = json.dumps(schema())
    assert "extends" in schema()["properties"]
    assert all(f'"{key.rpartition(".")[2]}"' in text for key in leaf_paths())


def test_schema_accepts_the_presets_and_refuses_what_load_config_refuses() -> None:
    validator = jsonschema.Draft202012Validator(schema())
    folder = Path(str(files("digenrl.data") / "presets"))
    for name in preset_names():
        validator.validate(config_yaml.read((folder / f"{name}.yaml").read_bytes(), name).value)
    for wrong in ({"seed": 1}, {"extends": "tiny-ocr", "sed": 1}, {"extends": "tiny-ocr", "model": {"height": "x"}}):
        assert not validator.is_valid(wrong)

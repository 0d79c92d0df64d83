"""Reading, showing and explaining configurations; every error is a sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from digenrl.config import RunConfig
from digenrl.config import yaml as config_yaml
from digenrl.config.load import ConfigError, load_config, preset_names, show, warnings_of

SMALL = "data: {prompts: prompts.txt}\nrewards: [{name: ocr}]\n"


def write(directory: Path, text: str, name: str = "my.yaml") -> str:
    path = directory / name
    path.write_text(text)
    return str(path)


def refusal(preset_or_path: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(preset_or_path, overrides)
    return str(caught.value)


# Presets and layers


def test_every_shipped_preset_is_valid() -> None:
    assert preset_names() == ["tiny-ocr", "tiny-smoke"]
    for name in preset_names():
        assert isinstance(load_config(name), RunConfig)
        assert warnings_of(load_config(name)) == []


def test_tiny_ocr_is_the_measured_recipe() -> None:
    config = load_config("tiny-ocr")
    algorithm, optimizer = config.algorithm, config.optimizer
    assert (config.seed, config.iterations) == (0, 60)
    assert (algorithm.prompts_per_iteration, algorithm.samples_per_prompt, algorithm.num_steps) == (8, 16, 10)
    assert (algorithm.sde_window_size, algorithm.window_range) == (3, (0, 5))
    assert (algorithm.noise_level, algorithm.updates_per_iteration, algorithm.clip_range) == (0.7, 4, 1e-3)
    assert (algorithm.adv_clip_max, algorithm.kl_beta, algorithm.std_scope) == (5.0, 0.0, "group")
    assert (config.lora.rank, config.lora.alpha) == (16, 32)
    assert (optimizer.learning_rate, optimizer.weight_decay, optimizer.betas) == (1e-3, 1e-4, (0.9, 0.999))
    assert (optimizer.warmup_iterations, optimizer.decay, optimizer.final_fraction) == (3, "linear", 0.1)
    assert (config.evaluation.every, config.evaluation.prompts, config.checkpoint.every) == (10, 200, 10)
    assert (config.model.path, config.model.height, config.model.width) == ("package:tiny-sd3", 12, 24)


def test_a_file_extends_a_preset_through_another_file(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    write(tmp_path / "base", "extends: tiny-ocr\nalgorithm:\n  noise_level: 0.5\n  clip_range: 2e-3\n", "mid.yaml")
    top = write(tmp_path, "extends: base/mid.yaml\nalgorithm:\n  clip_range: 3e-3\n")
    algorithm = load_config(top).algorithm
    assert (algorithm.clip_range, algorithm.noise_level, algorithm.samples_per_prompt) == (3e-3, 0.5, 16)


def test_lists_are_replaced_and_sections_merged(tmp_path: Path) -> None:
    path = write(tmp_path, "extends: tiny-ocr\nlora:\n  targets: [to_q]\n")
    lora = load_config(path).lora
    assert (lora.targets, lora.rank) == (("to_q",), 16)


def test_a_cycle_of_extends_is_refused(tmp_path: Path) -> None:
    first = write(tmp_path, "extends: b.yaml\n", "a.yaml")
    second = write(tmp_path, "extends: a.yaml\n", "b.yaml")
    assert f"{first} -> {second} -> {first}" in refusal(first)


# YAML


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1E5", 1e5),
        (".5", 0.5),
        ("-1", -1),
        ("010", 10),
        ("0x1F", 31),
        ("0o17", 15),
        ("12:30", "12:30"),
        ("1_000", "1_000"),
        ("2026-01-02", "2026-01-02"),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("~", None),
        ("", None),
        ("'1e-3'", "1e-3"),
        ("-.inf", float("-inf")),
        ("[1, [a, {b: null}]]", [1, ["a", {"b": None}]]),
    ],
)
def test_plain_values_follow_yaml_1_2(text: str, value: object) -> None:
    parsed = config_yaml.parse(f"key: {text}", "test").value["key"]
    assert parsed == value
    assert type(parsed) is type(value)


def test_lines_are_known_for_keys_and_list_entries() -> None:
    document = config_yaml.parse("a:\n  b: 1\n  c:\n    - x\n    - y\n", "test")
    assert document.lines == {("a",): 1, ("a", "b"): 2, ("a", "c"): 3, ("a", "c", 0): 4, ("a", "c", 1): 5}


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(values)
@settings(deadline=None)
def test_dumped_values_parse_to_the_same_values(value: object) -> None:
    assert config_yaml.parse(config_yaml.dump({"key": value}), "test").value == {"key": value}


@pytest.mark.parametrize(
    ("content", "fragments"),
    [
        (b"seed: \xff\n", ["line 1", "not UTF-8", "0xff"]),
        (b"a:\n\tb: 1\n", ["line 2", "tab"]),
        (b"a: [1\n", ["line 1", "not valid YAML"]),
        (b"a: 'x\n", ["not valid YAML"]),
        (b"a: b: c\n", ["line 1", "mapping values"]),
        (b"- seed\n", ["must hold sections", '["seed"]']),
        (b"", ["empty", "extends: tiny-ocr"]),
        (b"# nothing\n", ["empty"]),
        (b"seed: 1\nseed: 2\n", ["line 2", "seed is given twice", "line 1"]),
        (b"a: {b: 1, b: 2}\n", ["a.b is given twice"]),
        (b"a: &x 1\nb: *x\n", ["line 2", "aliases", "extends"]),
        (b"a: !!python/object/apply:os.system ['true']\n", ["python/object", "no tags"]),
        (b"1: 2\n", ["keys are names, got 1"]),
        (b"a: 1\n---\nb: 1\n", ["line 2", "one document"]),
        (b"a: \x01\n", ["U+0001"]),
        (b"[" * 3000, ["nested too deeply"]),
        (b"seed: !!int x\n", ["seed=x", "int"]),
    ],
)
def test_malformed_documents_are_refused(tmp_path: Path, content: bytes, fragments: list[str]) -> None:
    path = tmp_path / "my.yaml"
    path.write_bytes(content)
    message = refusal(str(path))
    assert message.startswith(str(path))
    assert all(fragment in message for fragment in fragments), message


def test_a_byte_order_mark_is_not_part_of_the_first_key(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + SMALL.encode())
    assert load_config(str(path)).data.prompts == "prompts.txt"


# Overrides


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("algorithm.clip_range=1e-4", lambda c: c.algorithm.clip_range == 1e-4),
        ("rewards.0.weight=2", lambda c: c.rewards[0].weight == 2.0 and c.rewards[0].name == "ocr"),
        ("rewards=[{name: a}, {name: b}]", lambda c: [r.name for r in c.rewards] == ["a", "b"]),
        ("lora.targets=null", lambda c: c.lora.targets is None),
        ("lora.targets=[to_q, to_k]", lambda c: c.lora.targets == ("to_q", "to_k")),
        ("algorithm.sde_window_range.1=4", lambda c: c.algorithm.sde_window_range == (0, 4)),
        ("algorithm={num_steps: 12}", lambda c: c.algorithm.num_steps == 12 and c.algorithm.samples_per_prompt == 16),
        ("schedule.observe.every=0", lambda c: c.schedule.observe.every == 0),
        ("tracking.experiment=no", lambda c: c.tracking.experiment == "no"),
        ("tracking.uri=http://host:5001/a=b", lambda c: c.tracking.uri == "http://host:5001/a=b"),
        ("model.gradient_checkpointing=true", lambda c: c.model.gradient_checkpointing is True),
    ],
)
def test_overrides(text: str, read: object) -> None:
    assert callable(read)
    assert read(load_config("tiny-ocr", [text]))


def test_the_last_override_wins() -> None:
    assert load_config("tiny-ocr", ["seed=1", "seed=2"]).seed == 2


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("seed", ["has no '='"]),
        ("=3", ["no complete key"]),
        ("algorithm.=3", ["no complete key"]),
        ("seed=", ["no value", "seed=null"]),
        ("seed=[", ["not valid YAML"]),
        ("iterations.foo=3", ["iterations is a value"]),
        ("model.path.x=3", ["model.path is a value"]),
        ("rewards.1.weight=3", ["rewards is a list of 1", "0 to 0"]),
        ("rewards.name=3", ["rewards is a list of 1"]),
        ("lora.targets.99=x", ["lora.targets is a list of 11"]),
        ("algorithm.clip_rang=2", ["algorithm.clip_rang is not a key", "did you mean algorithm.clip_range?"]),
        ("clip_range=2", ["did you mean algorithm.clip_range?"]),
        ("lr=2", ["did you mean optimizer.learning_rate?"]),
        ("algorithm.zzz=2", ["valid keys: name, num_steps, prompts_per_iteration"]),
        ("model=3", ["model must be a section", "family, path, height", "got 3"]),
    ],
)
def test_bad_overrides(text: str, fragments: list[str]) -> None:
    message = refusal("tiny-ocr", text)
    assert text in message
    assert all(fragment in message for fragment in fragments), message


# Values


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("algorithm.clip_range=2", ["must be a number > 0 and < 1, got 2"]),
        ("algorithm.noise_level=.inf", ["algorithm.noise_level must be a number > 0 and <= 2"]),
        ("algorithm.sampler=flow_sd", ["one of flow_sde, cps", "got 'flow_sd'", "did you mean flow_sde?"]),
        (
            "algorithm.sde_window_range=[1]",
            ["algorithm.sde_window_range must be a list of 2 integers or null, got [1]"],
        ),
        ("algorithm.sde_window_range=[a, 3]", ["algorithm.sde_window_range.0 must be an integer, got 'a'"]),
        ("optimizer.betas=[1, 2, 3]", ["optimizer.betas must be a list of 2 numbers, got [1, 2, 3]"]),
        ("schedule.micro_batch=atuo", ["an integer or auto", "did you mean auto?"]),
        ("schedule.micro_batch=0", ["schedule.micro_batch must be at least 1, or auto, got 0"]),
        ("iterations='3'", ["iterations must be an integer >= 1 and <= 1000000, got '3'", "without quotes"]),
        ("iterations=3.0", ["got 3.0", "write 3"]),
        ("iterations=true", ["iterations must be an integer >= 1 and <= 1000000, got true"]),
        ("model.gradient_checkpointing=yes", ["must be true or false or auto, got 'yes'", "write true"]),
        ("model.gradient_checkpointing=1", ["must be true or false or auto, got 1"]),
        ("rewards=[]", ["at least one entry"]),
        ("rewards=ocr", ["a list of sections with the keys name, weight"]),
        (
            "rewards=[{nam: ocr}]",
            ["rewards.0.nam is not a key; did you mean rewards.0.name?", "rewards.0.name is missing"],
        ),
        ("model=null", ["model must be a section", "delete the line"]),
        ("tracking.experiment=''", ["a string that is not empty"]),
        (
            "algorithm.updates_per_iteration=3",
            ["algorithm: updates_per_iteration=3 must divide prompts_per_iteration=8"],
        ),
        ("algorithm.samples_per_prompt=1", ["algorithm.samples_per_prompt must be an integer >= 2, got 1"]),
        ("algorithm.sde_window_size=6", ["does not fit into sde_window_range=[0, 5]"]),
        ("schedule.micro_batch=5", ["schedule.micro_batch=5 must divide algorithm.samples_per_prompt=16"]),
        ("cluster.trainers=2", ["leaves no rollout worker"]),
        ("optimizer.warmup_iterations=61", ["exceeds iterations=60"]),
    ],
)
def test_wrong_values_name_key_value_and_expectation(text: str, fragments: list[str]) -> None:
    message = refusal("tiny-ocr", text)
    assert all(fragment in message for fragment in fragments), message


def test_errors_name_the_file_and_line_where_the_value_was_written(tmp_path: Path) -> None:
    write(tmp_path, "extends: tiny-ocr\nalgorithm:\n  noise_level: 3\n", "base.yaml")
    top = write(tmp_path, "extends: base.yaml\noptimizer:\n  learning_rat: 1\n")
    message = refusal(top)
    assert f"algorithm.noise_level must be a number > 0 and <= 2, got 3 ({tmp_path}/base.yaml, line 3)" in message
    assert f"did you mean optimizer.learning_rate? ({top}, line 3)" in message


def test_missing_keys_say_what_they_are_for(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, "data: {held_out: x}\nrewards: [{name: ocr}]\n"))
    assert "data.prompts is missing" in message
    assert "JSONL or text file" in message


def test_all_errors_are_listed_and_five_are_shown(tmp_path: Path) -> None:
    path = write(tmp_path, "extends: tiny-ocr\nseed: x\nfoo: 1\nalgorithm: {clip_range: 2, bar: 1}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["oops", "iterations=0", "cluster.workers=none"])
    assert len(caught.value.problems) == 7
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("7 problems")
    assert (len(lines), lines[-1]) == (7, "  - and 2 more")


@pytest.mark.parametrize(
    ("name", "fragments"),
    [
        ("tiny-orc", ["no preset or file 'tiny-orc'", "did you mean tiny-ocr?"]),
        ("my.yml", ["no preset or file 'my.yml'", "did you mean my.yaml?"]),
        ("nowhere/my.yaml", ["no directory nowhere"]),
        (".", ["is a directory"]),
        ("", ["empty name", "tiny-ocr"]),
        ("a\0b", ["no preset or file"]),
        ("x" * 5000, ["no preset or file"]),
    ],
)
def test_unknown_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, fragments: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, SMALL)
    message = refusal(name)
    assert all(fragment in message for fragment in fragments), message


@pytest.mark.parametrize(
    ("extends", "fragments"),
    [
        ("tiny-orc", ["did you mean tiny-ocr?", "line 1"]),
        ("[tiny-ocr]", ["extends must be the name of one preset", "line 1"]),
        ("null", ["extends must be", "got null"]),
    ],
)
def test_bad_extends(tmp_path: Path, extends: str, fragments: list[str]) -> None:
    message = refusal(write(tmp_path, f"extends: {extends}\n"))
    assert all(fragment in message for fragment in fragments), message


# Show, warnings


@pytest.mark.parametrize("name", ["tiny-ocr", "tiny-smoke"])
def test_show_loads_back_to_an_equal_config(tmp_path: Path, name: str) -> None:
    config = load_config(name)
    text = show(config)
    again = load_config(write(tmp_path, text))
    assert again == config
    assert show(again) == text
    assert list(config_yaml.parse(text, "shown").value) == list(RunConfig.model_fields)


@given(experiment=st.text(min_size=1), rate=st.floats(min_value=1e-300, max_value=1e300), weight=st.floats(-1e9, 1e9))
@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_show_loads_back_for_any_text_and_number(tmp_path: Path, experiment: str, rate: float, weight: float) -> None:
    config = load_config("tiny-ocr")
    config = config.model_copy(
        update={
            "tracking": config.tracking.model_copy(update={"experiment": experiment}),
            "optimizer": config.optimizer.model_copy(update={"learning_rate": rate}),
            "rewards": (config.rewards[0].model_copy(update={"weight": weight}),),
        }
    )
    path = tmp_path / "my.yaml"
    path.write_bytes(show(config).encode())
    assert load_config(str(path)) == config


def test_a_clip_that_cannot_act_is_a_warning() -> None:
    (warning,) = warnings_of(load_config("tiny-ocr", ["algorithm.updates_per_iteration=1"]))
    assert "clip_range cannot act" in warning


def test_reading_a_configuration_imports_no_torch() -> None:
    code = (
        "import sys; from digenrl.config.load import *; show(load_config('tiny-ocr')); explain('seed'); schema();"
        "assert not {'torch', 'numpy', 'diffusers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

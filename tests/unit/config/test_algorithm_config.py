"""One section for each algorithm: whose keys apply, what is refused, and what an override of the name leaves behind."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest

from digenrl.config import (
    DanceGrpoConfig,
    DiffusionNftConfig,
    FlowDppoConfig,
    FlowGrpoConfig,
    GrpoGuardConfig,
    MixGrpoConfig,
    RunConfig,
)
from digenrl.config.load import ConfigError, load_config, schema, show, warnings_of

SECTIONS = {
    "flow_grpo": FlowGrpoConfig,
    "dance_grpo": DanceGrpoConfig,
    "grpo_guard": GrpoGuardConfig,
    "flow_dppo": FlowDppoConfig,
    "mix_grpo": MixGrpoConfig,
    "diffusion_nft": DiffusionNftConfig,
}
SMALL = "data: {prompts: prompts.txt}\nrewards: [{name: ocr}]\n"


def _refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config("tiny-ocr", overrides)
    return str(caught.value)


@pytest.mark.parametrize("name", SECTIONS)
def test_every_algorithm_is_a_section_that_shows_and_loads_back(tmp_path: Path, name: str) -> None:
    config = load_config("tiny-ocr", [f"algorithm.name={name}"])
    assert type(config.algorithm) is SECTIONS[name]
    path = tmp_path / "my.yaml"
    path.write_text(show(config))
    assert load_config(str(path)) == config
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


def test_without_a_name_it_is_flow_grpo(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(SMALL + "algorithm: {noise_level: 0.5}\n")
    assert load_config(str(path)).algorithm == FlowGrpoConfig(noise_level=0.5)
    path.write_text(SMALL)
    assert load_config(str(path)).algorithm == FlowGrpoConfig()


def test_published_defaults_of_each() -> None:
    dance = DanceGrpoConfig()
    assert (dance.eta, dance.clip_range, dance.std_ddof, dance.std_eps) == (0.3, 1e-4, 1, 1e-8)
    assert GrpoGuardConfig().clip_range == 2e-6
    assert FlowDppoConfig().adv_clip_max is None and FlowDppoConfig().divergence_threshold == 1e-5
    mix = MixGrpoConfig()
    assert (mix.clip_range, mix.std_ddof, mix.std_eps, mix.reward_aggregation) == (1e-4, 1, 1e-8, "advantages")
    nft = DiffusionNftConfig()
    assert (nft.nft_beta, nft.adv_clip_max, nft.kl_beta, nft.std_scope) == (1.0, 5.0, 1e-4, "iteration")
    assert (nft.num_steps, nft.num_trained, nft.updates_per_iteration) == (10, 9, 1)
    assert (mix.window.size, mix.window.iterations, mix.window.stride) == (4, 25, 1)


@pytest.mark.parametrize(("steps", "fraction", "trained"), [(16, 0.6, 9), (6, 0.6, 3), (10, 1.0, 9), (3, 0.1, 1)])
def test_trained_fraction_is_rounded_down(steps: int, fraction: float, trained: int) -> None:
    assert DanceGrpoConfig(num_steps=steps, trained_fraction=fraction).num_trained == trained


@pytest.mark.parametrize(
    ("overrides", "fragments"),
    [
        (["algorithm.name=dance_grp"], ["one of flow_grpo, dance_grpo", "did you mean dance_grpo?"]),
        (["algorithm.name=3"], ["algorithm.name must be one of", "got 3"]),
        (["algorithm.name=null"], ["algorithm.name must be one of", "got null"]),
        (["algorithm.name=[a]"], ["algorithm.name must be one of", 'got ["a"]']),
        (["algorithm=3"], ["algorithm must be a section with keys such as name", "got 3"]),
        (["algorithm.eta=0.3"], ["algorithm.eta is not a key of flow_grpo, only of dance_grpo"]),
        (
            ["algorithm.name=dance_grpo", "algorithm.noise_level=0.3"],
            ["algorithm.noise_level is not a key of dance_grpo, only of flow_grpo, grpo_guard, flow_dppo"],
        ),
        (
            ["algorithm.name=dance_grpo", "algorithm.eat=0.3"],
            ["algorithm.eat is not a key; did you mean algorithm.eta?"],
        ),
        (["algorithm.name=flow_dppo", "algorithm.clip_rang=1"], ["algorithm.clip_rang is not a key"]),
        (["algorithm.name=dance_grpo", "algorithm.eta=9"], ["algorithm.eta must be a number > 0 and <= 2, got 9"]),
        (["algorithm.name=grpo_guard", "algorithm.sampler=cps"], ["one of flow_sde, wan_sde, got 'cps'"]),
        (
            ["algorithm.name=mix_grpo", "algorithm.window.size=9"],
            ["algorithm: window.size=9 does not fit", "num_steps=10", "use at most 8"],
        ),
        (
            ["algorithm.name=mix_grpo", "algorithm.num_steps=2"],
            ["algorithm: window.size=4 does not fit", "use at least num_steps=3"],
        ),
        (
            ["algorithm.name=mix_grpo", "algorithm.window.sise=3"],
            ["algorithm.window.sise is not a key; did you mean algorithm.window.size?"],
        ),
        (
            ["algorithm.name=mix_grpo", "algorithm.window.strategy=slow"],
            ["algorithm.window.strategy must be one of progressive, decay, exp_decay, random, got 'slow'"],
        ),
        (
            ["algorithm.name=diffusion_nft", "algorithm.adv_clip_max=null"],
            ["algorithm.adv_clip_max must be a number > 0, got null"],
        ),
        (
            ["algorithm.name=diffusion_nft", "algorithm.clip_range=1e-3"],
            ["algorithm.clip_range is not a key of diffusion_nft"],
        ),
        (
            ["algorithm.name=diffusion_nft", "algorithm.old_policy_decay=3"],
            ["algorithm.old_policy_decay must be one of 0, 1, 2, got 3"],
        ),
        (
            ["algorithm.name=diffusion_nft", "algorithm.adv_mode=sign"],
            ["algorithm.adv_mode must be one of all, positive_only, negative_only, one_only, binary, got 'sign'"],
        ),
        (["algorithm.window.size=3"], ["algorithm.window is not a key of flow_grpo, only of mix_grpo"]),
        (["algorithm.dance_grpo.eta=1"], ["algorithm.dance_grpo is not a key"]),
        (["algorithm.best_of_n=3"], ["algorithm.best_of_n must be an integer >= 2 and a multiple of 2 or null, got 3"]),
        (["algorithm.best_of_n=32"], ["algorithm: best_of_n=32 exceeds samples_per_prompt=16"]),
        (
            ["algorithm.name=flow_dppo", "algorithm.updates_per_iteration=3"],
            ["algorithm: updates_per_iteration=3 must divide prompts_per_iteration=8"],
        ),
    ],
)
def test_refused_with_path_and_nearest_key_of_that_algorithm(overrides: list[str], fragments: list[str]) -> None:
    message = _refusal(*overrides)
    assert all(fragment in message for fragment in fragments), message


def test_a_key_of_another_algorithm_is_not_offered() -> None:
    """clip_range is near clip_rang, but flow_dppo has none."""
    assert "did you mean algorithm.clip_range" not in _refusal("algorithm.name=flow_dppo", "algorithm.clip_rang=1")


def test_another_algorithm_leaves_behind_what_it_has_no_key_for() -> None:
    """The preset's sampler and window say nothing about DanceGRPO; its sizes do."""
    algorithm = load_config("tiny-ocr", ["algorithm.name=dance_grpo"]).algorithm
    assert isinstance(algorithm, DanceGrpoConfig)
    assert (algorithm.samples_per_prompt, algorithm.num_steps, algorithm.eta) == (16, 10, 0.3)


def test_the_order_of_overrides_does_not_matter_for_the_name() -> None:
    overrides = ["algorithm.eta=0.5", "algorithm.name=dance_grpo"]
    assert load_config("tiny-ocr", overrides) == load_config("tiny-ocr", overrides[::-1])
    with pytest.raises(ConfigError, match="noise_level is not a key of dance_grpo"):
        load_config("tiny-ocr", ["algorithm.noise_level=0.5", "algorithm.name=dance_grpo"])


def test_a_file_may_name_another_algorithm_than_its_base(tmp_path: Path) -> None:
    base, top = tmp_path / "base.yaml", tmp_path / "top.yaml"
    base.write_text("extends: tiny-ocr\nalgorithm: {name: dance_grpo, eta: 0.5}\n")
    top.write_text("extends: base.yaml\nalgorithm: {eta: 0.4}\n")
    assert load_config(str(top)).algorithm.eta == 0.4  # type: ignore[union-attr]
    top.write_text("extends: base.yaml\nalgorithm: {name: flow_grpo, noise_level: 9}\n")
    with pytest.raises(ConfigError, match=r"noise_level must be a number > 0 and <= 2, got 9 \(.*top.yaml, line 2\)"):
        load_config(str(top))


def test_the_schema_follows_the_name() -> None:
    validator = jsonschema.Draft202012Validator(schema())

    def valid(**algorithm: object) -> bool:
        return validator.is_valid({"extends": "tiny-ocr", "algorithm": algorithm})

    assert valid(name="dance_grpo", eta=0.3) and valid(eta=0.3) and valid(noise_level=0.3) and valid(num_steps=12)
    assert not valid(name="flow_grpo", eta=0.3) and not valid(name="other") and not valid(eta=9)


def test_one_key_of_a_window_leaves_the_others() -> None:
    section = load_config("tiny-ocr", ["algorithm.name=mix_grpo", "algorithm.window.size=2"]).algorithm
    assert isinstance(section, MixGrpoConfig)
    assert (section.window.size, section.window.iterations) == (2, 25)


def test_without_a_trust_region_there_is_nothing_to_warn_of() -> None:
    assert not warnings_of(load_config("tiny-ocr", ["algorithm.name=diffusion_nft"]))
    assert not warnings_of(
        load_config("tiny-ocr", ["algorithm.name=diffusion_nft", "algorithm.updates_per_iteration=1"])
    )


def test_an_average_that_never_moves_is_a_warning() -> None:
    (warning,) = warnings_of(load_config("tiny-smoke", ["optimizer.ema_decay=0.9"]))
    assert warning.endswith("the average moves at every optimizer.ema_every=8 steps, and the run has 4")
    assert not warnings_of(load_config("tiny-smoke", ["optimizer.ema_decay=0.9", "optimizer.ema_every=4"]))


@pytest.mark.parametrize(("name", "key"), [("dance_grpo", "clip_range"), ("flow_dppo", "divergence_threshold")])
def test_what_bounds_a_step_cannot_act_in_a_single_update(name: str, key: str) -> None:
    (warning,) = warnings_of(load_config("tiny-ocr", [f"algorithm.name={name}", "algorithm.updates_per_iteration=1"]))
    assert f"{key} cannot act" in warning

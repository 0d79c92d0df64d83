"""The presets: each loads, is a run, and has the numbers its source published; the table in the docs is theirs."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import pytest

from digenrl import runspec
from digenrl.config.errors import ConfigError
from digenrl.config.layers import base_names
from digenrl.config.load import load_config, show, warnings_of
from digenrl.config.presets import presets
from digenrl.models.published import published
from digenrl.preflight import check_prompts
from digenrl.prompts import load_prompts
from flows.commands.presets import markdown_table

ALL = {preset.name: preset for preset in presets()}
PUBLISHED = {name: preset for name, preset in ALL.items() if preset.is_published}
each = pytest.mark.parametrize("name", PUBLISHED)
DOCS = Path(__file__).parents[3] / "docs" / "presets.md"


class Row(NamedTuple):
    """What a source publishes; None: it does not, or the preset says that it deviates."""

    source: str
    learning_rate: float | None
    group: int
    groups: int | None
    steps: int
    eval_steps: int | None
    trained: int
    clip: float | None
    kl: float
    lora: tuple[int, int] | None
    noise: float | None
    guidance: float | None
    size: tuple[int, ...] | None


TABLE = {
    "sd35-medium-flow_grpo": Row(
        "flow_grpo config/grpo.py", 3e-4, 24, 48, 10, 40, 9, 1e-4, 0.04, (32, 64), 0.7, 4.5, (512, 512, 1)
    ),
    "sd35-medium-flow_grpo-pickscore": Row(
        "flow_grpo config/grpo.py", 3e-4, 24, 48, 10, 40, 9, 1e-4, 0.01, (32, 64), 0.7, 4.5, (512, 512, 1)
    ),
    "sd35-medium-flow_grpo_fast": Row(
        "flow_grpo config/grpo.py", 3e-4, 24, 48, 10, 40, 3, 1e-5, 0, (32, 64), 0.8, 1.0, (512, 512, 1)
    ),
    "sd35-medium-flow_grpo_cps": Row(
        "Flow-Factory examples/grpo/lora/sd3_5/nocfg.yaml",
        *(3e-4, 18, 64, 10, 40, 3, 1e-4, 0, (32, 64), 0.8, 1.0, (512, 512, 1)),
    ),
    "sd35-medium-diffusion_nft": Row(
        "DiffusionNFT config/nft.py", 3e-4, 24, 48, 10, 40, 9, None, 1e-4, (32, 64), None, 1.0, (512, 512, 1)
    ),
    "flux1-dev-flow_grpo": Row(
        "flow_grpo config/grpo.py", 3e-4, 24, 48, 6, 28, 5, 1e-4, 0, (64, 128), 0.9, 3.5, (512, 512, 1)
    ),
    "flux1-dev-flow_grpo_fast": Row(
        "Flow-Factory examples/grpo/lora/flux1/default.yaml",
        *(3e-4, 16, 48, 10, 20, 1, 1e-4, 0, (64, 128), 0.7, 3.5, (512, 512, 1)),
    ),
    "flux1-dev-dance_grpo": Row(
        "finetune_flux_grpo_8gpus_lora.sh", 3e-4, 12, 16, 12, None, 6, 1e-4, 0, (128, 256), 0.3, 3.5, (720, 720, 1)
    ),
    "flux1-dev-mix_grpo": Row(
        "finetune_flux_grpo_MixGRPO.sh", None, 12, 32, 25, None, 4, 1e-4, 0, None, 0.7, 3.5, (720, 720, 1)
    ),
    "flux1-dev-diffusion_nft": Row(
        "Flow-Factory examples/nft/lora/flux1/default.yaml",
        *(3e-4, 16, 48, 8, 28, 2, None, 0, (64, 128), None, 3.5, (384, 384, 1)),
    ),
    "qwen-image-flow_grpo_fast": Row(
        "run_qwen_image_ocr_lora.sh", 3e-4, 16, 32, 10, 50, 2, 1e-5, 0, (64, 128), 1.2, 4.0, (512, 512, 1)
    ),
    "qwen-image-grpo_guard": Row(
        "grpoguard_trainer", 3e-4, 16, 32, 10, 50, 2, 2e-6, 0, (64, 128), 1.2, 4.0, (512, 512, 1)
    ),
    "qwen-image-mix_grpo": Row(
        "mixgrpo_trainer", 3e-4, 16, 32, 10, 50, 2, None, 0, (64, 128), 1.2, None, (512, 512, 1)
    ),
    "qwen-image-diffusion_nft": Row(
        "diffusionnft_trainer", 3e-4, 16, 24, 10, 40, 9, None, 1e-4, (64, 128), None, None, (512, 512, 1)
    ),
    "wan2.1-1.3b-flow_grpo": Row(
        "flow_grpo config/grpo.py", 1e-4, 4, None, 20, 50, 19, 1e-3, 0.004, (32, 64), None, 4.5, (240, 416, 33)
    ),
    "wan2.1-14b-flow_grpo_fast": Row(
        "Flow-Factory examples/grpo/lora/wan21/t2v.yaml",
        *(1e-4, 16, 48, 10, None, 1, 1e-4, 0, (64, 128), 0.9, 5.0, (256, 256, 5)),
    ),
    "wan2.1-14b-dance_grpo": Row(
        "UniRL examples/diffusion/wan21_t2v_dancegrpo.yaml",
        *(3e-4, 16, 48, 14, None, 7, 1e-4, 0, (64, 128), 0.7, 1.0, (720, 1280, 5)),
    ),
    "hunyuanvideo-flow_grpo_fast": Row(
        "UniRL examples/diffusion/hunyuan_video_t2v_trainside.yaml",
        *(3e-4, 16, 48, 20, None, 8, 1e-4, 0, (64, 64), 0.7, 1.0, (480, 832, 5)),
    ),
    "hunyuanvideo-dance_grpo": Row(
        "finetune_hunyuan_grpo.sh", 1e-5, 24, None, 16, None, 9, 1e-4, 0, None, 0.25, 6.018, (480, 480, 53)
    ),
}


def test_every_published_preset_has_a_row() -> None:
    assert set(TABLE) == set(PUBLISHED)


@each
def test_a_preset_has_the_numbers_of_its_source(name: str) -> None:
    row, preset = TABLE[name], PUBLISHED[name]
    config, algorithm = preset.config, preset.config.algorithm
    assert row.source in preset.source
    found = Row(
        source=row.source,
        learning_rate=config.optimizer.learning_rate,
        group=algorithm.samples_per_prompt,
        groups=algorithm.prompts_per_iteration,
        steps=algorithm.num_steps,
        eval_steps=config.evaluation.num_steps,
        trained=runspec.trained_step_count(config),
        clip=getattr(algorithm, "clip_range", None),
        kl=algorithm.kl_beta,
        lora=(config.lora.rank, config.lora.alpha),
        noise=getattr(algorithm, "noise_level", getattr(algorithm, "eta", None)),
        guidance=config.model.guidance_scale,
        size=(config.model.height, config.model.width, config.model.frames),
    )
    differing = {
        key: (value, getattr(row, key)) for key, value in found._asdict().items() if getattr(row, key) != value
    }
    assert {key for key, (_, wanted) in differing.items() if wanted is not None} == set()


@each
def test_what_the_field_has_in_common(name: str) -> None:
    config = PUBLISHED[name].config
    optimizer = config.optimizer
    assert (optimizer.betas, optimizer.weight_decay, optimizer.max_grad_norm) == ((0.9, 0.999), 1e-4, 1.0)
    assert config.algorithm.adv_clip_max == 5
    assert (config.model.dtype, config.model.gradient_checkpointing, config.cluster.device) == (
        "bfloat16",
        True,
        "cuda",
    )


@each
def test_a_preset_is_a_run(name: str) -> None:
    config = PUBLISHED[name].config
    assert warnings_of(config) == []
    assert load_config(name) == config
    shape = runspec.shape(config, len(load_prompts(config.data.held_out)))
    trained = shape.trained_steps(0)
    assert len(trained) == runspec.trained_step_count(config) and max(trained) < config.algorithm.num_steps
    assert runspec.scheduler_of(config, shape).waiting_for()


def test_prompts_have_what_rewards_need() -> None:
    distinct = {(p.config.data, p.config.rewards): p.config for p in PUBLISHED.values()}
    assert [check_prompts(config) for config in distinct.values()] == [[]] * len(distinct)


def test_show_gives_back_an_equal_configuration(tmp_path: Path) -> None:
    for name, preset in PUBLISHED.items():
        (tmp_path / f"{name}.yaml").write_text(show(preset.config))
        assert load_config(str(tmp_path / f"{name}.yaml")) == preset.config


@each
def test_a_preset_says_what_it_is(name: str) -> None:
    """Its name says model, algorithm and perhaps reward; its file one sentence, the source, what deviates."""
    preset = PUBLISHED[name]
    assert 20 < len(preset.title) < 100
    text = (files("digenrl.data") / "presets" / f"{name}.yaml").read_text()
    assert re.search(r"^# Deviations: \S", text, re.MULTILINE)
    model = next(base for base in map(Path, base_names()) if name.startswith(f"{base.name}-"))
    algorithm, *reward = name.removeprefix(f"{model.name}-").split("-")
    assert f"extends: {model}\n" in text or f"extends: {model.name}-" in text
    assert algorithm.startswith(preset.config.algorithm.name)
    assert [term.name for term in preset.config.rewards] == (reward or ["ocr"])


def test_paths_are_those_of_the_checkpoints_whose_constants_are_known() -> None:
    for preset in PUBLISHED.values():
        repository = published(preset.config.model.family).repository
        assert preset.config.model.path in (repository, repository.replace("1.3B", "14B"))


def test_windows_lie_where_the_sources_put_them() -> None:
    ranges = {name: getattr(p.config.algorithm, "sde_window_range", None) for name, p in PUBLISHED.items()}
    assert {name: found for name, found in ranges.items() if found} == {
        "sd35-medium-flow_grpo_fast": (0, 5),
        "sd35-medium-flow_grpo_cps": (0, 5),
        "flux1-dev-flow_grpo_fast": (1, 4),
        "qwen-image-flow_grpo_fast": (0, 5),
        "qwen-image-grpo_guard": (0, 5),
        "wan2.1-14b-flow_grpo_fast": (1, 4),
        "hunyuanvideo-flow_grpo_fast": (0, 10),
    }
    window = PUBLISHED["flux1-dev-mix_grpo"].config.algorithm.window
    assert (window.size, window.strategy, window.iterations, window.stride) == (4, "progressive", 25, 1)
    dance = PUBLISHED["hunyuanvideo-dance_grpo"].config.algorithm
    assert (dance.best_of_n, dance.sigma_shift, dance.trained_fraction) == (8, 5.0, 0.6)


def test_a_file_of_ones_own_extends_a_base(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: bases/flux1-dev\nalgorithm: {name: grpo_guard}\n")
    config = load_config(str(path))
    assert (config.model.path, config.algorithm.name) == ("black-forest-labs/FLUX.1-dev", "grpo_guard")


def test_bases_are_no_presets_and_all_are_used() -> None:
    assert not set(base_names()) & set(ALL)
    texts = [path.read_text() for path in (files("digenrl.data") / "presets").iterdir() if path.name.endswith(".yaml")]
    texts += [path.read_text() for path in (files("digenrl.data") / "presets" / "bases").iterdir()]
    assert {name for name in base_names() if any(f"extends: {name}\n" in text for text in texts)} == set(base_names())


def test_a_misspelt_preset_or_base_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean flux1-dev-flow_grpo"):
        load_config("flux-dev-flow_grpo")
    (tmp_path / "mine.yaml").write_text("extends: bases/flux-dev\n")
    with pytest.raises(ConfigError, match=r"no base 'bases/flux-dev'; did you mean bases/flux1-dev\? .*line 1"):
        load_config(str(tmp_path / "mine.yaml"))


def test_the_docs_have_the_table_of_the_files() -> None:
    """`digenrl presets --markdown` prints it."""
    assert f"\n{markdown_table(presets())}\n" in DOCS.read_text()

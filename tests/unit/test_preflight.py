"""Everything that needs files but no server is checked before a run starts, and all of it is listed."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from digenrl.config.load import ConfigError, load_config
from digenrl.preflight import check
from http_servers import Quiet, serving

LAYERS = ("transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.to_k", "transformer_blocks.0.ff.net.2")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with prompts and the files of a pipeline that preflight reads; no hub cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    prompts(tmp_path / "train.jsonl", range(20))
    prompts(tmp_path / "held_out.jsonl", range(20, 30))
    pipeline(tmp_path / "model")
    return tmp_path


class Hub(Quiet):
    """Answers as the hub does (https://huggingface.co/docs/huggingface_hub/package_reference/utilities)."""

    def do_HEAD(self) -> None:
        """One model is there, one is gated, and one is open to whoever is logged in."""
        owner, _, rest = self.path.strip("/").partition("/")
        allowed = owner == "stabilityai" or (
            owner == "private" and self.headers.get("Authorization") == "Bearer secret"
        )
        self.send_response(200 if allowed and rest.endswith("/resolve/main/model_index.json") else 401)
        if not allowed:
            self.send_header("X-Error-Code", {"gated": "GatedRepo"}.get(owner, "RepoNotFound"))
        self.end_headers()


@pytest.fixture(scope="module")
def hub_address() -> Iterator[str]:
    with serving(Hub) as address:
        yield address


@pytest.fixture
def hub(hub_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub of this test."""
    monkeypatch.setenv("HF_ENDPOINT", hub_address)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def prompts(path: Path, numbers: Sequence[int], target: str = "target") -> None:
    lines = [json.dumps({"id": f"n{n}", "text": str(n), target: str(n)}) for n in numbers]
    path.write_text("\n".join(lines) + "\n")


def pipeline(folder: Path) -> None:
    """VAE factor 2, patches of 2, 6 x 6 positions: multiples of 4 pixels, at most 24."""
    for part in ("vae", "transformer"):
        (folder / part).mkdir(parents=True)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusion3Pipeline"}))
    (folder / "vae" / "config.json").write_text(json.dumps({"block_out_channels": [16, 32]}))
    transformer = {"in_channels": 4, "patch_size": 2, "pos_embed_max_size": 6}
    (folder / "transformer" / "config.json").write_text(json.dumps(transformer))
    weights = {f"{layer}.weight": np.zeros((4, 4), np.float32) for layer in LAYERS}
    weights |= {"pos_embed.proj.weight": np.zeros((4, 4, 2, 2), np.float32), "norm.weight": np.zeros(4, np.float32)}
    save_file(weights, folder / "transformer" / "diffusion_pytorch_model.safetensors")


def notes_of(*overrides: str, home: Path | None = None) -> list[str]:
    ours = ["data.prompts=train.jsonl", "data.held_out=held_out.jsonl", "model.path=./model", "lora.targets=[to_q]"]
    return check(load_config("tiny-ocr", [*ours, "evaluation.prompts=10", *overrides]), home)


def refusal(*overrides: str, home: Path | None = None) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        notes_of(*overrides, home=home)
    return caught.value.problems


def test_what_is_right_passes_without_a_word(files: Path) -> None:
    assert notes_of(home=files / "runs") == []
    assert not (files / "runs").exists()


@pytest.mark.parametrize("name", ["tiny-ocr", "tiny-smoke"])
def test_the_shipped_presets_pass(name: str, tmp_path: Path) -> None:
    assert check(load_config(name), tmp_path) == []


@pytest.mark.parametrize(
    ("override", "fragments"),
    [
        ("data.prompts=trian.jsonl", ["data.prompts", "trian.jsonl", "did you mean train.jsonl"]),
        ("data.prompts=package:numbers-trian", ["data.prompts", "package:numbers-trian"]),
        ("data.held_out=nowhere.jsonl", ["data.held_out", "nowhere.jsonl"]),
        ("data.held_out=train.jsonl", ["data.held_out=train.jsonl must share no id", "20 are in both", "'n0'"]),
        ("rewards.0.name=orc", ["'orc' is not a registered reward", "did you mean ocr?"]),
        ("rewards.0.name=clip_score", ["rewards.0: clip_score needs path", "a directory, a file or a hub id"]),
        ("rewards.0.path=./model", ["rewards.0: ocr has no use for path", "settings it takes: field, match"]),
        ("rewards=[{name: clip_score, path: ./modle}]", ["rewards.0: reward clip_score: path='./modle'"]),
        ("rewards=[{name: http, url: 'http://127.0.0.1:9'}]", ["nobody answers at url=http://127.0.0.1:9"]),
        ("rewards.0.name=python:no_such_module:f", ["rewards.0: 'python:no_such_module:f'", "PYTHONPATH"]),
        ("model.path=./modle", ["model.path", "modle"]),
        ("model.path=package:tiny-sd4", ["model.path", "package:tiny-sd4"]),
        ("model.path=./hub", ["model.path", "hub"]),
        ("model.path='a b/c'", ["model.path='a b/c'", "OWNER/NAME"]),
        (
            "model.height=13",
            ["model.height must be a multiple of 4", "VAE factor 2 x patch 2", "got 13", "nearest is 12"],
        ),
        ("model.width=1", ["model.width must be a multiple of 4", "got 1", "nearest is 4"]),
        ("model.frames=5", ["model.frames must be 1", "pictures", "got 5"]),
        ("model.width=28", ["model.width must be at most 24", "got 28"]),
        ("lora.targets=[to_q, to_qq]", ["lora.targets: 'to_qq' is the name of no layer", "did you mean to_q?"]),
        ("lora.targets=[net.22]", ["lora.targets: 'net.22'", "did you mean net.2?"]),
        ("lora.targets=[proj]", ["lora.targets: 'proj'"]),
        ("lora.targets=[]", ["lora.targets must name at least one layer"]),
        (
            "cluster.address=locla",
            ["cluster.address must be local, tcp://HOST:PORT", "got 'locla'", "did you mean local?"],
        ),
        ("cluster.address=tcp://host", ["cluster.address", "got 'tcp://host'"]),
        ("cluster.address=tcp://host:99999", ["port from 1 to 65535"]),
        ("cluster.address=http://host:8786", ["cluster.address", "tls://HOST:PORT"]),
        ("tracking.uri=mangaed", ["tracking.uri", "got 'mangaed'", "did you mean managed?"]),
    ],
)
def test_what_is_wrong_is_named(files: Path, override: str, fragments: list[str]) -> None:
    (problem,) = refusal(override)
    assert all(fragment in problem for fragment in fragments), problem


def test_what_only_workers_elsewhere_may_reach_is_a_note(files: Path) -> None:
    (note,) = notes_of("rewards=[{name: http, url: 'http://127.0.0.1:9'}]", "cluster.address=tcp://127.0.0.1:8786")
    assert "rewards.0: reward http: nobody answers at url=http://127.0.0.1:9" in note


@pytest.mark.parametrize("address", ["local", "tcp://127.0.0.1:8786", "tls://gpu-7.example.org:1", "tcp://[::1]:8786"])
def test_possible_addresses(files: Path, address: str) -> None:
    assert notes_of(f"cluster.address={address}") == []


def test_prompts_without_what_the_reward_needs_are_refused(files: Path) -> None:
    prompts(files / "held_out.jsonl", range(20, 30), target="answer")
    (problem,) = refusal("guard.gold=[]")
    assert problem.startswith("data.held_out: held_out.jsonl, line 1: reward ocr: prompt 'n20' has no field 'target'")
    assert "n20" in problem and "target" in problem


def test_everything_wrong_is_listed_at_once(files: Path) -> None:
    (files / "file").write_text("")
    problems = refusal(
        "data.prompts=none.jsonl",
        "rewards.0.name=orc",
        "model.height=13",
        "cluster.address=x",
        home=files / "file" / "runs",
    )
    assert [problem.split(maxsplit=1)[0] for problem in problems] == [
        "data.prompts:",
        "rewards.0:",
        "model.height",
        "cluster.address",
        f"DIGENRL_HOME={files}/file/runs",
    ]


def test_a_home_that_is_a_file_is_refused(files: Path) -> None:
    (files / "runs").write_text("")
    (problem,) = refusal(home=files / "runs")
    assert "must be a directory" in problem


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("override", "fragment"),
    [
        ("evaluation.prompts=200", "exceeds the 10 held-out prompts: all of them are used"),
        ("algorithm.prompts_per_iteration=24", "exceeds the 20 prompts"),
        ("data.held_out=null", "data.held_out is not set"),
        (
            "data.prompts=[{path: train.jsonl, rewards: [ocr]}]",
            "no training prompt names 'jpeg_compressibility': nothing is trained on it",
        ),
        ("model.path=stabilityai/stable-diffusion-3.5-medium", "will be downloaded"),
    ],
)
def test_what_may_not_be_meant_is_a_note(files: Path, override: str, fragment: str) -> None:
    rewards = "rewards=[{name: ocr, normalise: std}, {name: jpeg_compressibility, normalise: rank}]"
    (note,) = notes_of(rewards, override)
    assert fragment in note


def test_a_cached_hub_model_is_looked_into(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (files / "hub" / "models--org--tiny" / "snapshots").mkdir(parents=True)
    pipeline(files / "hub" / "models--org--tiny" / "snapshots" / "0a1b")
    assert notes_of("model.path=org/tiny") == []
    assert "multiple of 4" in refusal("model.path=org/tiny", "model.height=13")[0]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE" in refusal("model.path=org/other")[0]


@pytest.mark.usefixtures("hub")
def test_the_hub_is_asked_for_what_is_not_here(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (missing,) = refusal("model.path=models/sd35")
    for part in ("model.path=models/sd35 is no directory here", "no such model", "`hf auth login`"):
        assert part in missing
    (gated,) = refusal("model.path=gated/sd35")
    assert "is gated: accept its conditions at " in gated
    assert "/gated/sd35 and log in with `hf auth login`" in gated
    assert len(refusal("model.path=private/sd35")) == 1
    (files / "hf").mkdir()
    (files / "hf" / "token").write_text("secret\n")
    assert "will be downloaded" in notes_of("model.path=private/sd35")[0]
    elsewhere = notes_of("model.path=models/sd35", "cluster.address=tcp://10.0.0.1:8786")
    assert "no such model" in elsewhere[0], "other machines may have it in their cache"


def test_a_hub_that_cannot_be_reached_is_one_sentence(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as bound:  # nobody listens there
        bound.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{bound.getsockname()[1]}")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        (problem,) = refusal("model.path=org/tiny")
    assert "not in the local hub cache" in problem and "cannot be reached" in problem
    assert len(problem) < 400


@pytest.mark.parametrize(
    ("name", "content", "fragment"),
    [
        ("model_index.json", None, "model_index.json is missing"),
        ("vae/config.json", b"{", "is not JSON"),
        ("transformer/config.json", b"[]", "must hold a JSON object"),
        ("transformer/diffusion_pytorch_model.safetensors", None, "holds no safetensors file"),
        ("transformer/diffusion_pytorch_model.safetensors", b"\xff" * 16, "is not a safetensors file"),
        ("transformer/diffusion_pytorch_model.safetensors", b"", "cannot read the layers"),
    ],
)
def test_a_broken_pipeline_is_refused(files: Path, name: str, content: bytes | None, fragment: str) -> None:
    path = files / "model" / name
    path.unlink() if content is None else path.write_bytes(content)
    (problem,) = refusal()
    assert "model.path=./model" in problem
    assert fragment in problem


def test_cuda_is_looked_for_only_where_it_is_used(files: Path) -> None:
    import torch

    if not torch.cuda.is_available():
        assert "cluster.device" in refusal("cluster.device=cuda")[0]
    assert notes_of("cluster.device=cuda", "cluster.address=tcp://host:8786") == []


def test_a_local_cluster_must_fit_into_memory(files: Path) -> None:
    assert "cluster.workers must be at most" in refusal("cluster.workers=100000")[0]
    assert notes_of("cluster.workers=100000", "cluster.address=tcp://host:8786") == []


def test_it_is_fast_and_imports_no_torch(files: Path) -> None:
    code = (
        "import sys; from digenrl.preflight import check; from digenrl.config.load import load_config;"
        "c = load_config('tiny-ocr', ['data.prompts=train.jsonl', 'data.held_out=held_out.jsonl',"
        " 'model.path=./model', 'lora.targets=[to_q]']); check(c);"
        "assert not {'torch', 'diffusers', 'transformers'} & set(sys.modules)"
    )
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    # About 0.5 s; the limit leaves room for a busy machine but not for torch on one.
    assert time.monotonic() - started < 10


def test_a_pipeline_of_another_family_is_named(files: Path) -> None:
    (files / "model" / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    (found,) = refusal()
    assert found == "model.family=sd3 needs a StableDiffusion3Pipeline, but model.path=./model holds a FluxPipeline"


def test_a_pipeline_whose_sizes_cannot_be_read(files: Path) -> None:
    (files / "model" / "transformer" / "config.json").write_text(json.dumps({"patch_size": 2}))
    assert "holds no sd3 checkpoint" in refusal()[0]

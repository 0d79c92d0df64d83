"""What people type by mistake, and what the refusal must say. Data only.

Every row is a command line that must end with exit code 2 and one message, before a server or worker is started. The
message must contain every fragment: the field, the value, what was expected, or the nearest valid name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class BadInput(NamedTuple):
    """One mistake.

    Attributes:
        name: short, unique.
        argv: arguments of `digenrl`, run in an empty directory.
        fragments: parts of the message.
        files: files to create in that directory first.
    """

    name: str
    argv: tuple[str, ...]
    fragments: tuple[str, ...]
    files: Mapping[str, bytes] = {}


GOOD_PROMPT = b'{"id": "a", "text": "042", "target": "042"}\n'

HALF_A_PAIR = b'{"id": "a", "text": "\\ud800", "target": "042"}\n'

BAD_INPUTS: tuple[BadInput, ...] = (
    # Which configuration
    BadInput("misspelt preset", ("train", "tiny-orc"), ("'tiny-orc'", "did you mean tiny-ocr?")),
    BadInput("missing file", ("train", "my.yaml"), ("no preset or file 'my.yaml'", "tiny-ocr")),
    BadInput("near file", ("train", "mine.yml"), ("did you mean mine.yaml?",), {"mine.yaml": b"extends: tiny-smoke\n"}),
    BadInput("directory", ("train", "."), ("is a directory",)),
    BadInput("device", ("config", "show", "/dev/zero"), ("/dev/zero is a device or pipe",)),
    BadInput("large file", ("train", "c.yaml"), ("c.yaml has 1,000,001 bytes",), {"c.yaml": b"#" * 1_000_001}),
    # The file
    BadInput("empty file", ("train", "c.yaml"), ("c.yaml is empty", "extends"), {"c.yaml": b""}),
    BadInput("a list", ("train", "c.yaml"), ("c.yaml must hold sections and keys",), {"c.yaml": b"- seed\n"}),
    BadInput("not YAML", ("train", "c.yaml"), ("c.yaml, line 1", "not valid YAML"), {"c.yaml": b"seed: [1\n"}),
    BadInput("tab", ("train", "c.yaml"), ("c.yaml, line 2", "tab"), {"c.yaml": b"model:\n\theight: 12\n"}),
    BadInput("not UTF-8", ("train", "c.yaml"), ("c.yaml, line 1", "UTF-8"), {"c.yaml": b"seed: \xff\n"}),
    BadInput(
        "key given twice",
        ("train", "c.yaml"),
        ("c.yaml, line 3", "seed is given twice", "line 2"),
        {"c.yaml": b"extends: tiny-smoke\nseed: 1\nseed: 2\n"},
    ),
    BadInput("python tag", ("train", "c.yaml"), ("no tags",), {"c.yaml": b"seed: !!python/object:os.system x\n"}),
    BadInput(
        "unknown base",
        ("train", "c.yaml"),
        ("'tiny-smok'", "did you mean tiny-smoke?", "c.yaml, line 1"),
        {"c.yaml": b"extends: tiny-smok\n"},
    ),
    BadInput(
        "circle of bases",
        ("train", "a.yaml"),
        ("circle", "a.yaml -> b.yaml -> a.yaml"),
        {"a.yaml": b"extends: b.yaml\n", "b.yaml": b"extends: a.yaml\n"},
    ),
    # Keys and values
    BadInput(
        "unknown key in a file",
        ("train", "c.yaml"),
        ("algorithm.clip_rang is not a key", "did you mean algorithm.clip_range?", "c.yaml, line 3"),
        {"c.yaml": b"extends: tiny-smoke\nalgorithm:\n  clip_rang: 1e-3\n"},
    ),
    BadInput("unknown section", ("train", "tiny-smoke", "optimiser.eps=1"), ("optimiser", "did you mean optimizer?")),
    BadInput("key without section", ("train", "tiny-smoke", "clip_range=1"), ("did you mean algorithm.clip_range?",)),
    BadInput("customary short name", ("train", "tiny-smoke", "lr=1"), ("did you mean optimizer.learning_rate?",)),
    BadInput("no equals sign", ("train", "tiny-smoke", "seed"), ("override 'seed' has no '='", "section.key=value")),
    BadInput("no value", ("train", "tiny-smoke", "seed="), ("override 'seed=' has no value",)),
    BadInput("key below a value", ("train", "tiny-smoke", "seed.x=1"), ("seed is a value",)),
    BadInput("wrong type", ("train", "tiny-smoke", "iterations=many"), ("iterations", "an integer >= 1", "'many'")),
    BadInput("quoted number", ("train", "tiny-smoke", "seed='3'"), ("seed", "'3'", "without quotes")),
    BadInput("out of bounds", ("train", "tiny-smoke", "algorithm.clip_range=2"), ("a number > 0 and < 1", "got 2")),
    BadInput(
        "half a surrogate pair", ("config", "show", "tiny-smoke", 'data.prompts="\\ud800"'), ("U+D800", "Unicode")
    ),
    BadInput(
        "key that is no Unicode",
        ("train", "c.yaml"),
        ("c.yaml, line 1", "U+D800"),
        {"c.yaml": b'"\\ud800": 1\n'},
    ),
    BadInput(
        "infinite weight",
        ("train", "tiny-smoke", "rewards.0.weight=.inf"),
        ("digenrl: rewards.0.weight must be a number, got Infinity",),
    ),
    BadInput("beta of one", ("train", "tiny-smoke", "optimizer.betas=[0.9, 1]"), ("optimizer.betas.1", "< 1", "got 1")),
    BadInput("too many iterations", ("train", "tiny-smoke", "iterations=1000001"), ("iterations", "<= 1000000")),
    BadInput("huge rank", ("train", "tiny-smoke", "lora.rank=1025"), ("lora.rank", "<= 1024", "got 1025")),
    BadInput("huge picture", ("train", "tiny-smoke", "model.width=8196"), ("model.width", "<= 8192", "got 8196")),
    BadInput("too many steps", ("train", "tiny-smoke", "algorithm.num_steps=1001"), ("num_steps", "<= 1000")),
    BadInput("endless patience", ("train", "tiny-smoke", "cluster.worker_ttl_s=1e9"), ("worker_ttl_s", "<= 86400")),
    BadInput("no tracking uri", ("train", "tiny-smoke", "tracking.uri=''"), ("tracking.uri", "not empty", "got ''")),
    BadInput("not finite", ("train", "tiny-smoke", "optimizer.learning_rate=.inf"), ("optimizer.learning_rate",)),
    BadInput(
        "wrong choice",
        ("train", "tiny-smoke", "algorithm.sampler=flow-sde"),
        ("one of flow_sde, cps", "got 'flow-sde'", "did you mean flow_sde?"),
    ),
    BadInput(
        "misspelt algorithm",
        ("train", "tiny-smoke", "algorithm.name=dance-grpo"),
        ("algorithm.name must be one of flow_grpo, dance_grpo", "did you mean dance_grpo?"),
    ),
    BadInput(
        "key of another algorithm",
        ("train", "tiny-smoke", "algorithm.name=dance_grpo", "algorithm.sampler=cps"),
        ("algorithm.sampler is not a key of dance_grpo, only of flow_grpo, grpo_guard, flow_dppo",),
    ),
    BadInput("yes for true", ("train", "tiny-smoke", "model.gradient_checkpointing=yes"), ("true or false", "'yes'")),
    BadInput("section set to null", ("train", "tiny-smoke", "model=null"), ("model must be a section", "null")),
    BadInput(
        "list too short", ("train", "tiny-smoke", "algorithm.sde_window_range=[1]"), ("list of 2 integers", "[1]")
    ),
    BadInput("no reward", ("train", "tiny-smoke", "rewards=[]"), ("rewards", "at least one")),
    # Values that do not go together
    BadInput(
        "updates do not divide groups",
        ("train", "tiny-smoke", "algorithm.updates_per_iteration=3"),
        ("updates_per_iteration=3", "must divide", "prompts_per_iteration=4"),
    ),
    BadInput(
        "micro-batch does not divide the group",
        ("train", "tiny-smoke", "schedule.micro_batch=3"),
        ("schedule.micro_batch=3", "algorithm.samples_per_prompt=4"),
    ),
    BadInput("group of one", ("train", "tiny-smoke", "algorithm.samples_per_prompt=1"), ("an integer >= 2", "got 1")),
    BadInput(
        "only trainers", ("train", "tiny-smoke", "cluster.trainers=2"), ("cluster.trainers=2", "no rollout worker")
    ),
    BadInput(
        "window too wide", ("train", "tiny-smoke", "algorithm.sde_window_size=6"), ("sde_window_size=6", "[0, 5]")
    ),
    BadInput(
        "two mistakes",
        ("train", "tiny-smoke", "seed=x", "iterations=0"),
        ("2 problems", "seed must be an integer", "iterations must be an integer"),
    ),
    # Prompts, rewards, model, cluster
    BadInput("misspelt prompt set", ("train", "tiny-smoke", "data.prompts=package:numbers-trian"), ("numbers-train",)),
    BadInput("missing prompts", ("train", "tiny-smoke", "data.prompts=p.jsonl"), ("data.prompts", "p.jsonl")),
    BadInput(
        "malformed prompts",
        ("train", "tiny-smoke", "data.prompts=p.jsonl"),
        ("data.prompts", "p.jsonl, line 2", "not JSON"),
        {"p.jsonl": GOOD_PROMPT + b"{oops\n"},
    ),
    BadInput("no prompts", ("train", "tiny-smoke", "data.prompts=''"), ("data.prompts", "not empty", "got ''")),
    BadInput("blank prompts", ("train", "tiny-smoke", "data.prompts=' '"), ("data.prompts", ".jsonl", "got ' '")),
    BadInput(
        "prompts nested without end",
        ("train", "tiny-smoke", "data.prompts=p.jsonl"),
        ("data.prompts", "p.jsonl, line 2", "nested too deeply"),
        {"p.jsonl": GOOD_PROMPT + b"[" * 100_000},
    ),
    BadInput(
        "prompt that is no Unicode",
        ("train", "tiny-smoke", "data.prompts=p.jsonl"),
        ("data.prompts", "p.jsonl, line 2", "'text'", "U+D800"),
        {"p.jsonl": GOOD_PROMPT + HALF_A_PAIR.replace(b'"a"', b'"b"')},
    ),
    BadInput(
        "prompts without target",
        ("train", "tiny-smoke", "data.prompts=p.jsonl"),
        ("data.prompts", "ocr", "target"),
        {"p.jsonl": b'{"id": "a", "text": "042"}\n'},
    ),
    BadInput(
        "evaluated on training prompts",
        ("train", "tiny-smoke", "data.prompts=p.jsonl", "data.held_out=p.jsonl"),
        ("data.held_out=p.jsonl must share no id", "'a'"),
        {"p.jsonl": GOOD_PROMPT},
    ),
    BadInput(
        "prompt for a reward that the run does not have",
        ("train", "tiny-smoke", "data.prompts=p.jsonl"),
        ("data.prompts: p.jsonl, line 2", "the reward 'orc'", "did you mean ocr?"),
        {"p.jsonl": GOOD_PROMPT + b'{"id": "b", "text": "042", "target": "042", "rewards": ["orc"]}\n'},
    ),
    BadInput(
        "source without path",
        ("train", "tiny-smoke", "data.prompts=[{weight: 2}]"),
        ("data.prompts.0.path is missing",),
    ),
    BadInput(
        "prompt without quotation marks",
        ("train", "tiny-smoke", "data.prompts=[{path: p.txt, target: quoted}]"),
        ("data.prompts: p.txt, line 2", "nothing in the prompt stands in quotation marks"),
        {"p.txt": b'"042"\n043\n'},
    ),
    BadInput("misspelt reward", ("train", "tiny-smoke", "rewards.0.name=orc"), ("'orc'", "did you mean ocr?")),
    BadInput("misspelt model", ("train", "tiny-smoke", "model.path=package:tiny-sd"), ("model.path", "tiny-sd3")),
    BadInput("missing model", ("train", "tiny-smoke", "model.path=./model"), ("model.path", "./model")),
    BadInput("impossible size", ("train", "tiny-smoke", "model.height=13"), ("model.height", "multiple of 4", "12")),
    BadInput("misspelt layer", ("train", "tiny-smoke", "lora.targets=[to_z]"), ("lora.targets", "'to_z'")),
    BadInput("address", ("train", "tiny-smoke", "cluster.address=host:8786"), ("cluster.address", "tcp://HOST:PORT")),
    BadInput("misspelt tracking", ("train", "tiny-smoke", "tracking.uri=nome"), ("tracking.uri", "did you mean none?")),
    # Servers that are not there: port 1 is nobody's
    BadInput(
        "dead Prefect API",
        ("train", "tiny-smoke", "--prefect-api", "http://127.0.0.1:1/api"),
        ("--prefect-api http://127.0.0.1:1/api cannot be reached", "such as http://127.0.0.1:4200/api"),
    ),
    BadInput(
        "Prefect API without host",
        ("train", "tiny-smoke", "--prefect-api", "http://"),
        ("--prefect-api http:// is no address", "no host"),
    ),
    BadInput(
        "Prefect API by name", ("train", "tiny-smoke", "--prefect-api", "mine"), ("--prefect-api mine", "http://")
    ),
    BadInput(
        "dead scheduler",
        ("train", "tiny-smoke", "cluster.address=tcp://127.0.0.1:1"),
        ("cluster.address=tcp://127.0.0.1:1 is no Dask scheduler", "dask scheduler", "local"),
    ),
    BadInput(
        "dead MLflow",
        ("train", "tiny-smoke", "tracking.uri=http://127.0.0.1:1"),
        ("tracking.uri=http://127.0.0.1:1 cannot be reached", "managed"),
    ),
    # Names of runs
    BadInput("path as name", ("train", "tiny-smoke", "--name", "../x"), ("'../x'", "letters, digits")),
    BadInput("long name", ("train", "tiny-smoke", "--name", "x" * 65), ("65 characters", "at most 64")),
    BadInput("unknown run", ("resume", "tiny-smoke-1"), ("no run 'tiny-smoke-1'",)),
    BadInput("place without checkpoints", ("resume", "../x"), ("../x has no whole checkpoint", "manifest.json")),
    BadInput("path as run", ("evaluate", "../x"), ("'../x'", "letters, digits")),
    BadInput("sample of an unknown run", ("sample", "tiny-smoke-1", "--prompt", "042"), ("no run 'tiny-smoke-1'",)),
    # Looking at configurations
    BadInput("show a misspelt preset", ("config", "show", "tiny-smok"), ("did you mean tiny-smoke?",)),
    BadInput("explain nothing", ("config", "explain", ""), ("config explain needs a key or a section",)),
    BadInput("explain an unknown key", ("config", "explain", "algorithm.cliprange"), ("algorithm.clip_range",)),
)

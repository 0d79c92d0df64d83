"""What rewards cost: alone, through their HTTP server on loopback, and how much of it a run has to wait for.

    python benchmarks/rewards.py --json rewards.json
    python benchmarks/rewards.py --only clip_score --path clip_score=openai/clip-vit-large-patch14

Rewards whose weights are not given by --path run on tiny random checkpoints of the same classes: their figures are
those of decoding, preparing and orchestration, not of the published models.

Exposed reward time: every reward unit sleeps for as long as the rollout of its micro-batch, with 64 micro-batches per
worker; the same run with rewards that take no time is subtracted. It may wait for the last one, 1/64, and 1.5 % more.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from digenrl.config import RequestConfig, RewardConfig
from digenrl.rewards.base import Failed, PromptRecord, Reward
from digenrl.rewards.registry import make_reward

if TYPE_CHECKING:
    from benchmarks.exposed_rewards import Exposed

ROOT = Path(__file__).resolve().parent.parent
REPEATS = 5
#: Rewards that need a checkpoint, and what of benchmarks.tiny_rewards makes a tiny one.
TINY = {
    "aesthetic_predictor": "aesthetic_folder",
    "classifier": "classifier_folder",
    "clip_score": "clip_folder",
    "pickscore": "clip_folder",
}
NAMES = ("jpeg_compressibility", "jpeg_incompressibility", "ocr", "ocr_ddddocr", *TINY)
START_S = 300.0


@dataclass(frozen=True)
class Row:
    """One reward.

    Attributes:
        weights: "none", "packaged", "tiny random" or a path.
        alone_ms, served_ms: per image, in this process and through the server.
    """

    name: str
    weights: str
    alone_ms: float
    served_ms: float


def measure(name: str, path: str | None, tiny: bool, images: np.ndarray) -> Row:
    """Milliseconds per image, median of some repeats after one that does not count."""
    prompts = [PromptRecord(f"p{i}", "042", {"target": "042", "class": "cat"}) for i in range(len(images))]
    reward = make_reward(RewardConfig(name=name, path=path))
    reward.load()
    alone = _ms_per_image(reward, images, prompts)
    with served(name, path) as url:
        request = RequestConfig(samples=len(images), timeout_s=300, deadline_s=600)
        through = _ms_per_image(make_reward(RewardConfig(name="http", url=url, request=request)), images, prompts)
    packaged = "none" if reward.card.weights == "none needed" else "packaged"
    return Row(name, "tiny random" if tiny else path or packaged, alone, through)


def _ms_per_image(reward: Reward, images: np.ndarray, prompts: Sequence[PromptRecord]) -> float:
    taken = []
    for _ in range(1 + REPEATS):
        began = time.perf_counter()
        scores = reward(images, prompts)
        taken.append(time.perf_counter() - began)
        if failed := [score.reason for score in scores if isinstance(score, Failed)]:
            raise RuntimeError(f"{reward.name}: {failed[0]}")
    return 1000 * statistics.median(taken[1:]) / len(images)


@contextmanager
def served(name: str, path: str | None) -> Iterator[str]:
    """The address of a server process that is ready."""
    import httpx

    settings = [f"path={path}"] if path else []
    command = [sys.executable, "-m", "digenrl.rewards.server", name, *settings, "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRANSFORMERS_VERBOSITY": "error"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split(" at ")[1].split()[0]
            deadline = time.monotonic() + START_S
            while not httpx.get(f"{url}/ready").is_success:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise RuntimeError(f"the server of {name} is not ready after {START_S:.0f} s")
                time.sleep(0.05)
            yield url
        finally:
            process.terminate()


def table(rows: Sequence[Row], images: np.ndarray) -> str:
    """Markdown."""
    height, width = images.shape[2:4]
    head = f"batches of {len(images)} pictures of {height} x {width}"
    lines = [f"| reward ({head}) | weights | alone, ms/image (images/s) | HTTP on loopback, ms/image (images/s) |"]
    lines.append("|---|---|---|---|")
    for row in rows:
        cells = [f"{ms:.2f} ({1000 / ms:.0f})" for ms in (row.alone_ms, row.served_ms)]
        lines.append(f"| {row.name} | {row.weights} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def exposed_table(found: Sequence[Exposed]) -> str:
    """Markdown."""
    lines = ["| run | iteration, rewards as long as rollouts | rewards that take no time | waits | limit |"]
    lines.append("|---|---|---|---|---|")
    for e in found:
        seconds = f"{e.with_rewards_s:.2f} s | {e.without_s:.2f} s"
        lines.append(f"| {e.name} | {seconds} | {100 * e.share:.2f} % | {100 * e.limit:.2f} % |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=NAMES, default=NAMES, help="rewards to measure")
    parser.add_argument("--path", nargs="*", default=[], metavar="NAME=PATH", help="real weights")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--height", type=int, default=512)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--exposed", choices=["both", "simulated", "none"], default="both")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    from benchmarks import exposed_rewards, tiny_rewards  # here, so that --help does not wait for torch and Dask

    paths: Mapping[str, str] = dict(given.split("=", 1) for given in options.path)
    images = tiny_rewards.pictures(options.batch, options.height, options.width)[:, None]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only:
            tiny = name in TINY and name not in paths
            path = str(getattr(tiny_rewards, TINY[name])(Path(folder) / name)) if tiny else paths.get(name)
            rows.append(measure(name, path, tiny, images))
    found = exposed_rewards.simulated() if options.exposed != "none" else []
    found += exposed_rewards.on_dask_workers() if options.exposed == "both" else []
    print(table(rows, images))
    if found:
        print("\n" + exposed_table(found))
    if options.json:
        machine = {"python": platform.python_version(), "cpus": os.cpu_count(), "machine": platform.machine()}
        said: dict[str, Any] = {"machine": machine, "batch": options.batch, "size": images.shape[2:4]}
        said |= {"rewards": [asdict(row) for row in rows], "exposed": [asdict(e) | {"share": e.share} for e in found]}
        options.json.write_text(json.dumps(said, indent=2) + "\n")
    if late := [e.name for e in found if e.share > e.limit]:
        raise SystemExit(f"rewards hold up: {', '.join(late)}")


if __name__ == "__main__":
    main()

"""A4. Symptom: a reward server had a bad day, its answers counted as 0, and the model learned from that.

Rule: what may pass is tried again within bounds, everything else fails at once; the sample is Failed(reason) and left
out of its group's statistics; if more than a configured share fails, the iteration fails and weights stay as they are.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from digenrl.config import RunConfig
from digenrl.rewards.base import Failed, Scored
from runs import Ground, Outcome, small
from workers.courier import RunFailed

GROUPS, SIZE, STEPS, ATTEMPTS = 2, 4, 3, 3

#: One request for each step until they are used up: answered, answered at the third attempt, refused, never answered.
SCRIPT = (200, 500, 500, 200, 404, *["hang"] * ATTEMPTS)

#: A process that follows the script, with values of 2 and more, and notes what it did.
SERVER = r"""
import json, sys, time, zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
steps, log = json.loads(sys.argv[1]), open(sys.argv[2], "a", buffering=1)

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        samples = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["samples"]
        step = steps.pop(0) if steps else 200
        log.write(f"{step}\n")
        if step == "hang":
            time.sleep(600)
        scores = [{"value": 2 + zlib.crc32(s["frames"][0].encode()) % 1000 / 1000} for s in samples]
        data = json.dumps({"reward": "scripted", "version": "1", "scores": scores}).encode() if step == 200 else b""
        self.send_response(step)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass

server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
server.daemon_threads = True
print(server.server_port, flush=True)
server.serve_forever()
"""


@contextmanager
def scripted(log: Path) -> Iterator[str]:
    """The address of such a process within the block."""
    arguments = [sys.executable, "-c", SERVER, json.dumps(SCRIPT), str(log)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    found = Ground(1)
    yield found
    found.close()


def config(url: str, *more: str) -> RunConfig:
    return small(
        "iterations=1",
        "evaluation.every=0",
        f"algorithm.prompts_per_iteration={GROUPS}",
        f"algorithm.samples_per_prompt={SIZE}",
        "algorithm.updates_per_iteration=1",
        f"schedule.micro_batch={SIZE}",
        "schedule.layout=colocated",
        "cluster.workers=1",
        "rewards.0.name=http",
        f"rewards.0.url={url}",
        "rewards.0.request.samples=1",
        "rewards.0.request.concurrency=1",
        f"rewards.0.request.attempts={ATTEMPTS}",
        "rewards.0.request.backoff_s=0.01",
        "rewards.0.request.timeout_s=0.5",
        *more,
    )


def test_bad_answers_leave_their_samples_out_and_nothing_becomes_zero(ground: Ground, tmp_path: Path) -> None:
    with scripted(tmp_path / "log") as url:
        outcome = ground.run(config(url))
    asked = (tmp_path / "log").read_text().split()
    assert asked == [str(step) for step in SCRIPT] + ["200"] * SIZE
    (report,) = outcome.reports
    scores = {(sample.group, sample.generation): score for sample, score in report.scores.items()}
    failed = {place: score.reason for place, score in scores.items() if isinstance(score, Failed)}
    assert failed.keys() == {(0, 2), (0, 3)}
    assert "HTTP 404" in failed[0, 2]
    assert "no answer within timeout_s=0.5 (attempt 3 of 3)" in failed[0, 3]
    assert all(score.value > 1 for score in scores.values() if isinstance(score, Scored))
    assert len(report.rewards) == GROUPS * SIZE - 2 and min(report.rewards) > 1
    # Two samples of the first group are enough for its statistics; the failed ones are in none.
    assert report.trained == report.metrics["pairs"] == (GROUPS * SIZE - 2) * STEPS
    assert sum(report.excluded.values()) == 2 * STEPS
    assert [version for version, _ in outcome.versions] == [1]


def test_too_large_a_failed_share_ends_the_iteration_with_the_weights_untouched(ground: Ground, tmp_path: Path) -> None:
    outcome = Outcome()
    with (
        scripted(tmp_path / "log") as url,
        pytest.raises(RunFailed, match=r"2 of 8 samples of iteration 0 failed.*max_failed_share=0.2.*HTTP 404"),
    ):
        ground.do(ground.drive, config(url, "gates.max_failed_share=0.2"), outcome)
    assert not outcome.versions and not outcome.reports

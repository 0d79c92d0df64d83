"""Opening a million prompts: time and memory, against holding every record.

    python benchmarks/prompts.py [--prompts 1000000] [--json prompts.json]

Each way runs in a process of its own on the same generated file: `index` is `digenrl.prompts`, `records` reads the same
file the same way and keeps every record.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_MEASURE = """
import json, resource, sys, time
from digenrl.prompts import load_prompts, prompts_of_iteration
load_prompts("package:numbers-train")
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before, began = peak(), time.perf_counter()
prompts = load_prompts(sys.argv[1])
if sys.argv[2] == "records":
    prompts = list(prompts)
opened = time.perf_counter()
prompts_of_iteration(prompts, 0, 0, 64)
first = time.perf_counter()
for iteration in range(1, 101):
    prompts_of_iteration(prompts, 0, iteration, 64)
print(json.dumps({
    "open_s": round(opened - began, 2),
    "first_iteration_s": round(first - opened, 3),
    "iteration_s": round((time.perf_counter() - first) / 100, 5),
    "peak_mib": round(peak() - before, 1),
}))
"""


def main() -> None:
    """Print a table; write JSON if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=1_000_000, help="lines of the file")
    parser.add_argument("--json", type=Path, help="JSON file for the figures")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.jsonl"
        write(path, arguments.prompts)
        size_mib = path.stat().st_size / 2**20
        ways = {way: measured(path, way) for way in ("index", "records")}
    print(f"{arguments.prompts} prompts, {size_mib:.0f} MiB")
    print("way      open     first iteration  another  peak memory")
    for way, found in ways.items():
        opened, first, another_ms = found["open_s"], found["first_iteration_s"], 1e3 * found["iteration_s"]
        print(f"{way:8} {opened:5.1f} s  {first:10.2f} s  {another_ms:10.1f} ms  {found['peak_mib']:7.0f} MiB")
    if arguments.json is not None:
        result = {"prompts": arguments.prompts, "size_mib": round(size_mib, 1), **ways}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


def write(path: Path, count: int) -> None:
    """Prompts of about 75 characters with an id and a target."""
    with path.open("w", encoding="utf-8") as file:
        for i in range(count):
            text = f"a photograph of the number {i} on a wooden sign beside the road, evening light"
            file.write(json.dumps({"id": f"p{i}", "text": text, "target": str(i)}) + "\n")


def measured(path: Path, way: str) -> dict[str, float]:
    """Run one way in a fresh process."""
    command = [sys.executable, "-c", _MEASURE, str(path), way]
    # What is measured is the checkout this file lies in.
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    figures: dict[str, float] = json.loads(found.stdout)
    return figures


if __name__ == "__main__":
    main()

"""What a checkpoint costs: seconds to save and to load it, its size, and how long the loop is held up by a save.

    python benchmarks/checkpoints.py --json checkpoints.json
    python benchmarks/checkpoints.py --url s3://bucket/prefix        # beside the local directory; key and endpoint from
                                                                     # the environment, as in docs/storage.md

States of several sizes go through the Checkpointer of a run, on an event loop that does nothing else but look at the
clock. It is *blocked* by what a tick comes later than it should, above the median of ticks while nothing is saved. The
last column is how many seconds apart saves must be for that to be 1 % of the time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

# What is measured is the checkout this file lies in.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from digenrl.config.load import load_config
from digenrl.prompts import load_prompts
from flows.checkpointing import Checkpointer
from flows.history import History
from flows.stores import Stores
from storage import checkpoints
from storage.stores import Store, open_store
from workers.listener import TrainerState

MIB = 2**20
TICK_S = 0.002
IDLE_TICKS = 500


def state_of(theta: int, size_bytes: int) -> TrainerState:
    """An adapter and the two moments of its optimiser, in 64 tensors each."""
    count = max(1, size_bytes // (3 * 64 * 4))
    generator = torch.Generator().manual_seed(theta)

    def tensors(prefix: str) -> dict[str, torch.Tensor]:
        return {f"{prefix}{i}": torch.randn(count, generator=generator) for i in range(64)}

    return TrainerState(theta, tensors("w"), tensors("m") | tensors("v"), f"h{theta}")


async def ticks(until: asyncio.Event | None) -> list[float]:
    """Seconds between looks at the clock, until something has happened or `IDLE_TICKS` times."""
    found, last = [], time.perf_counter()
    while not until.is_set() if until is not None else len(found) < IDLE_TICKS:
        await asyncio.sleep(TICK_S)
        now = time.perf_counter()
        found.append(now - last)
        last = now
    return found


async def measure(store: Store, size_bytes: int, repeats: int) -> dict[str, Any]:
    """Medians over the saves of states of one size."""
    config = load_config("tiny-ocr", ["algorithm.updates_per_iteration=1"])
    prompts, rows = load_prompts(config.data.prompts), []
    for theta in range(1, repeats + 1):
        checkpointer = Checkpointer(Stores(store, store), config, History(), prompts)
        state, done = state_of(theta, size_bytes), asyncio.Event()
        idle = median(await ticks(None))
        watching = asyncio.create_task(ticks(done))
        began = time.perf_counter()
        checkpointer.published(theta, state)
        info = await checkpointer.finish()
        save_s = time.perf_counter() - began
        done.set()
        late = [max(0.0, tick - idle) for tick in await watching]
        assert info is not None
        began = time.perf_counter()
        await asyncio.to_thread(checkpoints.load, info)
        rows.append((save_s, time.perf_counter() - began, sum(late), max(late), info.size_bytes))
    save_s, load_s, blocked_s, longest_s, size = (median(column) for column in zip(*rows, strict=True))
    return {
        "store": store.root.partition("://")[0] if "://" in store.root else "local",
        "size_mib": round(size / MIB, 2),
        "save_s": round(save_s, 3),
        "load_s": round(load_s, 3),
        "blocked_ms": round(1000 * blocked_s, 1),
        "longest_ms": round(1000 * longest_s, 1),
        "apart_s": round(100 * blocked_s, 1),
    }


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="storage to measure beside a local directory")
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 50, 500], help="sizes of the state")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file to write")
    options = parser.parse_args()
    rows = []
    print("store  size MiB  save s  load s  blocked ms  longest ms  apart s")
    with tempfile.TemporaryDirectory() as directory:
        stores = [open_store(directory), *([open_store(f"{options.url}/benchmark")] if options.url else [])]
        for mib in options.mib:
            for store in stores:
                row = asyncio.run(measure(store, mib * MIB, options.repeats))
                rows.append(row)
                print("  ".join(f"{value:>7}" for value in row.values()), flush=True)
                for folder in store.tree():
                    store.remove_folder(folder)
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()

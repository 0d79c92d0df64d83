"""One attempt at a training run: its directory, its listeners, and what it leaves behind.

session = Session(directory, resume=False, flow_run_id=...)
await session.open_tracker()
engine = session.engine(client)
result = await session.close(status)
"""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
import os
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from distributed import Client
from safetensors.torch import save as save_tensors

from digenrl import runspec
from digenrl.config import RunConfig
from digenrl.identity import MicroBatchId
from digenrl.prompts import load_prompts
from digenrl.rewards.base import PromptRecord
from digenrl.scheduling.policies import Colocated, Digenrl, Disaggregated, Layout
from digenrl.scheduling.scheduler import Scheduler
from flows.checkpointing import Checkpointer, restore
from flows.history import History
from flows.logbook import Logbook
from flows.report import Places, draw, summarise
from flows.tracking import Tracking
from flows.weights import write_lora
from storage.checkpoints import CheckpointInfo
from storage.runs import RunDirectory
from storage.tracker import Tracker
from tasks.observers import Observers
from workers import forkserver
from workers.engine import Engine
from workers.listener import Listener, Listeners, TrainerState
from workers.receipts import RunSetup

#: What MLflow calls the end of a run.
MLFLOW_STATUS: dict[str, Literal["FINISHED", "FAILED", "KILLED"]] = {
    "completed": "FINISHED",
    "cancelled": "KILLED",
    "failed": "FAILED",
}

#: How long the end of a run may wait until MLflow has taken what is queued.
DELIVERY_S = 30.0
CANCELLED_DELIVERY_S = 4.0


@dataclass(frozen=True)
class Result:
    """What an attempt leaves for the process that started it.

    Attributes:
        summary: the content of summary.json.
        places: where the results are.
        pictures: pictures by name.
        task_runs: Prefect task runs that were emitted.
        flow_runs: ids of the flow run and its subflow runs, on which they are.
    """

    summary: dict[str, Any]
    places: Places
    pictures: dict[str, Path]
    task_runs: int
    flow_runs: tuple[str, ...]


class Session:
    """Everything around the engine. Make it inside the flow.

    Args:
        directory: the run's directory with its configuration.
        resume: continue from the newest whole checkpoint; from the start if there is none.
        flow_run_id: of the Prefect flow run.
        prefect_page: address of the flow run's page.
        watchers: more listeners, such as a progress display.
    """

    def __init__(
        self,
        directory: RunDirectory,
        *,
        resume: bool,
        flow_run_id: str,
        prefect_page: str | None,
        watchers: Sequence[Listener] = (),
    ) -> None:
        self._began = time.monotonic()
        self.directory = directory
        self.config = directory.read_config()
        restored = restore(directory.checkpoints) if resume else None
        self.start: TrainerState | None
        self.start_iteration, self.start, saved = restored if restored is not None else (0, None, None)
        self.history = History.from_state(saved.state["history"]) if saved is not None else History()
        before = (directory.read_summary() or {}) if resume else {}
        self._mlflow_run_id = before.get("mlflow_run_id")
        self.previous_flow_run_id = before.get("prefect_flow_run_id")
        self.flow_run_id = flow_run_id
        self._prefect_page = prefect_page
        self._watchers = watchers
        self._prompts = load_prompts(self.config.data.prompts)
        self._held_out = load_prompts(self.config.data.held_out) if self.config.data.held_out else ()
        self.shape = runspec.shape(self.config, len(self._held_out), self.start_iteration)
        self._tracker: Tracker | None = None
        self._engine: Engine | None = None
        self._observers = Observers(self.config.schedule.observe, self.shape)
        self._checkpointer = Checkpointer(directory.checkpoints, self.config, self.history)
        self._checkpointer.last = saved.info if saved is not None else None
        if saved is not None:
            self._mlflow_run_id = saved.state.get("mlflow_run_id") or self._mlflow_run_id

    async def open_tracker(self) -> None:
        """Create the MLflow run, or open that of the attempt before this one. Call it before `engine`.

        Raises:
            TrackerError: MLflow cannot be reached, or refuses.
        """
        self._tracker = await asyncio.to_thread(_open_tracker, self.config, self.directory.name, self._mlflow_run_id)
        if self._tracker is not None:
            self._mlflow_run_id = self._checkpointer.extra["mlflow_run_id"] = self._tracker.run_id
        # Whoever resumes the run after this process was killed finds the MLflow run here.
        self.directory.write_summary(self._summary("running", self._places(self._checkpointer.last, None)))

    def engine(self, client: Client) -> Engine:
        """The engine of this attempt on a cluster."""
        tracking = Tracking(self._tracker, self.directory, self._held_out)
        tracking.catch_up(self.history)
        listener = Listeners(
            self.history,
            self._observers,
            self._checkpointer,
            tracking,
            Logbook(),
            *self._watchers,
        )
        self._engine = Engine(
            client=client,
            setup=RunSetup(uuid.uuid4().hex, self.config, len(self._held_out), self.start_iteration),
            scheduler=Scheduler(
                self.shape,
                layout_of(self.config),
                runspec.advantage_rule(self.config),
                max_failed_share=self.config.gates.max_failed_share,
                max_bad_updates=self.config.gates.max_bad_updates,
                std_scope=self.config.algorithm.std_scope,
                streaming=self.config.schedule.streams,
                max_open_groups=self.config.schedule.max_open_groups,
            ),
            start=self.start,
            prompts_of=functools.lru_cache(maxsize=256)(self._prompts_of),
            listener=listener,
        )
        return self._engine

    def _prompts_of(self, micro_batch: MicroBatchId) -> tuple[PromptRecord, ...]:
        return tuple(runspec.prompts_of(self.shape, micro_batch, self._prompts, self._held_out))

    async def close(self, status: str) -> Result:
        """Save and write what there is.

        Args:
            status: completed, cancelled or failed.
        """
        checkpoint, lora, pictures, _ = await asyncio.gather(
            self._checkpointer.finish(),
            asyncio.to_thread(self._save_lora),
            asyncio.to_thread(draw, self.directory, self.history),
            self._observers.close(),
        )
        places = self._places(checkpoint, lora)
        summary = self._summary(status, places)
        self.directory.write_summary(summary)
        if self._tracker is not None:
            await asyncio.to_thread(self._finish_tracking, self._tracker, status, lora, pictures)
        flow_runs = (self.flow_run_id, *map(str, self._observers.flow_runs))
        return Result(summary, places, pictures, self._observers.emitted, flow_runs)

    def _places(self, checkpoint: CheckpointInfo | None, lora: Path | None) -> Places:
        return Places(
            checkpoint=checkpoint.url if checkpoint is not None else None,
            lora=lora,
            mlflow_run_id=self._mlflow_run_id,
            mlflow_page=self._tracker.page if self._tracker is not None else None,
            prefect_flow_run_id=self.flow_run_id,
            prefect_page=self._prefect_page,
            example_prompt=(*self._held_out, *self._prompts)[0].text,
        )

    def _summary(self, status: str, places: Places) -> dict[str, Any]:
        return summarise(
            self.directory.name,
            self.config,
            self.history,
            places,
            status=status,
            seconds=time.monotonic() - self._began,
            observing=self._observers.share,
        )

    def _save_lora(self) -> Path | None:
        lora = self.directory.path / "lora"
        if self._engine is None or self._engine.published is None:
            return lora if lora.is_dir() else None  # that of the attempt before this one
        _, state = self._engine.published
        # In a process that has diffusers imported already; as bytes, since a tensor would travel as shared memory.
        context = multiprocessing.get_context(forkserver.METHOD)
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            adapter = save_tensors(state.adapter)
            pool.submit(write_lora, self.config.model.family, adapter, self.config.lora, lora).result()
        return lora

    def _finish_tracking(self, tracker: Tracker, status: str, lora: Path | None, pictures: dict[str, Path]) -> None:
        for path in pictures.values():
            tracker.log_artifact(path)
        if lora is not None:
            tracker.log_artifact(lora)
        tracker.log_artifact(self.directory.summary_path)
        tracker.log_artifact(self.directory.config_path)
        # Whoever asked for the end is waiting for it.
        timeout_s = CANCELLED_DELIVERY_S if status == "cancelled" else DELIVERY_S
        tracker.finish(MLFLOW_STATUS[status], timeout_s)


def layout_of(config: RunConfig) -> Layout:
    """The configured layout."""
    if config.schedule.layout == "colocated":
        return Colocated()
    return (Disaggregated if config.schedule.assist == "off" else Digenrl)(config.cluster.trainers)


def _open_tracker(config: RunConfig, name: str, mlflow_run_id: str | None) -> Tracker | None:
    if config.tracking.uri == "none":
        return None
    uri = os.environ["MLFLOW_TRACKING_URI"] if config.tracking.uri == "managed" else config.tracking.uri
    tracker = Tracker(uri, config.tracking.experiment)
    params = _flat(config.model_dump(mode="json"))
    if mlflow_run_id is not None:
        tracker.resume(mlflow_run_id, params)
    else:
        tracker.start(name, params, {"digenrl.run": name})
    return tracker


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = str(value)
    return flat

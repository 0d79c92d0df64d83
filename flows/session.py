"""One attempt at a training run: its directory, its listeners, and what it leaves behind.

session = Session(directory, resume=False, flow_run_id=...)
await session.settle(client)
await session.open_tracker()
engine = session.engine(client)
result = await session.close(status)
"""

from __future__ import annotations

import asyncio
import functools
import logging
import multiprocessing
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed import Client
from safetensors.torch import save as save_tensors

from digenrl import choices, runspec
from digenrl.algorithms.optimizer import evaluated
from digenrl.config import RunConfig
from digenrl.guard.watch import Verdict
from digenrl.identity import MicroBatchId
from digenrl.profile import Profile
from digenrl.prompts import load_data
from digenrl.rewards.base import PromptRecord
from digenrl.scheduling.bubbles import Cause
from flows.checkpointing import PATIENCE_S, Checkpointer
from flows.guarding import Guarding, guard_of
from flows.history import History
from flows.logbook import Logbook
from flows.measured import Clocked, CostBook, known_costs
from flows.recording import CANCELLED_DELIVERY_S, close_tracker, open_tracker
from flows.report import Places, draw, summarise
from flows.resuming import Restored, check_resumable, check_unused, restore
from flows.stores import check_storage, stores_of
from flows.timeline import Timeline, Written
from flows.tracking import Tracking
from flows.weights import export, exported_to
from storage.checkpoints import CheckpointInfo
from storage.runs import RunDirectory
from storage.tracker import Tracker
from tasks.observers import Observers
from workers import forkserver
from workers.engine import Engine
from workers.listener import Listener, Listeners, TrainerState
from workers.profile import measure
from workers.receipts import RunSetup

logger = logging.getLogger(__name__)


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
        judged: hears what the guard thinks of each evaluation.
        prefect_degraded_s: seconds that Prefect has been without an answer so far.
    """

    def __init__(
        self,
        directory: RunDirectory,
        *,
        resume: bool,
        flow_run_id: str,
        prefect_page: str | None,
        watchers: Sequence[Listener] = (),
        judged: Callable[[Verdict], None] = lambda verdict: None,
        prefect_degraded_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._epoch = uuid.uuid4().hex
        self.directory = directory
        self.config = directory.read_config()
        self._stores = stores_of(directory, self.config)
        self.start: TrainerState | None
        self.start_iteration, self.start, saved = self._restored(resume) or (0, None, None)
        self.history = History.from_state(saved.state["history"]) if saved is not None else History()
        before = (directory.read_summary() or {}) if resume else {}
        self.history.earlier_s = max(self.history.earlier_s, before.get("seconds", 0.0))
        self._mlflow_run_id = before.get("mlflow_run_id")
        self.previous_flow_run_id = before.get("prefect_flow_run_id")
        self.flow_run_id = flow_run_id
        self._prefect_page = prefect_page
        self._watchers = watchers
        self._judged = judged
        self._prefect_degraded_s = prefect_degraded_s
        self._guard_state = saved.state.get("guard") if saved is not None else None
        self._data = load_data(self.config.data)
        self._tracker: Tracker | None = None
        self._begins_record = False
        self._engine: Engine | None = None
        self._tracking: Tracking | None = None
        self._timeline: Timeline | None = None
        self._profiles: Sequence[Profile] = ()
        self._costs: CostBook | None = None
        self._clocked: Clocked | None = None
        self._configure(self.config)
        self._checkpointer.last = saved.info if saved is not None else None
        if saved is not None:
            # The summary is the newer: it was written as soon as the MLflow run was open.
            self._mlflow_run_id = self._mlflow_run_id or saved.state.get("mlflow_run_id")

    def _restored(self, resume: bool) -> Restored | None:
        """What the run goes on from, None from its start.

        Raises:
            ConfigError: it cannot go on, or cannot begin here.
        """
        if self.config.checkpoint.credentials_block is not None:
            check_storage(self.config)  # not before: Prefect holds the key
        if not resume:
            check_unused(self._stores)
            return None
        restored = restore(self._stores)
        check_resumable(self.directory, self.config, self._stores, restored[2] if restored is not None else None)
        return restored

    def _configure(self, config: RunConfig) -> None:
        """Take a configuration for that of the run, and make what depends on it."""
        self.config = config
        self.shape = runspec.shape(config, len(self._data.held_out), self.start_iteration)
        self._observers = Observers(config.schedule.observe, self.shape)
        self._guard = guard_of(config, self._guard_state)
        self._checkpointer = Checkpointer(self._stores, config, self.history, self._data.train, self._guard)

    async def settle(self, client: Client) -> None:
        """Settle what the configuration leaves open, once in the life of a run, and write it down.

        What has to be measured for it is measured on the workers that are there. Call it before `open_tracker`.
        """
        if self.start is not None:
            return  # the checkpoint was made by units cut as the configuration says
        if choices.needs_profile(self.config):
            setup = RunSetup(self._epoch, self.config, len(self._data.held_out))
            prompts = self._prompts_of(self.shape.micro_batches(0)[0])
            everything = choices.may_stream(self.config) or self.config.schedule.assist == "search"
            self._profiles = await measure(client, setup, prompts, everything=everything)
        settled, reasons = await asyncio.to_thread(
            choices.settle, self.config, len(self._data.held_out), self._profiles
        )
        for reason in reasons:
            logger.info("%s", reason)
        if settled != self.config:
            self.directory.write_config(settled)
            self._configure(settled)

    async def open_tracker(self) -> None:
        """Create the MLflow run, or open that of the attempt before this one if it is still there.

        Call it before `engine`.

        Raises:
            TrackerError: MLflow cannot be reached, or refuses.
        """
        note = self._description()
        before = self._mlflow_run_id
        self._tracker = await asyncio.to_thread(open_tracker, self.config, self.directory.name, before, note)
        if self._tracker is not None:
            self._begins_record = self._tracker.run_id != before
            self._mlflow_run_id = self._checkpointer.extra["mlflow_run_id"] = self._tracker.run_id
        self.write_summary()

    def write_summary(self) -> None:
        """Write down that the run goes on, under which ids: for whoever finds it after this process was killed."""
        self.directory.write_summary(self._summary("running", self._places(self._checkpointer.last, None)))

    @property
    def is_training(self) -> bool:
        """Whether there are weights to save, or soon will be."""
        return self._engine is not None

    @property
    def guard_stop(self) -> Verdict | None:
        """Why the guard stopped the run; None if it did not."""
        last = self._guard.last if self._guard is not None else None
        return last if last is not None and last.stops else None

    @property
    def mlflow_page(self) -> str | None:
        """Address of the run's charts; None before `open_tracker`, or if nothing shows them."""
        return self._tracker.page if self._tracker is not None else None

    def _description(self) -> str:
        """Markdown for the run's page in MLflow."""
        name = self.directory.name
        lines = [f"`digenrl resume {name}` continues this run, `digenrl serve` opens these pages again."]
        if self._prefect_page is not None:
            lines.insert(0, f"[Its flow run in Prefect]({self._prefect_page})")
        return "\n\n".join(lines)

    def engine(self, client: Client) -> Engine:
        """The engine of this attempt on a cluster."""
        tracking = Tracking(self._tracker, self.directory, self._data.held_out, self._degraded)
        self._tracking = tracking
        tracking.catch_up(self.history, whole=self._begins_record)
        self._timeline = Timeline(self.config, self.shape, tracking.bubbles_found)
        known = known_costs(self.directory.profile_path, self.shape)
        costs = known or choices.model_of(self.shape, self._profiles)
        self._costs = CostBook(self.directory.profile_path, costs, self.config.checkpoint.every)
        self._clocked = Clocked(runspec.scheduler_of(self.config, self.shape, costs), tracking.search_found)
        listener = Listeners(
            self.history,
            self._timeline,
            self._costs,
            self._clocked,
            self._observers,
            self._checkpointer,
            tracking,
            Logbook(),
            *self._watchers,
            *self._guarding(tracking),
        )
        self._engine = Engine(
            client=client,
            setup=RunSetup(
                self._epoch,
                self.config,
                len(self._data.held_out),
                self.start_iteration,
                runspec.texts_of(self.config, self.shape, self._data.train, self._data.held_out),
            ),
            scheduler=self._timeline.hearing(self._clocked),
            start=self.start,
            prompts_of=functools.lru_cache(maxsize=256)(self._prompts_of),
            listener=listener,
        )
        return self._engine

    def _guarding(self, tracking: Tracking) -> tuple[Listener, ...]:
        """Hears of an evaluation last, when the others have shown it."""
        if self._guard is None:
            return ()
        tell = (tracking.judged, self._judged)
        return (Guarding(self.config, self._guard, self.start_iteration, tell, self._stop),)

    def _stop(self) -> None:
        assert self._engine is not None, "there is an engine before it says anything"
        self._engine.stop()

    def _degraded(self) -> dict[str, float]:
        """Seconds without each service in this attempt."""
        return {
            "prefect": self._prefect_degraded_s(),
            "mlflow": self._tracker.degraded_seconds if self._tracker is not None else 0.0,
            "storage": self._checkpointer.degraded_s,
        }

    def _prompts_of(self, micro_batch: MicroBatchId) -> tuple[PromptRecord, ...]:
        return tuple(runspec.prompts_of(self.shape, micro_batch, self._data.train, self._data.held_out))

    async def close(self, status: str) -> Result:
        """Save and write what there is.

        Args:
            status: completed, cancelled, guarded or failed.
        """
        stop = self.guard_stop if status == "guarded" else None
        (checkpoint, exported), (pictures, timeline), _ = await asyncio.gather(
            self._save(status, stop),
            self._draw(stop),
            self._observers.close(patient=status == "completed"),
        )
        if self._costs is not None:
            await asyncio.to_thread(self._costs.write)
        places = self._places(checkpoint, exported, timeline.trace)
        summary = self._summary(status, places, timeline.shares)
        self.directory.write_summary(summary)
        if self._tracker is not None:
            if self._tracking is not None:
                self._tracking.finish()
            files = [*pictures.values(), timeline.trace, self.directory.summary_path, self.directory.config_path]
            if self.config.adapter is not None:  # a whole transformer stays where it is
                files.append(exported)
            await asyncio.to_thread(close_tracker, self._tracker, status, files)
        flow_runs = (self.flow_run_id, *map(str, self._observers.flow_runs))
        return Result(summary, places, pictures, self._observers.emitted, flow_runs)

    async def _save(self, status: str, stop: Verdict | None) -> tuple[CheckpointInfo | None, Path | None]:
        """Checkpoint and exported weights that are left: the newest, or those that the guard goes back to."""
        if stop is not None:
            return await self._go_back(stop)
        checkpoint, exported = await asyncio.gather(
            self._checkpointer.finish(CANCELLED_DELIVERY_S if status == "cancelled" else PATIENCE_S),
            asyncio.to_thread(self._export, self._published),
        )
        return checkpoint, exported

    async def _go_back(self, stop: Verdict) -> tuple[CheckpointInfo | None, Path | None]:
        try:
            left = await self._checkpointer.go_back(stop.good)
        except OSError as error:
            logger.warning(
                "the weights after %d iterations cannot be fetched from %s, and newer ones may still be there (%s); "
                "once it answers, digenrl resume %s goes on until the guard stops it again",
                *(stop.good, self._stores.main.root, str(error) or type(error).__name__, self.directory.name),
            )
            return None, None
        if left is None:  # the base model was best
            exported = exported_to(self.directory, self.config)
            await asyncio.to_thread(shutil.rmtree, exported, ignore_errors=True)
            return None, None
        _, state, checkpoint = left
        return checkpoint.info, await asyncio.to_thread(self._export, state)

    async def _draw(self, stop: Verdict | None) -> tuple[dict[str, Path], Written]:
        """Pictures by name, and the timeline; one after the other, as matplotlib is not made for threads."""
        pictures = await asyncio.to_thread(draw, self.directory, self.history, stop)
        if self._timeline is None:
            return pictures, Written()
        picture = self.directory.path / "timeline.png"
        written = await self._timeline.finish(self.directory.timeline_path, picture, self.directory.name)
        return pictures | ({"timeline": written.picture} if written.picture is not None else {}), written

    def _places(self, checkpoint: CheckpointInfo | None, exported: Path | None, trace: Path | None = None) -> Places:
        return Places(
            checkpoint=checkpoint.url if checkpoint is not None else None,
            exported=exported,
            mlflow_run_id=self._mlflow_run_id,
            mlflow_page=self.mlflow_page,
            prefect_flow_run_id=self.flow_run_id,
            prefect_page=self._prefect_page,
            example_prompt=(self._data.held_out or self._data.train)[0].text,
            trace=trace,
        )

    def _summary(self, status: str, places: Places, bubbles: Mapping[Cause, float] | None = None) -> dict[str, Any]:
        return summarise(
            self.directory.name,
            self.config,
            self.history,
            places,
            status=status,
            observing=self._observers.share,
            searching=self._clocked.search_share if self._clocked is not None else 0.0,
            bubbles=bubbles,
            guard=self._guard,
        )

    @property
    def _published(self) -> TrainerState | None:
        return self._engine.published[1] if self._engine is not None and self._engine.published is not None else None

    def _export(self, state: TrainerState | None) -> Path | None:
        exported = exported_to(self.directory, self.config)
        if state is None:
            return exported if exported.is_dir() else None  # that of the attempt before this one
        # In a process that has diffusers imported already; as bytes, since a tensor would travel as shared memory.
        context = multiprocessing.get_context(forkserver.METHOD)
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            weights = save_tensors(evaluated(state.adapter, state.optimizer))
            pool.submit(export, self.config, weights, exported).result()
        return exported

"""The MLflow record of a training run: one writer, one explicit run id, no thread-local state.

`Tracker.start` and `Tracker.resume` answer at once or raise; everything after that goes through an `Outbox`, so that
logging neither blocks nor ends the run. A run that crashed and is resumed goes on in the same MLflow run, with one
value per metric and step: what was logged before the crash stays, and its repetition is left out.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
from PIL import Image

from storage.outbox import Outbox

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

T = TypeVar("T")

START_TIMEOUT_S = 15.0
# Limits of MLflow's API for one request, and for the text of a parameter.
MAX_METRICS = 1000
MAX_PARAMS = 100
MAX_PARAM_CHARS = 6000

# MLflow's own retries block for minutes and report nothing; the outbox retries instead. Telemetry is off.
_CLIENT_ENV = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_CONFIGURE_LOGGING": "false",  # it would send its log to the terminal
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "1",
}

#: MLflow's name for a request about something that it does not have.
_ABSENT = "RESOURCE_DOES_NOT_EXIST"

#: Tags by which MLflow knows what an experiment is for, and what its pages say about a run.
KIND_TAG, TRAINING = "mlflow.experimentKind", "custom_model_development"
DESCRIPTION_TAG = "mlflow.note.content"


def run_path(experiment_id: str, run_id: str) -> str:
    """Where MLflow's pages show the charts of a run, behind `#`.

    Without the last part they are those for GenAI applications, traces instead of curves, whatever the experiment is;
    the browser remembers it.
    """
    return f"/experiments/{experiment_id}/runs/{run_id}/model-metrics?workflowType=machine_learning"


class TrackerError(RuntimeError):
    """MLflow could not be reached, or refused, when a run was to be created or resumed."""


class RunMissing(TrackerError):
    """MLflow answers and does not have the run, or it was deleted there."""


class Tracker:
    """Writes one MLflow run.

    Args:
        tracking_uri: ``http://...`` of a server, or ``sqlite:///...``.
        experiment: Name; created if it does not exist.
        artifact_location: Where a new experiment keeps files; only needed without a server, where MLflow's default
            is ``./mlruns``.

    MLflow's request settings are process-wide environment variables; those the user has set are kept.
    """

    def __init__(self, tracking_uri: str, experiment: str, *, artifact_location: str | None = None) -> None:
        for name, value in _CLIENT_ENV.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient  # seconds to import, and it reads the environment

        self._uri = tracking_uri
        self._experiment = experiment
        self._artifact_location = artifact_location
        self._client: MlflowClient = MlflowClient(tracking_uri)
        self._run_id: str | None = None
        self._experiment_id = ""
        self._outbox: Outbox | None = None
        # Touched by the outbox's thread only, once it runs.
        self._last_step: dict[str, int] = {}
        self._images: set[str] = set()

    @property
    def run_id(self) -> str:
        """The MLflow run that is written; RuntimeError before `start` or `resume`."""
        if self._run_id is None:
            raise RuntimeError("the tracker has no run: call start or resume first")
        return self._run_id

    @property
    def page(self) -> str | None:
        """Address of the run's charts in MLflow's pages; None where no server shows any."""
        if not self._uri.startswith(("http://", "https://")):
            return None
        return f"{self._uri.rstrip('/')}/#{run_path(self._experiment_id, self.run_id)}"

    @property
    def degraded_seconds(self) -> float:
        """Time MLflow has been unreachable since `start` or `resume`."""
        return self._outbox.degraded_seconds if self._outbox else 0.0

    def start(self, run_name: str, params: Mapping[str, object], tags: Mapping[str, str] | None = None) -> str:
        """Create a run and return its id. Raises TrackerError."""

        def create() -> Run:
            return self._client.create_run(self._find_experiment(), tags=dict(tags or {}), run_name=run_name)

        run = self._now(create)
        run_id = str(run.info.run_id)
        self._now(lambda: self._log_params(run_id, params))
        self._open(run)
        return run_id

    def resume(self, run_id: str, params: Mapping[str, object], tags: Mapping[str, str] | None = None) -> None:
        """Go on in an existing run, whatever its status; ``tags`` replace those of the same names.

        Raises RunMissing if MLflow does not have it, which leaves `start`; TrackerError otherwise.

        A parameter of an MLflow run cannot change. One that differs now is recorded as the tag
        ``param_changed.<name>``, which holds the value in force since the latest resume.
        """

        def reopen() -> Run:
            run = self._client.get_run(run_id)
            if run.info.lifecycle_stage == "deleted":
                raise RunMissing(f"MLflow at {self._uri} has the run {run_id} among its deleted ones")
            now = {name: _param_text(value) for name, value in params.items()}
            self._log_params(run_id, {name: value for name, value in now.items() if name not in run.data.params})
            for name, before in run.data.params.items():
                tag = f"param_changed.{name}"
                if name in now and now[name] != run.data.tags.get(tag, before):
                    self._client.set_tag(run_id, tag, now[name])
            for tag, text in (tags or {}).items():
                self._client.set_tag(run_id, tag, text)
            self._client.update_run(run_id, status="RUNNING")
            return run

        self._open(self._now(reopen))
        self._put("the list of what is logged already", lambda: self._read_logged(run_id))

    def log_iteration(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one iteration in one request, in the background.

        A value that is not finite is recorded as the metric ``<name>_nonfinite`` = 1: MLflow would store infinity as
        1.8e308. Characters that MLflow does not allow in names become ``_``. Steps must not decrease per metric.
        """
        now_ms = int(time.time() * 1000)  # taken here: MLflow recognises a repeated request by it
        values: dict[str, float] = {}
        for name, value in metrics.items():
            name = re.sub(r"[^/\w.\- :]", "_", name)
            values.update({name: float(value)} if math.isfinite(value) else {f"{name}_nonfinite": 1.0})
        run_id = self.run_id
        self._put("metrics", lambda: self._log_metrics(run_id, step, now_ms, values))

    def log_image(self, path: str, image: np.ndarray | Image.Image, step: int) -> None:
        """Record a picture under ``path`` for MLflow's image grid, in the background.

        Args:
            path: Name with slashes; letters, digits and ``_-./`` and spaces.
            image: PIL image, or array [H, W, 3] or [H, W] of uint8 or of floats in [0, 1]; copied at once.
            step: Iteration. A picture that the run already holds for this path and step is left out.
        """
        copy = np.array(image, copy=True) if isinstance(image, np.ndarray) else image.copy()
        size_bytes = copy.nbytes if isinstance(copy, np.ndarray) else copy.width * copy.height * len(copy.getbands())
        run_id = self.run_id
        self._put("an image", lambda: self._log_image(run_id, path, copy, step), size_bytes)

    def set_tag(self, name: str, text: str) -> None:
        """Tag the run, replacing an earlier text, in the background."""
        run_id = self.run_id
        self._put("a tag", lambda: self._client.set_tag(run_id, name, text))

    def log_artifact(self, path: str | Path, directory: str | None = None) -> None:
        """Upload a file or directory, in the background; it must stay where it is until then."""
        run_id = self.run_id
        self._put("an artifact", lambda: self._client.log_artifact(run_id, str(path), directory))

    def log_text(self, path: str, text: str) -> None:
        """Record ``text`` as the artifact ``path``, replacing an earlier one, in the background."""
        run_id = self.run_id
        self._put("a text", lambda: self._client.log_text(run_id, text, path), len(text))

    def finish(self, status: Literal["FINISHED", "FAILED", "KILLED"] = "FINISHED", timeout_s: float = 30.0) -> int:
        """Deliver what is queued, set the run's status, stop the thread; at most ``timeout_s``. The last call.

        Returns how many records were lost since `start` or `resume`; a line of the log says why.
        """
        run_id = self.run_id
        self._put("the run's status", lambda: self._client.set_terminated(run_id, status))
        assert self._outbox is not None
        return self._outbox.close(timeout_s)

    # Synchronous part.

    def _now(self, call: Callable[[], T]) -> T:
        """The result of ``call``, tried until START_TIMEOUT_S have passed."""
        deadline, delay_s = time.monotonic() + START_TIMEOUT_S, 0.5
        while True:
            try:
                return call()
            except Exception as error:
                if isinstance(error, TrackerError):
                    raise
                if _is_refusal(error):
                    kind = RunMissing if getattr(error, "error_code", "") == _ABSENT else TrackerError
                    raise kind(f"MLflow at {self._uri} refused: {error}") from error
                if time.monotonic() + delay_s > deadline:
                    raise TrackerError(
                        f"MLflow at {self._uri} was not reachable for {START_TIMEOUT_S:.0f} s: {error}"
                    ) from error
            time.sleep(delay_s)
            delay_s *= 2

    def _find_experiment(self) -> str:
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(self._experiment)
        if found is None:
            try:
                kind = {KIND_TAG: TRAINING}
                return str(self._client.create_experiment(self._experiment, self._artifact_location, kind))
            except MlflowException:  # another run created it since
                found = self._client.get_experiment_by_name(self._experiment)
                if found is None:
                    raise
        if KIND_TAG not in found.tags:
            self._client.set_experiment_tag(found.experiment_id, KIND_TAG, TRAINING)
        return str(found.experiment_id)

    def _log_params(self, run_id: str, params: Mapping[str, object]) -> None:
        from mlflow.entities import Param

        texts = [Param(name, _param_text(value)) for name, value in params.items()]
        for i in range(0, len(texts), MAX_PARAMS):
            self._client.log_batch(run_id, params=texts[i : i + MAX_PARAMS])

    def _open(self, run: Run) -> None:
        self._run_id, self._experiment_id = str(run.info.run_id), str(run.info.experiment_id)
        self._outbox = Outbox(f"MLflow at {self._uri}", is_refusal=_is_refusal, answers=self._answers)

    # What the outbox's thread runs.

    def _put(self, kind: str, send: Callable[[], object], size_bytes: int = 0) -> None:
        if self._outbox is None:
            raise RuntimeError(f"the tracker cannot take {kind}: call start or resume first")
        self._outbox.put(kind, send, size_bytes)

    def _answers(self) -> bool:
        try:
            self._client.get_run(self.run_id)
        except Exception as error:
            return _is_refusal(error)
        return True

    def _read_logged(self, run_id: str) -> None:
        """Learn which steps and pictures a resumed run holds."""
        for name in self._client.get_run(run_id).data.metrics:
            self._last_step[name] = max(metric.step for metric in self._client.get_metric_history(run_id, name))
        self._images = {
            _image_prefix(file.path) for file in self._client.list_artifacts(run_id, "images") if not file.is_dir
        }

    def _log_metrics(self, run_id: str, step: int, now_ms: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        fresh = [Metric(k, v, now_ms, step) for k, v in values.items() if step > self._last_step.get(k, -1)]
        for i in range(0, len(fresh), MAX_METRICS):
            self._client.log_batch(run_id, metrics=fresh[i : i + MAX_METRICS])
        self._last_step.update(dict.fromkeys((metric.key for metric in fresh), step))

    def _log_image(self, run_id: str, path: str, image: np.ndarray | Image.Image, step: int) -> None:
        prefix = f"images/{path.replace('/', '~')}+step+{step}"
        if prefix not in self._images:
            self._client.log_image(run_id, image, key=path, step=step)
            self._images.add(prefix)


def _image_prefix(file: str) -> str:
    """``images/<path>+step+<step>`` of the file name MLflow gives an image, the rest of which is arbitrary."""
    return file.partition("+timestamp+")[0]


def _param_text(value: object) -> str:
    text = str(value)
    return text if len(text) <= MAX_PARAM_CHARS else text[: MAX_PARAM_CHARS - 1] + "…"


def _is_refusal(error: Exception) -> bool:
    """Whether trying again cannot help: the request, not the connection, is at fault."""
    from mlflow.exceptions import MlflowException
    from requests import HTTPError

    if isinstance(error, MlflowException):
        status = int(error.get_http_status_code())  # type: ignore[no-untyped-call]
    elif isinstance(error, HTTPError) and error.response is not None:
        status = error.response.status_code
    else:
        return isinstance(error, FileNotFoundError | ValueError | TypeError)
    return 400 <= status < 500 and status not in (408, 429)

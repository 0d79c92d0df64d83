"""Opens and ends the MLflow run of a training run; flows.tracking writes into it meanwhile."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from digenrl.config import RunConfig
from storage.tracker import DESCRIPTION_TAG, RunMissing, Tracker

logger = logging.getLogger(__name__)

#: What MLflow calls the end of a run.
MLFLOW_STATUS: dict[str, Literal["FINISHED", "FAILED", "KILLED"]] = {
    "completed": "FINISHED",
    "cancelled": "KILLED",
    "guarded": "KILLED",
    "failed": "FAILED",
}

#: How long the end of a run may wait until MLflow has taken what is queued.
DELIVERY_S = 30.0
CANCELLED_DELIVERY_S = 4.0


def open_tracker(config: RunConfig, name: str, mlflow_run_id: str | None, description: str) -> Tracker | None:
    """Go on with an MLflow run, or begin one.

    Args:
        config: of the training run.
        name: of the training run.
        mlflow_run_id: of the attempt before this one; None if there was none.
        description: Markdown for its page.

    Returns:
        None if the run is not tracked.

    Raises:
        TrackerError: MLflow cannot be reached, or refuses.
    """
    if config.tracking.uri == "none":
        return None
    uri = os.environ["MLFLOW_TRACKING_URI"] if config.tracking.uri == "managed" else config.tracking.uri
    tracker = Tracker(uri, config.tracking.experiment)
    params = _flat(config.model_dump(mode="json"))
    tags = {"digenrl.run": name, DESCRIPTION_TAG: description}
    if mlflow_run_id is not None:
        try:
            tracker.resume(mlflow_run_id, params, tags)
            return tracker
        except RunMissing:
            logger.warning(
                "MLflow at %s does not have the run %s of the attempt before: a new one takes the metrics so far, and "
                "has no pictures of them",
                *(uri, mlflow_run_id),
            )
    tracker.start(name, params, tags)
    return tracker


def close_tracker(tracker: Tracker, status: str, files: Sequence[Path | None]) -> None:
    """Upload what a run leaves, and end its MLflow run.

    Args:
        tracker: of the run.
        status: completed, cancelled, guarded or failed.
        files: that are there.
    """
    for path in files:
        if path is not None:
            tracker.log_artifact(path)
    # Whoever asked for the end is waiting for it.
    timeout_s = CANCELLED_DELIVERY_S if status == "cancelled" else DELIVERY_S
    tracker.finish(MLFLOW_STATUS[status], timeout_s)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = str(value)
    return flat

"""Where a run computes, and what goes on beside its iterations: evaluation, checkpoints, gates, tracking."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from digenrl.config.errors import shown
from digenrl.config.section import PositiveInt, Section


class ClusterConfig(Section):
    """Where work runs."""

    address: str = Field("local", description="local, tcp://HOST:PORT or tls://HOST:PORT of a Dask scheduler.")
    workers: PositiveInt = Field(2, description="Worker processes of a local cluster.")
    trainers: PositiveInt = Field(1, description="Workers that train (layouts disaggregated and digenrl).")
    device: Literal["cpu", "cuda"] = Field("cpu", description="Device the workers compute on.")
    worker_ttl_s: float = Field(30.0, ge=5, le=86400, description="A worker silent for longer counts as lost.")


class EvaluationConfig(Section):
    """Held-out evaluation with fixed noise."""

    every: int = Field(10, ge=0, description="Evaluate every n iterations, and at start and end (0: never).")
    prompts: int = Field(200, ge=0, description="Held-out prompts per evaluation (at most as many as there are).")
    num_steps: int = Field(10, ge=1, le=1000, description="Denoising steps, deterministic.")
    seed: int = Field(0, ge=0, description="Seed of the evaluation noise.")
    micro_batch: PositiveInt = Field(25, description="Samples per evaluation unit.")


class KeepConfig(Section):
    """Which checkpoints stay, besides what the guard may go back to; the others are removed."""

    last: PositiveInt = Field(3, description="Keep the newest n.")
    best: int = Field(0, ge=0, description="Keep the n with the highest held-out reward too.")
    every: int = Field(0, ge=0, description="Keep those after a multiple of n iterations too (0: none for that).")


class CheckpointConfig(Section):
    """When and where state is saved."""

    every: int = Field(
        10,
        ge=0,
        description="Save every n iterations, and at the end (0: only at the end); with guard.mode=stop also what is "
        "evaluated.",
    )
    keep: KeepConfig = Field(default_factory=KeepConfig)
    url: str | None = Field(
        None,
        min_length=1,
        description="Directory or fsspec URL, such as s3://BUCKET/PREFIX, below which the run's checkpoints go, in a "
        "folder with its name; null: the run's own directory.",
    )
    endpoint: str | None = Field(
        None, description="URL of the S3 service; null: AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL, else AWS."
    )
    credentials_block: str | None = Field(
        None,
        min_length=1,
        description="Prefect Secret block with {key, secret, token, endpoint} for S3, the last two optional; null: "
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or whatever else botocore finds.",
    )

    @model_validator(mode="after")
    def _no_secrets(self) -> CheckpointConfig:
        # The values are in none of these sentences.
        for name, url in (("url", self.url), ("endpoint", self.endpoint)):
            if url is not None and "@" in urlsplit(url).netloc:
                raise ValueError(
                    f"{name} holds a key, and would be shown in logs and pages; put it into AWS_ACCESS_KEY_ID and "
                    f"AWS_SECRET_ACCESS_KEY, or into a Prefect block (checkpoint.credentials_block)"
                )
        return self

    @model_validator(mode="after")
    def _endpoint(self) -> CheckpointConfig:
        for name in ("endpoint", "credentials_block"):
            if getattr(self, name) is not None and not (self.url or "").startswith("s3://"):
                raise ValueError(f"{name} is for S3 alone: set checkpoint.url=s3://BUCKET/PREFIX too, or leave it out")
        if self.endpoint is not None and not self.endpoint.startswith(("http://", "https://")):
            raise ValueError(f"endpoint must begin with http:// or https://, got {shown(self.endpoint)}")
        return self


class GatesConfig(Section):
    """Checks that stop a run which would silently learn nothing or the wrong thing."""

    max_logp_gap: float | None = Field(
        None,
        gt=0,
        description="Limit of |log p at training - log p at rollout| under the same weights; null: five times what "
        "rounding was found to do on the trainers, then what the first update shows, and at least 1e-6.",
    )
    max_bad_updates: int = Field(3, ge=0, description="Updates skipped for non-finite gradients before the run stops.")
    max_failed_share: float = Field(
        0.5, ge=0, le=1, description="Share of failed samples in one iteration above which the run stops."
    )
    on_failed: Literal["exclude", "redraw"] = Field(
        "exclude",
        description="Samples without a reward: exclude leaves them out of their group; redraw generates their "
        "micro-batch again with fresh noise for them, and leaves out what fails each time.",
    )
    max_redraws: PositiveInt = Field(
        2, le=100, description="How often redraw draws the samples of a micro-batch again."
    )


class TrackingConfig(Section):
    """MLflow."""

    experiment: str = Field("digenrl", min_length=1, description="MLflow experiment.")
    uri: str = Field(
        "managed", min_length=1, description="managed: DigenRL's own MLflow server; else a tracking URI; none: off."
    )

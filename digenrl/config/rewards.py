"""What samples are rewarded for: a list of terms, each a reward with its settings."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from digenrl.config.section import PositiveInt, Section

#: Begins the name of a reward that is a function of the user's.
PYTHON_PREFIX = "python:"


class RequestConfig(Section):
    """How a scorer behind an HTTP address is asked."""

    samples: PositiveInt = Field(8, description="Samples per request; a request that fails fails all of them.")
    concurrency: PositiveInt = Field(4, le=256, description="Requests that one worker has under way at a time.")
    timeout_s: float = Field(30.0, gt=0, description="How long one attempt may take.")
    deadline_s: float = Field(120.0, gt=0, description="How long a micro-batch may take, with every attempt and wait.")
    attempts: PositiveInt = Field(
        4, le=100, description="Attempts per request: transport errors, 408, 429 and 5xx are tried again."
    )
    backoff_s: float = Field(0.5, gt=0, description="Longest wait before the second attempt; doubles with each more.")
    break_after: PositiveInt = Field(8, description="Attempts that fail in a row until the address is left alone.")
    rest_s: float = Field(10.0, gt=0, description="How long it is left alone; one attempt then decides.")
    token_env: str | None = Field(
        None, min_length=1, description="Environment variable, on the workers, that holds the bearer token."
    )
    image_format: Literal["png", "webp"] = Field("webp", description="How pictures travel; both are lossless.")


class RewardConfig(Section):
    """One term of the reward."""

    name: str = Field(description="Registered reward, or python:MODULE:FUNCTION.")
    weight: float = Field(1.0, description="Weight in the sum of rewards.")
    normalise: Literal["none", "std", "rank"] = Field(
        "none",
        description="What is done to the values of this reward before they are summed. std: minus the mean of the "
        "group, divided by the standard deviation as algorithm.std_scope says; rank: the rank within the group, from 0 "
        "(lowest) to 1, equal values share the mean of theirs.",
    )
    label: str | None = Field(
        None, min_length=1, description="What it is called in metrics; null: its name. Needed to use one reward twice."
    )
    frames: PositiveInt | None = Field(None, description="Frames of a video it sees, evenly spaced; null: all.")
    path: str | None = Field(None, min_length=1, description="Its weights: a directory, a file or a hub id.")
    device: Literal["cpu", "cuda"] | None = Field(None, description="Where its model runs; null: cpu.")
    field: str | None = Field(
        None, min_length=1, description="Field of the prompt record it compares with; null: the reward's own."
    )
    match: Literal["distance", "exact"] | None = Field(
        None, description="How ocr compares: by edit distance, or 1 for the very text and else 0; null: distance."
    )
    url: str | None = Field(None, min_length=1, description="Address of a reward server or of an API.")
    version: str | None = Field(
        None, min_length=1, description="Version a reward server must answer with; null: that of its first answer."
    )
    model: str | None = Field(None, min_length=1, description="Name of the model behind an API.")
    question: str | None = Field(
        None, min_length=1, description="What a judge is asked; {prompt} and {FIELD} of the record are filled in."
    )
    request: RequestConfig = Field(default_factory=RequestConfig)

    @property
    def called(self) -> str:
        """Its name in metrics."""
        if self.label is not None:
            return self.label
        return self.name.rpartition(":")[2] if self.name.startswith(PYTHON_PREFIX) else self.name

    def same_values(self, other: RewardConfig) -> bool:
        """Whether it gives every sample the value that `other` gives, whatever becomes of it."""
        aside: dict[str, object] = {"weight": 1.0, "label": None, "normalise": "none"}
        return self.model_copy(update=aside) == other.model_copy(update=aside)

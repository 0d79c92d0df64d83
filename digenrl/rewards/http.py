"""Reward of a scorer that runs elsewhere, in an environment of its own: see `digenrl.rewards.wire` for the protocol.

A request that fails for good fails its samples, each with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence

import httpx
import numpy as np
from numpy.typing import NDArray

from digenrl.config.rewards import RequestConfig
from digenrl.rewards.base import Failed, PromptRecord, Reward, RewardCard, Score, frames_of
from digenrl.rewards.calls import Answer, CallFailed, Endpoint, checked_url
from digenrl.rewards.pictures import chunks_of
from digenrl.rewards.wire import WireError, request_of, scores_of

#: How long the check before a run waits.
_READY_S = 5.0


class HttpReward(Reward):
    """What a reward server answers.

    Args:
        url: of the server, without a path.
        version: it must answer with; None: the version of its first answer, which may not change in a run.
        request: how it is asked.
    """

    name = "http"
    card = RewardCard("what a reward server answers", "the server's", licence="the server's", weights="the server's")

    def __init__(self, *, url: str, version: str | None = None, request: RequestConfig | None = None) -> None:
        self.request = request or RequestConfig()
        self.url = checked_url(url).rstrip("/")
        self.version = version
        self._endpoint = Endpoint(f"{self.url}/score", self.request)

    def problem(self) -> str | None:
        """Ask the server whether it is ready; see `Reward`."""
        try:
            answer = httpx.get(f"{self.url}/ready", timeout=_READY_S)
        except httpx.HTTPError as error:
            return (
                f"reward {self.name}: nobody answers at url={self.url} ({type(error).__name__}: {error}); start "
                "one with: digenrl reward-server NAME"
            )
        if not answer.is_success:
            return f"reward {self.name}: url={self.url} is not ready (HTTP {answer.status_code}: {answer.text[:200]})"
        try:
            version = answer.json().get("version")
        except (ValueError, AttributeError):
            return f"reward {self.name}: url={self.url} is no reward server: /ready must answer with a JSON object"
        if self.version is not None and version != self.version:
            return f"reward {self.name}: url={self.url} serves version {version!r}, not version={self.version!r}"
        return None

    def load(self) -> None:
        """Check that the token is there; see `Reward`."""
        self._endpoint.headers()

    def __call__(self, images: NDArray[np.uint8], prompts: Sequence[PromptRecord]) -> list[Score]:
        """Score B samples; see `Reward`."""
        frames_of(images, prompts)
        parts = list(chunks_of(len(prompts), self.request.samples))
        bodies = [request_of(images[part], prompts[part], self.request.image_format) for part in parts]
        answers = self._endpoint.call_all(bodies) if bodies else []
        sizes = [len(prompts[part]) for part in parts]
        return [score for answer, size in zip(answers, sizes, strict=True) for score in self._scores(answer, size)]

    def _scores(self, answer: Answer, count: int) -> list[Score]:
        if isinstance(answer, CallFailed):
            return [Failed(answer.reason)] * count
        try:
            version, scores = scores_of(answer, count)
        except WireError as error:
            return [Failed(f"{self.url}: {error}")] * count
        if self.version is None:
            self.version = version
        if version != self.version:
            return [Failed(f"{self.url} serves version {version!r}, not {self.version!r}: not comparable")] * count
        return scores

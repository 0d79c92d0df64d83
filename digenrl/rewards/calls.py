"""POST requests to a scorer that may be slow, full, restarting or gone.

    Endpoint        an address with its rules
    call_all(...)   several requests, so many at a time, within one deadline

Tried again, with full jitter (https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/): transport
errors, attempts that take too long, 408, 429 and 5xx; a Retry-After is obeyed. Everything else fails at once. A request
that fails for good gives a `CallFailed`, never a value.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from digenrl.config.rewards import RequestConfig
from digenrl.rewards.base import RewardError
from digenrl.rewards.breaker import CircuitBreaker

#: Characters of an answer's text that go into a reason.
_LONGEST = 200


@dataclass(frozen=True)
class CallFailed:
    """Why a request has no answer."""

    reason: str


#: The JSON of an answer, or why there is none.
Answer = Mapping[str, Any] | CallFailed


class _TryAgain(Exception):
    """An attempt failed, and another may not."""

    def __init__(self, reason: str, after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.after_s = after_s


class Endpoint:
    """An address to POST to.

    Args:
        url: the whole of it.
        rules: attempts, deadlines, concurrency and token.
        rng: of the jitter; None: one of its own, as workers must not wait in step.

    Raises:
        RewardError: it is no http or https address.
    """

    def __init__(self, url: str, rules: RequestConfig, rng: random.Random | None = None) -> None:
        self.url = checked_url(url)
        self.rules = rules
        self._rng = rng or random.Random()
        self._breaker = CircuitBreaker(rules.break_after, rules.rest_s)
        self._tls = httpx.create_ssl_context() if self.url.startswith("https") else False

    def headers(self) -> dict[str, str]:
        """What authorises requests. Raises RewardError if the token is not there."""
        name = self.rules.token_env
        if name is None:
            return {}
        token = os.environ.get(name, "").strip()
        if not token:
            raise RewardError(f"request.token_env={name}: this environment variable is not set; {self.url} needs it")
        return {"Authorization": f"Bearer {token}"}

    def call_all(self, bodies: Sequence[Any]) -> list[Answer]:
        """Answers to all requests, in their order. Blocks until all are there, at most for `deadline_s`."""
        # On a loop of its own in a thread of its own, so that a caller may have one running.
        with ThreadPoolExecutor(1, thread_name_prefix="reward-calls") as pool:
            return pool.submit(asyncio.run, self._call_all(bodies)).result()

    async def _call_all(self, bodies: Sequence[Any]) -> list[Answer]:
        deadline = time.monotonic() + self.rules.deadline_s
        slots = asyncio.Semaphore(self.rules.concurrency)
        async with httpx.AsyncClient(headers=self.headers(), timeout=None, verify=self._tls) as client:
            return await asyncio.gather(*(self._call(client, slots, body, deadline) for body in bodies))

    async def _call(self, client: httpx.AsyncClient, slots: asyncio.Semaphore, body: Any, deadline: float) -> Answer:
        last = "no attempt was made"
        try:
            async with asyncio.timeout_at(_loop_time(deadline)), slots:
                for attempt in range(1, self.rules.attempts + 1):
                    if (rest_s := self._breaker.wait_s(time.monotonic())) > 0:
                        return CallFailed(f"{self.url} is left alone for {rest_s:.1f} s after failing again and again")
                    try:
                        return await self._attempt(client, body)
                    except _TryAgain as error:
                        last = f"{error} (attempt {attempt} of {self.rules.attempts})"
                        if attempt < self.rules.attempts:
                            await asyncio.sleep(self._pause_s(attempt, error.after_s))
        except TimeoutError:
            return CallFailed(f"{self.url}: no answer within deadline_s={self.rules.deadline_s:g}; last: {last}")
        return CallFailed(f"{self.url}: {last}")

    async def _attempt(self, client: httpx.AsyncClient, body: Any) -> Answer:
        """One attempt. Raises _TryAgain."""
        settled = False
        try:
            async with asyncio.timeout(self.rules.timeout_s):
                response = await client.post(self.url, json=body)
            settled = not retried(response.status_code)
        except TimeoutError:
            raise _TryAgain(f"no answer within timeout_s={self.rules.timeout_s:g}") from None
        except httpx.TransportError as error:
            raise _TryAgain(f"{type(error).__name__}: {error}") from error
        finally:
            # Also when the deadline cuts it short: half-open, the breaker waits to hear of this attempt.
            if settled:
                self._breaker.succeeded()
            else:
                self._breaker.failed(time.monotonic())
        if not settled:
            raise _TryAgain(_refusal(response), _retry_after_s(response))
        if not response.is_success:
            return CallFailed(f"{self.url}: {_refusal(response)}")
        try:
            answer = response.json()
        except ValueError:
            answer = None
        return answer if isinstance(answer, Mapping) else CallFailed(f"{self.url} did not answer with a JSON object")

    def _pause_s(self, attempt: int, at_least_s: float) -> float:
        longest = self.rules.backoff_s * 2.0 ** (attempt - 1)
        return max(self._rng.uniform(0, longest), at_least_s)


def retried(status: int) -> bool:
    """Whether a request that is answered with this status is sent again."""
    return status in (408, 429) or status >= 500


def checked_url(url: str) -> str:
    """`url`, if it is an absolute http or https address. Raises RewardError."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise RewardError(f"url={url!r} is no address ({error})") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise RewardError(f"url={url!r} must begin with http:// or https:// and a host, such as http://127.0.0.1:8100")
    return url


def _loop_time(deadline: float) -> float:
    return asyncio.get_running_loop().time() + deadline - time.monotonic()


def _refusal(response: httpx.Response) -> str:
    """Status and what the server says to it."""
    try:
        said = response.json()
        detail = said.get("detail", said) if isinstance(said, Mapping) else said
    except ValueError:
        detail = response.text
    text = " ".join(str(detail).split())[:_LONGEST]
    return f"HTTP {response.status_code}" + (f": {text}" if text else "")


def _retry_after_s(response: httpx.Response) -> float:
    """Seconds of a Retry-After header; a date in it, which needs clocks that agree, is passed over."""
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isdecimal() else 0.0

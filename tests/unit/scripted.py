"""A scorer that answers by a script: for tests of what clients do with bad answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from http_servers import Quiet, serving

#: What to do with one request: a status, or "hang" (until the test ends), or "drop" the connection.
Step = int | str


@dataclass
class Script:
    """What is answered, and what was asked.

    Attributes:
        steps: for one request each, in the order of arrival; 200 when they are used up.
        answer: body of a 200, from the body of the request.
        headers: of every answer.
        seen: bodies that arrived.
        tokens: Authorization headers that arrived.
        most: requests that were open at one time.
        slow_s: how long a 200 takes.
    """

    steps: list[Step]
    answer: Callable[[Mapping[str, Any]], object]
    headers: Mapping[str, str] = field(default_factory=dict)
    seen: list[Mapping[str, Any]] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)
    most: int = 0
    slow_s: float = 0.0
    url: str = ""
    _open: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    over: threading.Event = field(default_factory=threading.Event)

    def take(self, body: Mapping[str, Any], token: str | None) -> Step:
        """Note a request; what to do with it."""
        with self._lock:
            self.seen.append(body)
            self.tokens.append(token)
            self._open += 1
            self.most = max(self.most, self._open)
            return self.steps.pop(0) if self.steps else 200

    def leave(self) -> None:
        """A request was answered."""
        with self._lock:
            self._open -= 1


@contextmanager
def scripted(steps: Sequence[Step], answer: Callable[[Mapping[str, Any]], object], **more: Any) -> Iterator[Script]:
    """A server that follows a script within the block."""
    script = Script(list(steps), answer, **more)

    class Handler(Quiet):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            step = script.take(body, self.headers.get("Authorization"))
            try:
                self._do(step, body)
            finally:
                script.leave()

        def _do(self, step: Step, body: Mapping[str, Any]) -> None:
            if step == "hang":
                script.over.wait(60)
            if isinstance(step, str):
                return  # the connection is closed without an answer
            if step == 200:
                script.over.wait(script.slow_s)
            said = script.answer(body) if step == 200 else {"detail": f"scripted {step}"}
            data = said if isinstance(said, bytes) else json.dumps(said).encode()
            self.send_response(step)
            for name, value in {**script.headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

    with serving(Handler) as url:
        script.url = url
        try:
            yield script
        finally:
            script.over.set()

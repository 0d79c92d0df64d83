"""The run's own log lines on its page in Prefect, under "Logs".

with flow_log(flow_run_id): ...

One thread sends them, a batch a second. A server that is slow or gone costs lines, never time: what does not fit the
buffer is forgotten, and the end of the run waits for `CLOSE_S` at most. The whole log is in `<run>/log.txt`.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from uuid import UUID

from prefect import get_client
from prefect.client.schemas.actions import LogCreate

from flows.logs import OURS

PERIOD_S = 1.0
CLOSE_S = 2.0
#: Lines of one request, and lines kept while the server does not answer.
BATCH = 200
KEPT = 2000


@contextmanager
def flow_log(flow_run_id: UUID) -> Iterator[None]:
    """Within it, what our packages log from level INFO on goes to the flow run's page as well."""
    handler = _FlowLog(flow_run_id)
    for name in OURS:
        logging.getLogger(name).addHandler(handler)
    try:
        yield
    finally:
        for name in OURS:
            logging.getLogger(name).removeHandler(handler)
        handler.close()


class _FlowLog(logging.Handler):
    def __init__(self, flow_run_id: UUID) -> None:
        super().__init__(logging.INFO)
        self._flow_run_id = flow_run_id
        self._lines: deque[LogCreate] = deque(maxlen=KEPT)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flow log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        line = LogCreate(
            name=record.name,
            level=record.levelno,
            message=record.getMessage(),
            timestamp=datetime.fromtimestamp(record.created, UTC),
            flow_run_id=self._flow_run_id,
        )
        self._lines.append(line)

    def close(self) -> None:
        """Send what is left, for a moment. A thread within a request does not keep the process alive."""
        self._closing.set()
        self._thread.join(CLOSE_S)
        super().close()

    def _run(self) -> None:
        last = False
        while not last:
            last = self._closing.wait(PERIOD_S)
            while self._lines and self._sent([self._lines.popleft() for _ in range(min(BATCH, len(self._lines)))]):
                continue

    def _sent(self, lines: Sequence[LogCreate]) -> bool:
        """Whether the server took them. If not, they wait for the next period, before the newer ones."""
        try:
            with get_client(sync_client=True) as client:
                client.create_logs(lines)
        except Exception:  # no log is worth a run; that the server is gone is said by others
            if len(self._lines) + len(lines) <= KEPT:
                self._lines.extendleft(reversed(lines))
            return False
        return True

"""A request to stop counts once, and reaches also those who ask for it later."""

from __future__ import annotations

import asyncio
import os
import signal

from flows.stopping import Stop, signals


def test_actions_run_once_whenever_they_are_added() -> None:
    stop, done = Stop(), []
    stop.then(lambda: done.append("before"))
    assert not stop.requested
    stop.request("SIGINT")
    stop.request("a cancellation in Prefect")
    stop.then(lambda: done.append("after"))
    assert stop.requested
    assert done == ["before", "after"]


def test_the_first_signal_requests_the_stop_and_the_second_acts_as_usual() -> None:
    async def main() -> list[str]:
        stop, received = Stop(), []
        before = signal.signal(signal.SIGTERM, lambda *_: received.append("as usual"))
        try:
            with signals(stop):
                os.kill(os.getpid(), signal.SIGTERM)
                async with asyncio.timeout(5):
                    while not stop.requested:
                        await asyncio.sleep(0.001)
                assert received == []
                os.kill(os.getpid(), signal.SIGTERM)
            assert signal.getsignal(signal.SIGINT) is not signal.SIG_DFL
            return received
        finally:
            signal.signal(signal.SIGTERM, before)

    interrupt = signal.getsignal(signal.SIGINT)
    assert asyncio.run(main()) == ["as usual"]
    assert signal.getsignal(signal.SIGINT) is interrupt

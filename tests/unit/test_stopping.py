"""A request to stop counts once, and reaches also those who ask for it later."""

from __future__ import annotations

import asyncio
import os
import signal

from flows.stopping import SAME_S, Stop, signals


def test_actions_run_once_whenever_they_are_added() -> None:
    stop, done = Stop(), []
    stop.then(lambda: done.append("before"))
    assert not stop.requested
    stop.request("SIGINT")
    stop.request("a cancellation in Prefect")
    stop.then(lambda: done.append("after"))
    assert stop.requested
    assert done == ["before", "after"]


def test_the_first_signal_requests_the_stop_and_a_later_one_acts_as_usual() -> None:
    async def main() -> list[str]:
        stop, received = Stop(), []
        before = signal.signal(signal.SIGTERM, lambda *_: received.append("as usual"))
        try:
            with signals(stop):
                os.kill(os.getpid(), signal.SIGTERM)
                async with asyncio.timeout(5):
                    while not stop.requested:
                        await asyncio.sleep(0.001)
                os.kill(os.getpid(), signal.SIGTERM)  # `timeout` sends it twice
                assert received == []
                await asyncio.sleep(SAME_S + 0.1)
                os.kill(os.getpid(), signal.SIGTERM)
            assert signal.getsignal(signal.SIGINT) is not signal.SIG_DFL
            return received
        finally:
            signal.signal(signal.SIGTERM, before)

    interrupt = signal.getsignal(signal.SIGINT)
    assert asyncio.run(main()) == ["as usual"]
    assert signal.getsignal(signal.SIGINT) is interrupt


def test_a_process_that_is_to_survive_its_terminal_does() -> None:
    async def main() -> bool:
        stop = Stop()
        with signals(stop):
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.05)
        return stop.requested

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        assert not asyncio.run(main())
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signal.signal(signal.SIGHUP, lambda *_: None)
        assert asyncio.run(main())
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_was_asked_for_in_vain_is_cancelled() -> None:
    async def main() -> tuple[str | None, str | None, bool]:
        stop = Stop()
        first = await stop.unless(asyncio.sleep(0, "done"))
        waiting = asyncio.ensure_future(asyncio.sleep(60, "never"))
        asyncio.get_running_loop().call_later(0.05, stop.request, "SIGINT")
        return first, await stop.unless(waiting), waiting.cancelled()

    assert asyncio.run(main()) == ("done", None, True)

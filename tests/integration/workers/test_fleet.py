"""Who is there: arrivals and departures in any order, on a real cluster inside this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from distributed import Client, LocalCluster

from digenrl.scheduling.messages import Event, WorkerJoined, WorkerLost
from runs import small
from workers.fleet import Fleet
from workers.presence import card
from workers.receipts import RunSetup

DEADLINE_S = 30.0


class Heard:
    """A fleet, and what it said."""

    def __init__(self, client: Client) -> None:
        self.events: list[Event] = []
        self.sentences: list[str] = []
        self.fleet = Fleet(client, RunSetup("epoch", small(), 0), emit=self.events.append, say=self.sentences.append)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.01)

    @property
    def present(self) -> set[str]:
        """Incarnations that joined and are not lost."""
        joined = {event.worker for event in self.events if isinstance(event, WorkerJoined)}
        return joined - {event.worker for event in self.events if isinstance(event, WorkerLost)}


@asynccontextmanager
async def cluster(workers: int) -> AsyncIterator[tuple[LocalCluster, Client]]:
    async with (
        LocalCluster(
            n_workers=workers,
            threads_per_worker=2,
            processes=False,
            asynchronous=True,
            dashboard_address="127.0.0.1:0",
            scheduler_kwargs={"dashboard": False},
            memory_limit=0,
        ) as found,
        Client(found, asynchronous=True) as client,
    ):
        yield found, client


async def _joins_and_leaves() -> None:
    async with cluster(1) as (found, client):
        heard = Heard(client)
        await heard.fleet.start()
        await heard.until(lambda: len(heard.present) == 1)
        found.scale(2)
        await heard.until(lambda: len(heard.present) == 2)
        lost = {c.incarnation for c in (await client.run(card)).values() if c.name == "1"}
        found.scale(1)
        await heard.until(lambda: len(heard.present) == 1)
        assert heard.present.isdisjoint(lost)
        assert not heard.fleet.alive(*lost)
        assert heard.fleet.size == 1
        assert heard.fleet.named(f"at {next(iter(lost))}") == "at worker 1"
        await heard.fleet.close()


def test_workers_join_and_leave() -> None:
    asyncio.run(_joins_and_leaves())


async def _leaves_at_the_start() -> None:
    async with cluster(2) as (found, client):
        heard = Heard(client)
        await asyncio.gather(heard.fleet.start(), found.workers[1].close())
        await heard.until(lambda: not heard.fleet.preparing)
        assert heard.fleet.size == len(heard.present) == 1
        await heard.fleet.close()


def test_a_worker_that_leaves_while_the_fleet_takes_stock_does_not_stay_in_the_books() -> None:
    asyncio.run(_leaves_at_the_start())


async def _leaves_while_preparing() -> None:
    async with cluster(1) as (found, client):
        heard = Heard(client)
        await heard.fleet.start()
        assert heard.fleet.preparing
        await found.workers[0].close()
        await heard.until(lambda: not heard.fleet.preparing)
        assert heard.fleet.size == 0
        assert not heard.events
        assert any(sentence.endswith("is gone") for sentence in heard.sentences)
        heard.fleet.check()
        await heard.fleet.close()


def test_a_worker_that_leaves_before_it_is_ready_never_joined() -> None:
    asyncio.run(_leaves_while_preparing())


async def _closed() -> None:
    async with cluster(1) as (found, client):
        heard = Heard(client)
        await heard.fleet.start()
        await heard.until(lambda: len(heard.present) == 1)
        await heard.fleet.close()
        said = list(heard.sentences)
        found.scale(2)
        await client.wait_for_workers(2, timeout=DEADLINE_S)
        assert heard.sentences == said
        assert heard.fleet.size == 1


def test_a_closed_fleet_hears_nothing() -> None:
    asyncio.run(_closed())

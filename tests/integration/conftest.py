"""What integration tests share: one Prefect and one MLflow server in a home of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from flows.services import ServicesHandle, ensure
from flows.services.ports import claim
from flows.services.specs import SPECS

if TYPE_CHECKING:
    from s3_server import S3Server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A running S3 service; a test that stops it starts it again."""
    from s3_server import S3Server  # its client takes a second to import

    started = S3Server(tmp_path_factory.mktemp("s3"))
    try:
        started.start()
        yield started
    finally:
        started.kill()


@pytest.fixture(scope="session")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServicesHandle]:
    """Healthy servers for the whole session.

    Tests must leave them running. A subprocess that uses Prefect gets ``{**os.environ, **services.client_env()}``.
    """
    # Nothing may depend on Prefect having its usual port.
    first = claim(SPECS["prefect"].first_port)
    try:
        with ensure(owner="pytest", home=tmp_path_factory.mktemp("home")) as handle:
            yield handle
    finally:
        if first is not None:
            first.release()

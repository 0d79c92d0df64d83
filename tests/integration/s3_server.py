"""A real S3 service, SeaweedFS, and a connection to it that fails when it is told to."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import s3fs

from storage.s3 import S3Store
from storage.stores import S3Access

WEED = Path(sys.executable).with_name("weed")
KEY, SECRET, BUCKET = "test-key", "test-secret-42ab", "runs"
#: Of its processes, in the order of PORTS.
PORTS = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc")
READY_S = 60.0


class S3Server:
    """One server on ports of its own; what it holds outlives a restart."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._ports = _free_ports(len(PORTS) + 2)
        self.endpoint = f"http://127.0.0.1:{self._ports[-2]}"
        self.access = S3Access(self.endpoint, KEY, SECRET)
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        credentials = [{"accessKey": KEY, "secretKey": SECRET}]
        identities = [{"name": "admin", "credentials": credentials, "actions": actions}]
        (directory / "s3.json").write_text(json.dumps({"identities": identities}))

    @property
    def environment(self) -> dict[str, str]:
        """What a user sets."""
        return {"AWS_ENDPOINT_URL": self.endpoint, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}

    def files(self) -> Any:
        """A client that is not ours."""
        return s3fs.S3FileSystem(
            key=KEY,
            secret=SECRET,
            endpoint_url=self.endpoint,
            use_listings_cache=False,
            skip_instance_cache=True,
            config_kwargs={"retries": {"total_max_attempts": 1}, "connect_timeout": 1, "read_timeout": 5},
        )

    def store(self, folder: str, attempts: int | None = None) -> S3Store:
        """As the program opens it."""
        return S3Store(f"s3://{BUCKET}/{folder}", self.access, attempts)

    def start(self) -> None:
        """Start, and wait until it takes a file."""
        ports = [f"-{name}={port}" for name, port in zip(PORTS, self._ports, strict=False)]
        where = [f"-dir={self._directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3", *ports]
        s3 = [f"-s3.port={self._ports[-2]}", f"-s3.port.grpc={self._ports[-1]}", "-s3.port.iceberg=0"]
        rest = [f"-s3.config={self._directory / 's3.json'}", "-s3.port.lance=0", "-master.telemetry=false"]
        sizes = [
            "-volume.max=20",
            "-master.volumeSizeLimitMB=64",
            "-s3.autoCreateBucket=false",
            "-master.electionTimeout=1s",
        ]
        with (self._directory / "weed.log").open("ab") as log:
            command = [str(WEED), "-logtostderr", "server", *where, *s3, *rest, *sizes]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        files, deadline = self.files(), time.monotonic() + READY_S
        while True:
            try:
                if not files.exists(BUCKET):
                    files.mkdir(BUCKET)
                files.pipe_file(f"{BUCKET}/ready", b"1")
                return
            except Exception as error:
                if time.monotonic() > deadline:
                    pytest.fail(f"no S3 service after {READY_S:.0f} s: {error}")
                time.sleep(0.1)

    def kill(self) -> None:
        """SIGKILL; connections to it are refused from now on."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None
        for part, port in zip(("master", "volume", "filer", "s3"), [*self._ports[1::2]], strict=True):
            Path(f"/tmp/seaweedfs-{part}-grpc-{port}.sock").unlink(missing_ok=True)


class Link(ThreadingHTTPServer):
    """A proxy in front of the server: it counts requests, and from the one numbered `fail_from` on it fails.

    Attributes:
        calls: requests so far.
        fail_from: the first that fails, None: none does.
        fail_until: the last that fails, None: all that follow.
        how: `refuse` answers 403; `cut` takes half of the body and hangs up; `lose` hands the request on and hangs up
            instead of answering.
    """

    daemon_threads = True

    def __init__(self, server: S3Server) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.target = server.endpoint.removeprefix("http://")
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"
        self.lock = threading.Lock()
        self.arm(None)

    def arm(self, fail_from: int | None, how: str = "refuse", fail_until: int | None = None) -> None:
        """Count from zero."""
        with self.lock:
            self.calls, self.fail_from, self.how, self.fail_until = 0, fail_from, how, fail_until

    def store(self, folder: str, attempts: int | None = 1) -> S3Store:
        """A store behind this link."""
        return S3Store(f"s3://{BUCKET}/{folder}", S3Access(self.endpoint, KEY, SECRET), attempts)

    def fails(self) -> bool:
        """Whether the request that has just come is to fail."""
        with self.lock:
            self.calls += 1
            last = self.calls if self.fail_until is None else self.fail_until
            return self.fail_from is not None and self.fail_from <= self.calls <= last

    def handle_error(self, *_: object) -> None:
        """A client that hangs up is no error here."""


@contextmanager
def link_to(server: S3Server) -> Iterator[Link]:
    """A link that is open."""
    link = Link(server)
    thread = threading.Thread(target=link.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield link
    finally:
        link.shutdown()
        thread.join()
        link.server_close()


class _Request(BaseHTTPRequestHandler):
    """Hands one request on, with the Host that was signed."""

    protocol_version = "HTTP/1.1"
    server: Link

    def _pass_on(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        fails, how = self.server.fails(), self.server.how
        if fails and how == "cut":
            self.rfile.read(length // 2)
            self.close_connection = True
            return
        body = self.rfile.read(length)
        if fails and how == "refuse":
            self._answer(403, {}, b"<Error><Code>AccessDenied</Code><Message>Access Denied.</Message></Error>")
            return
        connection = http.client.HTTPConnection(self.server.target, timeout=10)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        if fails:
            self.close_connection = True
            return
        kept = {k: v for k, v in answer.getheaders() if k.lower() not in ("transfer-encoding", "connection")}
        self._answer(answer.status, kept, content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on

    def _answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "content-length" not in map(str.lower, headers):
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [held.getsockname()[1] for held in sockets]
    for held in sockets:
        held.close()
    return ports

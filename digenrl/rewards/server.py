"""A reward server: one reward behind HTTP, in whatever environment it needs. `digenrl.rewards.wire` is the protocol.

    digenrl reward-server NAME [setting=value ...]
    python -m digenrl.rewards.server NAME [...]       the same where only the core is importable

This module and what it imports need fastapi, uvicorn, httpx, numpy, pillow and pydantic; a reward may need more.

    create_app(...)     the application
    main(arguments)     the command
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hmac
import json
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import ValidationError

from digenrl.config.rewards import RewardConfig
from digenrl.rewards.base import Reward, RewardError, Score
from digenrl.rewards.batching import Batcher, Full, Limits, Sample
from digenrl.rewards.registry import make_reward
from digenrl.rewards.wire import WireError, reply_of, samples_of

logger = logging.getLogger(__name__)

TOKEN_ENV = "DIGENRL_REWARD_TOKEN"
#: A request may be so large: eight pictures of 4096 x 4096, or a few seconds of video.
LARGEST_BYTES = 512 * 1024 * 1024
#: How long requests under way may take when the server is told to stop.
GRACE_S = 5


class _State:
    """Whether the reward is loaded, or why not."""

    ready = False
    broken: str | None = None

    @property
    def waiting_for(self) -> str | None:
        return None if self.ready else self.broken or "the reward is being loaded"


def create_app(reward: Reward, version: str, *, token: str | None = None, limits: Limits | None = None) -> FastAPI:
    """The application.

    Args:
        reward: that scores; it is loaded when the application starts.
        version: clients are told, and may insist on.
        token: that clients must send as `Authorization: Bearer`; None: anybody may ask.
        limits: of batches.
    """
    batcher, state = Batcher(reward, limits or Limits()), _State()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.ensure_future(_load(batcher, state)), asyncio.ensure_future(batcher.run())]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    app = FastAPI(title=f"DigenRL reward {reward.name}", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.reward = state

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "alive"}

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        if (reason := state.waiting_for) is not None:
            raise HTTPException(503, reason)
        return {"reward": reward.name, "version": version}

    @app.post("/score")
    async def score(request: Request) -> dict[str, Any]:
        _check_token(request, token)
        if (reason := state.waiting_for) is not None:
            raise HTTPException(503, reason, {"Retry-After": "1"})
        samples = await _samples_in(request, reward)
        return reply_of(reward.name, version, await _scored(batcher, samples))

    return app


async def _load(batcher: Batcher, state: _State) -> None:
    try:
        await batcher.load()
    except Exception as error:
        logger.exception("the reward cannot be loaded")
        state.broken = f"the reward cannot be loaded: {error}"
    else:
        state.ready = True


def _check_token(request: Request, token: str | None) -> None:
    given = request.headers.get("Authorization", "")
    if token is not None and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
        raise HTTPException(401, "the bearer token is missing or wrong", {"WWW-Authenticate": "Bearer"})


async def _samples_in(request: Request, reward: Reward) -> list[Sample]:
    """What a request holds, read, decoded and found to be what the reward can score."""
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > LARGEST_BYTES:
            raise HTTPException(413, f"a request may have {LARGEST_BYTES} bytes; send fewer samples at a time")
        chunks.append(chunk)

    def read() -> list[Sample]:
        samples = samples_of(json.loads(b"".join(chunks)))
        reward.validate([prompt for _, prompt in samples])
        return samples

    try:
        return await run_in_threadpool(read)
    except WireError as error:
        raise HTTPException(422, str(error)) from error
    except ValueError as error:  # no JSON, or prompts that lack something
        raise HTTPException(422, f"{type(error).__name__}: {error}") from error


async def _scored(batcher: Batcher, samples: Sequence[Sample]) -> list[Score]:
    try:
        return await batcher.score(samples)
    except Full as error:
        raise HTTPException(429, str(error), {"Retry-After": "1"}) from error
    except Exception as error:
        logger.exception("a request could not be scored")
        raise HTTPException(500, f"{type(error).__name__}: {error}") from error


def config_of(name: str, settings: Sequence[str]) -> RewardConfig:
    """The configuration of a reward from its name and `key=value` settings.

    Raises:
        RewardError: says which setting is wrong.
    """
    values: dict[str, str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise RewardError(f"{setting!r} has no '='; write key=value, such as path=OWNER/NAME")
        values[key] = value
    try:
        return RewardConfig.model_validate({"name": name, **values})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise RewardError(f"{where}: {first['msg']}, got {first['input']!r}") from error


def default_version(config: RewardConfig) -> str:
    """Reward, weights and version of this package."""
    try:
        own = version("digenrl")
    except PackageNotFoundError:  # run from a directory
        own = "unknown"
    return " ".join(filter(None, (config.name, config.path, config.model, f"digenrl {own}")))


def main(arguments: Sequence[str] | None = None, program: str = "python -m digenrl.rewards.server") -> None:
    """Serve a reward until SIGTERM or Ctrl-C.

    Raises:
        RewardError: the reward, a setting or the token is wrong, or it cannot be loaded.
    """
    options = _parser(program).parse_args(arguments)
    config = config_of(options.name, options.settings)
    reward = make_reward(config)
    if (problem := reward.problem()) is not None:
        raise RewardError(problem)
    token = _token(options.token_file)
    if token is None and options.host not in ("127.0.0.1", "::1", "localhost"):
        logger.warning("anybody who reaches %s may use this server: set %s or --token-file", options.host, TOKEN_ENV)
    limits = Limits(options.batch, options.wait_ms / 1000, options.waiting)
    app = create_app(reward, options.version or default_version(config), token=token, limits=limits)
    with _listening(options.host, options.port) as listener:
        port = listener.getsockname()[1]
        print(f"reward {reward.name} at http://{options.host}:{port} (GET /ready says when)", flush=True)
        asyncio.run(_serve(app, listener))
    if app.state.reward.broken:
        raise RewardError(app.state.reward.broken)


async def _serve(app: FastAPI, listener: socket.socket) -> None:
    """Serve until told to stop, or until it is clear that the reward cannot be loaded."""
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE_S)
    )
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    while not serving.done():
        await asyncio.wait([serving], timeout=0.2)
        if app.state.reward.broken:
            server.should_exit = True
    serving.result()


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=256)
    except OSError as error:
        raise RewardError(f"cannot listen at {host}:{port}: {error.strerror or error}") from error


def _token(file: Path | None) -> str | None:
    if file is None:
        return os.environ.get(TOKEN_ENV, "").strip() or None
    try:
        token = file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise RewardError(f"--token-file {file} cannot be read ({error.strerror})") from error
    if not token:
        raise RewardError(f"--token-file {file} is empty; write the token into it")
    return token


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description="Serve a reward over HTTP. Clients: a reward `- {name: http, url: ...}` in a configuration.",
        epilog=f"The bearer token is in {TOKEN_ENV} or --token-file; without one anybody may ask.",
    )
    parser.add_argument("name", help="registered reward, or python:MODULE:FUNCTION")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of the reward, e.g. path=OWNER/NAME")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default %(default)s)")
    parser.add_argument("--port", type=int, default=8100, help="0: a free one (default %(default)s)")
    parser.add_argument("--version", help="what clients are told; default: reward, weights and package")
    parser.add_argument("--token-file", type=Path, help="file that holds the bearer token")
    parser.add_argument("--batch", type=int, default=32, help="samples that are scored together (default %(default)s)")
    parser.add_argument(
        "--wait-ms", type=float, default=5, help="how long a request waits for others (default %(default)s)"
    )
    parser.add_argument("--waiting", type=int, default=1024, help="samples that may wait (default %(default)s)")
    return parser


if __name__ == "__main__":
    try:
        main()
    except RewardError as problem:
        print(f"reward-server: {problem}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None

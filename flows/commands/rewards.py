"""`digenrl rewards list` and `digenrl rewards check`: what there is, and whether one gives the value it should."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import typer
from numpy.typing import NDArray

from digenrl.rewards.base import Failed, PromptRecord, RewardError
from digenrl.rewards.cards import card_table
from digenrl.rewards.registry import make_reward
from digenrl.rewards.server import config_of
from flows.errors import ExpectedError


def show() -> None:
    """Print every registered reward with what it says of itself."""
    rows = card_table()
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def check(
    name: str,
    settings: Sequence[str],
    *,
    image: str,
    prompt: str,
    fields: Sequence[str],
    expect: float | None,
    tolerance: float,
) -> None:
    """Score one picture, and compare the value with the one that is expected.

    Args:
        name: of the reward.
        settings: of the reward, key=value.
        image: a file or an http(s) address.
        prompt: the text.
        fields: of the prompt record, key=value.
        expect: the value it should have; None: only print it.
        tolerance: how far it may be away.

    Raises:
        RewardError: the reward cannot be used.
        ExpectedError: it gave no value, or another one than expected.
    """
    reward = make_reward(config_of(name, settings))
    if (problem := reward.problem()) is not None:
        raise RewardError(problem)
    record = PromptRecord("check", prompt, _fields(fields))
    try:
        reward.validate([record])
    except ValueError as error:
        raise RewardError(str(error)) from error
    reward.load()
    (score,) = reward(_picture(image)[None, None], [record])
    if isinstance(score, Failed):
        raise ExpectedError(f"{reward.name} gave no value: {score.reason}")
    typer.echo(f"{reward.name} {score.value:.6g}")
    if expect is not None and not abs(score.value - expect) <= tolerance:
        raise ExpectedError(f"{reward.name} is {score.value:.6g}, not {expect:g} ± {tolerance:g}")


def _picture(image: str) -> NDArray[np.uint8]:
    """(H, W, 3) uint8."""
    from PIL import Image

    try:
        data = _download(image) if image.startswith(("http://", "https://")) else Path(image).read_bytes()
        with Image.open(io.BytesIO(data)) as opened:
            return np.asarray(opened.convert("RGB"))
    except OSError as error:
        raise ExpectedError(f"--image {image} cannot be read: {error}") from error


def _download(address: str) -> bytes:
    import httpx

    try:
        return httpx.get(address, timeout=60, follow_redirects=True).raise_for_status().content
    except httpx.HTTPError as error:
        raise ExpectedError(f"--image {address} cannot be downloaded: {error}") from error


def _fields(fields: Sequence[str]) -> Mapping[str, str]:
    pairs = [field.partition("=") for field in fields]
    for text, (key, equals, _) in zip(fields, pairs, strict=True):
        if not (key and equals):
            raise RewardError(f"--field {text!r} must be KEY=VALUE, such as target=042")
    return {key: value for key, _, value in pairs}

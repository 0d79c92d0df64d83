"""What a reward server and its clients say to each other: JSON over HTTP, pictures as lossless PNG or WebP in base64.

    POST /score   {"protocol": 1, "samples": [{"uid": ..., "text": ..., "fields": {...}, "frames": ["<base64>", ...]}]}
    200           {"reward": ..., "version": ..., "scores": [{"value": 0.5} | {"failed": "reason"}, ...]}
    others        {"detail": "reason"}: 401 token, 413 too large, 422 not this protocol, 429 full, 500 it raised,
                  503 not ready
    GET /health   200 as long as the process answers
    GET /ready    200 {"reward": ..., "version": ...} once it can score, 503 before

A frame of every sample has the same size; all frames of a request need not. `protocol` changes when this does.
"""

from __future__ import annotations

import base64
import io
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from digenrl.rewards.base import Failed, PromptRecord, Score, Scored

PROTOCOL = 1

ImageFormat = Literal["png", "webp"]


class WireError(ValueError):
    """What arrived is not this protocol, in a sentence."""


def encode_picture(picture: NDArray[np.uint8], image_format: ImageFormat = "png") -> bytes:
    """One (H, W, 3) uint8 picture as a file, without loss. The fastest compression: a picture travels once."""
    buffer = io.BytesIO()
    if image_format == "png":
        Image.fromarray(picture).save(buffer, format="PNG", compress_level=1)
    else:
        Image.fromarray(picture).save(buffer, format="WEBP", lossless=True, quality=0, method=0)
    return buffer.getvalue()


def decode_picture(data: bytes) -> NDArray[np.uint8]:
    """The (H, W, 3) uint8 picture in a PNG or WebP file.

    Raises:
        WireError: it is neither.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data), formats=("PNG", "WEBP")) as image:
                return np.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise WireError(f"a frame is no PNG or WebP picture ({error})") from error


def request_of(
    images: NDArray[np.uint8], prompts: Sequence[PromptRecord], image_format: ImageFormat = "png"
) -> dict[str, Any]:
    """The body of a request for B samples, images (B, F, H, W, 3) uint8."""
    samples = [
        {
            "uid": prompt.uid,
            "text": prompt.text,
            "fields": dict(prompt.fields),
            "frames": [base64.b64encode(encode_picture(frame, image_format)).decode() for frame in frames],
        }
        for frames, prompt in zip(images, prompts, strict=True)
    ]
    return {"protocol": PROTOCOL, "samples": samples}


def samples_of(body: object) -> list[tuple[NDArray[np.uint8], PromptRecord]]:
    """The samples of a request: pictures (F, H, W, 3) uint8 and prompt.

    Raises:
        WireError: says which part of the body is wrong.
    """
    if not isinstance(body, Mapping) or body.get("protocol") != PROTOCOL:
        said = body.get("protocol") if isinstance(body, Mapping) else None
        raise WireError(f"the body must be an object with protocol {PROTOCOL}, got {said!r}")
    samples = body.get("samples")
    if not isinstance(samples, list) or not samples:
        raise WireError("samples must be a list with at least one entry")
    return [_sample(index, sample) for index, sample in enumerate(samples)]


def _sample(index: int, sample: object) -> tuple[NDArray[np.uint8], PromptRecord]:
    where = f"samples[{index}]"
    if not isinstance(sample, Mapping):
        raise WireError(f"{where} must be an object")
    uid, text, fields, frames = (sample.get(key) for key in ("uid", "text", "fields", "frames"))
    if not isinstance(uid, str) or not isinstance(text, str):
        raise WireError(f"{where} must have the strings uid and text")
    if not isinstance(fields, Mapping) or not all(isinstance(v, str) for item in fields.items() for v in item):
        raise WireError(f"{where}.fields must be an object of strings")
    if not isinstance(frames, list) or not frames or not all(isinstance(frame, str) for frame in frames):
        raise WireError(f"{where}.frames must be a list of strings with at least one entry")
    try:
        pictures = [decode_picture(base64.b64decode(frame, validate=True)) for frame in frames]
    except ValueError as error:
        raise WireError(f"{where}.frames: {error}") from error
    if len({picture.shape for picture in pictures}) != 1:
        raise WireError(f"{where}.frames must all have one size")
    return np.stack(pictures), PromptRecord(uid, text, dict(fields))


def reply_of(reward: str, version: str, scores: Sequence[Score]) -> dict[str, Any]:
    """The body of an answer."""
    said = [{"value": s.value} if isinstance(s, Scored) else {"failed": s.reason} for s in scores]
    return {"reward": reward, "version": version, "scores": said}


def scores_of(body: object, count: int) -> tuple[str, list[Score]]:
    """Version and scores of an answer to a request of `count` samples.

    Raises:
        WireError: it is no such answer.
    """
    if not isinstance(body, Mapping) or not isinstance(body.get("version"), str):
        raise WireError("the answer is no object with a version")
    scores = body.get("scores")
    if not isinstance(scores, list) or len(scores) != count:
        got = len(scores) if isinstance(scores, list) else "no"
        raise WireError(f"the answer has {got} scores for {count} samples")
    return body["version"], [_score(score) for score in scores]


def _score(said: object) -> Score:
    if isinstance(said, Mapping):
        value, reason = said.get("value"), said.get("failed")
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return Scored(float(value))
        if isinstance(reason, str):
            return Failed(reason)
    return Failed(f"the server answered {str(said)[:80]} instead of a score")

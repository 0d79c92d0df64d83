"""The protocol between a reward server and its clients."""

from __future__ import annotations

import json
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks.tiny_rewards import pictures
from digenrl.rewards.base import Failed, PromptRecord, Scored
from digenrl.rewards.wire import (
    ImageFormat,
    WireError,
    decode_picture,
    encode_picture,
    reply_of,
    request_of,
    samples_of,
    scores_of,
)

PROMPTS = [PromptRecord("a", "ein Häuschen", {"target": "042"}), PromptRecord("b", "", {})]


@pytest.mark.parametrize("image_format", ["png", "webp"])
def test_pictures_and_prompts_arrive_as_they_were_sent(image_format: ImageFormat) -> None:
    images = pictures(6, 12, 24).reshape(2, 3, 12, 24, 3)
    sent = json.loads(json.dumps(request_of(images, PROMPTS, image_format)))
    arrived = samples_of(sent)
    assert [prompt for _, prompt in arrived] == PROMPTS
    np.testing.assert_array_equal(np.stack([frames for frames, _ in arrived]), images)


def test_scores_and_reasons_arrive_as_they_were_sent() -> None:
    scores = [Scored(0.1 + 0.2), Failed("dunkel"), Scored(0.0)]
    assert scores_of(json.loads(json.dumps(reply_of("r", "v", scores))), 3) == ("v", scores)


def wrong(**changes: Any) -> dict[str, Any]:
    request = request_of(pictures(1)[None], PROMPTS[:1])
    request["samples"][0] |= changes
    return request


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ([], "protocol 1, got None"),
        ({"protocol": 2, "samples": []}, "protocol 1, got 2"),
        ({"protocol": 1, "samples": []}, "samples must be a list"),
        ({"protocol": 1, "samples": ["x"]}, r"samples\[0\] must be an object"),
        (wrong(text=3), r"samples\[0\] must have the strings uid and text"),
        (wrong(fields={"target": 42}), r"samples\[0\].fields must be an object of strings"),
        (wrong(frames=[]), r"samples\[0\].frames must be a list of strings"),
        (wrong(frames=["?"]), r"samples\[0\].frames: "),
        (wrong(frames=["aGVsbG8="]), "is no PNG or WebP picture"),
    ],
)
def test_what_is_not_the_protocol_is_named(body: object, words: str) -> None:
    with pytest.raises(WireError, match=words):
        samples_of(body)


def test_frames_of_one_sample_have_one_size() -> None:
    request = request_of(pictures(1, 8, 8)[None], PROMPTS[:1])
    request["samples"][0]["frames"] += request_of(pictures(1, 8, 9)[None], PROMPTS[:1])["samples"][0]["frames"]
    with pytest.raises(WireError, match="must all have one size"):
        samples_of(request)


def test_other_picture_formats_are_refused() -> None:

    buffer = BytesIO()
    Image.fromarray(pictures(1)[0]).save(buffer, format="BMP")
    with pytest.raises(WireError, match="no PNG or WebP"):
        decode_picture(buffer.getvalue())
    assert decode_picture(encode_picture(pictures(1)[0], "webp")).shape == (37, 61, 3)

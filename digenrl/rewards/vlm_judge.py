"""Reward of a vision language model that is asked about the picture, behind an OpenAI-compatible endpoint.

One request per sample: the question, then the frames as PNG data URLs, temperature 0. The answer's last number is the
mark, from 0 to 10 ("8/10" and "8 out of 10" are an 8); no number, or one outside, is no value.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from digenrl.config.rewards import RequestConfig
from digenrl.rewards.base import Failed, PromptRecord, Reward, RewardCard, RewardError, Score, frames_of, score_of
from digenrl.rewards.calls import Answer, CallFailed, Endpoint
from digenrl.rewards.wire import encode_picture

QUESTION = (
    "A picture was drawn for this description: {prompt}\n"
    "How well does it show what the description says? Judge objects, their number, colours, positions and any text. "
    "Answer with one number from 0 (nothing of it) to 10 (all of it), and nothing else."
)
TOP_MARK = 10.0
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?![\w])")
_OUT_OF = re.compile(r"(?:/|\bout of)\s*10\b")
_GAP = re.compile(r"\{(\w+)\}")
#: Characters of an answer that go into a reason.
_LONGEST = 80


class VlmJudge(Reward):
    """The mark, divided by 10.

    Args:
        url: of the API, up to and with its version: http://127.0.0.1:8000/v1.
        model: its name there.
        question: with {prompt} and {FIELD} for what the prompt record says.
        request: how it is asked; `samples` has no meaning here, as every request is about one.
    """

    name = "vlm_judge"
    card = RewardCard(
        "the mark of a vision language model",
        "[0, 1]",
        licence="the model's",
        weights="the endpoint's",
    )

    def __init__(self, *, url: str, model: str, question: str = QUESTION, request: RequestConfig | None = None) -> None:
        self.model = model
        self.question = question
        self._endpoint = Endpoint(f"{url.rstrip('/')}/chat/completions", request or RequestConfig())

    def load(self) -> None:
        """Check that the token is there; see `Reward`."""
        self._endpoint.headers()

    def validate(self, prompts: Sequence[PromptRecord]) -> None:
        """Refuse prompts that lack a field the question names; see `Reward`."""
        for prompt in prompts:
            self._asked(prompt)

    def __call__(self, images: NDArray[np.uint8], prompts: Sequence[PromptRecord]) -> list[Score]:
        """Score B samples; see `Reward`."""
        frames_of(images, prompts)
        bodies = [self._body(frames, prompt) for frames, prompt in zip(images, prompts, strict=True)]
        return [self._score(answer) for answer in (self._endpoint.call_all(bodies) if bodies else [])]

    def _body(self, frames: NDArray[np.uint8], prompt: PromptRecord) -> dict[str, Any]:
        content: list[dict[str, Any]] = [{"type": "text", "text": self._asked(prompt)}]
        for frame in frames:
            data = base64.b64encode(encode_picture(frame)).decode()
            content.append({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}})
        return {"model": self.model, "temperature": 0, "messages": [{"role": "user", "content": content}]}

    def _asked(self, prompt: PromptRecord) -> str:
        """The question with its gaps filled in, in one pass: what a prompt says is never a gap."""
        known = {**prompt.fields, "prompt": prompt.text}

        def filled(gap: re.Match[str]) -> str:
            if gap[1] not in known:
                have = ", ".join(sorted(known))
                raise RewardError(
                    f"reward {self.name}: the question names {{{gap[1]}}}, which prompt {prompt.uid!r} lacks "
                    f"(it has {have})"
                )
            return known[gap[1]]

        return _GAP.sub(filled, self.question)

    def _score(self, answer: Answer) -> Score:
        if isinstance(answer, CallFailed):
            return Failed(answer.reason)
        text = _text_of(answer)
        if text is None:
            return Failed(f"{self._endpoint.url} did not answer with a chat completion")
        numbers = _NUMBER.findall(_OUT_OF.sub("", text))
        if not numbers or not 0 <= float(numbers[-1]) <= TOP_MARK:
            return Failed(f"the judge answered {text[:_LONGEST]!r}, which is no mark from 0 to {TOP_MARK:g}")
        return score_of(self.name, float(numbers[-1]) / TOP_MARK)


def _text_of(answer: Mapping[str, Any]) -> str | None:
    try:
        text = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        return None
    return text if isinstance(text, str) else None

"""Constants of the published checkpoints, as package data.

What runs never reads them: a run asks the checkpoint it loads. The tiny checkpoints are made with them, and tests hold
the installed diffusers against them. They come from public copies of the repositories' `scheduler_config.json`;
`revision` is null where the commit of the copy is not known.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class Published:
    """Constants of one family.

    Attributes:
        repository: where the checkpoint is, on the Hugging Face hub.
        revision: commit the constants were read at; None: not known.
        scheduler: contents of its `scheduler/scheduler_config.json`, defaults left out.
        prompt_template: what a prompt is put into, at "{}"; None: it is encoded as it is.
        template_tokens: tokens of the template before the prompt, which the pipeline cuts off.
    """

    repository: str
    revision: str | None
    scheduler: dict[str, Any]
    prompt_template: str | None = None
    template_tokens: int = 0


def published(family: str) -> Published:
    """The constants of a family.

    Raises:
        KeyError: none are recorded.
    """
    text = (files("digenrl.data") / "checkpoints.json").read_text(encoding="utf-8")
    return Published(**json.loads(text)[family])

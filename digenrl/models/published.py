"""Constants of the published checkpoints, as package data.

What runs never reads them: a run asks the checkpoint it loads, so a published schedule that changes is followed. Which
commit of a hub id that is, `model.revision` says; null is the hub's main branch of the day, or what the local cache
has. The tiny checkpoints are made with these constants, and tests hold the installed diffusers against them. A recorded
`revision` of null says that the commit they were read at is not known, and `source` what they were read from.
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
        source: what they were read from.
        scheduler: contents of its `scheduler/scheduler_config.json`, defaults left out.
        prompt_template: what a prompt is put into, at "{}"; None: it is encoded as it is.
        template_tokens: tokens of the template before the prompt, which the pipeline cuts off.
    """

    repository: str
    revision: str | None
    source: str
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

"""Prompts: reading them, and which of them an iteration takes.

load_data(config.data)        what a run trains on and what it is evaluated on
load_prompts(path)            one set
prompts_of_iteration(...)     a pure function of seed and iteration

quotes      what stands in quotation marks
records     from what a file holds to a PromptRecord
formats     .txt, .jsonl, .csv, .parquet, Hugging Face datasets
files       the index of one source
sets        sources side by side; train and held-out
walk        epochs, and the turns of several sources
"""

from __future__ import annotations

from digenrl.prompts.errors import PromptError
from digenrl.prompts.sets import PromptSet, RunPrompts, load_data, load_held_out, load_prompts
from digenrl.prompts.walk import prompts_of_iteration, taken_before

__all__ = [
    "PromptError",
    "PromptSet",
    "RunPrompts",
    "load_data",
    "load_held_out",
    "load_prompts",
    "prompts_of_iteration",
    "taken_before",
]

"""Where prompts come from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from digenrl.config.section import Section


class PromptSource(Section):
    """One source of prompts."""

    path: str = Field(
        min_length=1,
        description="A .txt, .jsonl, .csv or .parquet file, the directory of a Hugging Face dataset, or package:NAME "
        "for a set that ships with DigenRL.",
    )
    weight: float = Field(
        1.0, gt=0, le=1e6, description="Of the prompts that are taken, this source has weight / sum of weights."
    )
    text_key: str = Field("text", min_length=1, description="Key or column that holds the prompt.")
    target: Literal["field", "quoted"] = Field(
        "field",
        description="What pictures should show: what the prompt's field `target` says, or quoted: without that field "
        "what stands in quotation marks in the prompt.",
    )
    rewards: tuple[str, ...] | None = Field(
        None, min_length=1, description="Rewards of prompts that name none themselves; null: all rewards of the run."
    )


Sources = Annotated[tuple[PromptSource, ...], Field(min_length=1)]


class DataConfig(Section):
    """Prompts to train on and to evaluate on."""

    prompts: Annotated[str, Field(min_length=1)] | Sources = Field(
        description="Prompts to train on: a .txt, .jsonl, .csv or .parquet file, the directory of a Hugging Face "
        "dataset, package:NAME, or several of these."
    )
    held_out: Annotated[str, Field(min_length=1)] | Sources | None = Field(
        None, description="Prompts for evaluation only, given in the same way; must share no id with `prompts`."
    )
    held_out_share: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Instead of `held_out`: share of `prompts` that is kept for evaluation, chosen by a hash of the "
        "id.",
    )

    @model_validator(mode="after")
    def _one_held_out(self) -> DataConfig:
        if self.held_out is not None and self.held_out_share > 0:
            raise ValueError(
                f"held_out_share={self.held_out_share:g} cannot be combined with held_out={described(self.held_out)}: "
                f"prompts for evaluation come from one of them; use held_out=null or held_out_share=0"
            )
        return self

    @property
    def all_sources(self) -> tuple[PromptSource, ...]:
        """Sources of both."""
        return (*sources_of(self.prompts), *(() if self.held_out is None else sources_of(self.held_out)))

    @property
    def holds_out(self) -> bool:
        """Whether there are prompts for evaluation."""
        return self.held_out is not None or self.held_out_share > 0

    @property
    def held_out_origin(self) -> str:
        """How errors call the key that prompts for evaluation come from."""
        return "data.held_out_share" if self.held_out is None else "data.held_out"


def sources_of(given: str | tuple[PromptSource, ...]) -> tuple[PromptSource, ...]:
    """A path alone is one source with nothing else said about it."""
    return (PromptSource(path=given),) if isinstance(given, str) else given


def described(given: str | tuple[PromptSource, ...]) -> str:
    """The paths, for a sentence."""
    return ", ".join(source.path for source in sources_of(given))

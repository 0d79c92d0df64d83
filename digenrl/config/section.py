"""What every section of a configuration has in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """Base of every section: unknown keys are refused, values are frozen once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

"""What goes wrong with prompts."""

from __future__ import annotations

from digenrl.config.errors import ConfigError


class PromptError(ConfigError):
    """Prompts cannot be found or read, in a sentence that names file, line, problem and expectation."""

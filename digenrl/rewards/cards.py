"""The registered rewards as a table, for the command line and the documentation."""

from __future__ import annotations

from digenrl.rewards.registry import reward_class, reward_names

TITLES = ("name", "what", "range", "media", "licence", "weights from")


def card_table() -> list[tuple[str, ...]]:
    """A row of titles, then one for each registered reward, sorted by name."""
    cards = [(name, reward_class(name).card) for name in reward_names()]
    return [TITLES, *((name, c.says, c.range, c.media, c.licence, c.weights) for name, c in cards)]

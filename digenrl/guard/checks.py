"""What is watched: each check turns evidence into a value in its own unit, which two limits are held against.

    readings(config, warmup, evidence)     of every check that can be made

A check that cannot be made is left out: no gold reward, too few iterations, an algorithm without likelihoods.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from digenrl.config.guard import GuardConfig
from digenrl.guard.evidence import Evidence, IterationFacts, Sighting
from digenrl.guard.pictures import PictureStatistics, mean_statistics
from digenrl.statistics import paired_rise

#: Added to both sides of the ratio of two shares: what a picture has nearly nothing of may double.
LEAST_SHARE = 0.005
#: Below these a value counts as that: ratios of rounding errors say nothing.
LEAST_KL, LEAST_LOGP_GAP, LEAST_GRAD_NORM, LEAST_DIVERSITY = 1e-12, 1e-6, 1e-9, 1e-3
#: Iterations of which a reference is made, at least.
LEAST_REFERENCE = 3


@dataclass(frozen=True)
class Reading:
    """What one check found.

    Attributes:
        check: its name, a key of `guard`.
        value: what its limits are held against.
        text: the same as the end of a sentence, for people.
    """

    check: str
    value: float
    text: str


def readings(config: GuardConfig, warmup: int, evidence: Evidence) -> list[Reading]:
    """Every check that is not left out and can be made.

    Args:
        config: section `guard`.
        warmup: iterations in which the learning rate still rises.
        evidence: the last sighting in it is judged.
    """
    found = [_divergence(config, evidence), *_pictures(evidence), _diversity(evidence)]
    found += [_share(name, words, evidence) for name, words in _SHARES.items()]
    found += [_band(name, least, config, warmup, evidence) for name, least in _BANDS.items()]
    return [reading for reading in found if reading is not None and getattr(config, reading.check) is not None]


# --- gold rewards ---


def _divergence(config: GuardConfig, evidence: Evidence) -> Reading | None:
    """The gold reward that fell most, while the trained reward is above its start."""
    now, base = evidence.now, evidence.base
    if now is base or not now.gold:
        return None
    level = config.confidence
    rise, (low, _) = paired_rise(base.reward, now.reward, level)
    names = [name for name in now.gold if _spread(base.gold.get(name, {})) > 0]
    if not names or math.isnan(rise):
        return None
    return max((_fall(name, evidence, level, rise if low > 0 else None) for name in names), key=lambda r: r.value)


def _fall(name: str, evidence: Evidence, level: float, rise: float | None) -> Reading:
    """How far one gold reward surely fell since it was best; nothing if the trained reward did not rise (None)."""
    now, spread = evidence.now, _spread(evidence.base.gold[name])
    best = max(evidence.sightings[:-1], key=lambda sighting: _mean(sighting.gold.get(name, {})))
    change, (low, high) = paired_rise(best.gold.get(name, {}), now.gold[name], level)
    if rise is None or not high < 0:
        return Reading("divergence", 0.0, f"{name} did not fall while the trained reward rose")
    text = (
        f"the trained reward rose by {rise:.3g} since iteration {evidence.base.version}, and {name}, which is not "
        f"trained on, fell by {-change:.3g} since iteration {best.version} ({level:.0%} interval {-high:.3g} to "
        f"{-low:.3g})"
    )
    return Reading("divergence", -high / spread, text)


def _spread(values: Mapping[int, float]) -> float:
    return float(np.std(list(values.values()))) if values else 0.0


def _mean(values: Mapping[int, float]) -> float:
    return float(np.mean(list(values.values()))) if values else -math.inf


# --- pictures ---


def _pictures(evidence: Evidence) -> list[Reading]:
    """Held-out pictures against those of the base model from the same noise."""
    both = sorted(evidence.base.pictures.keys() & evidence.now.pictures.keys())
    if evidence.now is evidence.base or not both:
        return []
    before, after = (_statistics(sighting, both) for sighting in (evidence.base, evidence.now))
    found = []
    for field in fields(PictureStatistics):
        name = field.name
        was, now = getattr(before, name), getattr(after, name)
        value, how = _MEASURES[name](was, now)
        found.append(Reading(name, value, f"{_WORDS[name]} went from {was:.3g} to {now:.3g}{how}"))
    return found


def _statistics(sighting: Sighting, prompts: Sequence[int]) -> PictureStatistics:
    return mean_statistics(sighting.pictures[index] for index in prompts)


def _change(was: float, now: float) -> tuple[float, str]:
    return abs(now - was), ""


def _rise(was: float, now: float) -> tuple[float, str]:
    return max(now - was, 0.0), ""


def _factor(was: float, now: float) -> tuple[float, str]:
    ratio = (now + LEAST_SHARE) / (was + LEAST_SHARE)
    factor = max(ratio, 1 / ratio)
    return factor, f" ({'rose' if ratio > 1 else 'fell'} by a factor of {factor:.3g})"


_MEASURES: dict[str, Callable[[float, float], tuple[float, str]]] = {
    "dark": _change,
    "saturation": _change,
    "edges": _factor,
    "high_frequency": _factor,
    "grid": _rise,
}
_WORDS = {
    "dark": "the share of dark pixels in held-out pictures",
    "saturation": "the saturation of held-out pictures",
    "edges": "the share of edges in held-out pictures",
    "high_frequency": "the share of high frequencies in held-out pictures",
    "grid": "the share of a repeated grid in held-out pictures",
}


# --- training ---

_SHARES = {
    "zero_variance": "of the groups have equal rewards, so that nothing is learned from them",
    "failed": "of the training samples have no reward",
}
_BANDS = {"kl": LEAST_KL, "logp_gap": LEAST_LOGP_GAP, "grad_norm": LEAST_GRAD_NORM}
_NAMES = {
    "kl": "the change of the policy within an iteration",
    "logp_gap": "the gap between log-probs at training and at rollout",
    "grad_norm": "the norm of the gradient",
}


def _diversity(evidence: Evidence) -> Reading | None:
    """Against the first iteration, whose pictures are the base model's."""
    first = next((facts for facts in (*evidence.earlier, *evidence.recent) if facts.diversity is not None), None)
    now = _median("diversity", evidence.recent)
    if now is None or first is None or first.diversity is None:
        return None
    factor = max(first.diversity, LEAST_DIVERSITY) / max(now, LEAST_DIVERSITY)
    text = f"the distance between pictures of one prompt went from {first.diversity:.3g} to {now:.3g}"
    return Reading("diversity", max(factor, 1.0), text)


def _share(name: str, words: str, evidence: Evidence) -> Reading | None:
    now = _median(name, evidence.recent)
    return None if now is None else Reading(name, now, f"{now:.0%} {words}")


def _band(name: str, least: float, config: GuardConfig, warmup: int, evidence: Evidence) -> Reading | None:
    """The median of the recent iterations over that of the first ones after the warm-up."""
    end = warmup + config.reference_iterations
    everything = [facts for facts in (*evidence.earlier, *evidence.recent) if facts.iteration >= warmup]
    reference = [facts for facts in everything if facts.iteration < end and getattr(facts, name) is not None]
    then = _median(name, reference)
    now = _median(name, [facts for facts in evidence.recent if facts.iteration >= end])
    if then is None or now is None or len(reference) < LEAST_REFERENCE:
        return None
    factor = max(now, least) / max(then, least)
    return Reading(name, factor, f"{_NAMES[name]} is {now:.2g}, {factor:.3g} times that of the first iterations")


def _median(name: str, facts: Sequence[IterationFacts]) -> float | None:
    values = [value for one in facts if (value := getattr(one, name)) is not None]
    return float(np.median(values)) if values else None

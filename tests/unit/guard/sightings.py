"""Evidence for the guard, made up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from digenrl.config import RunConfig
from digenrl.config.load import load_config
from digenrl.guard.evidence import IterationFacts, Sighting
from digenrl.guard.pictures import PictureStatistics
from digenrl.guard.watch import Guard, Verdict

PROMPTS = 40
BASE = PictureStatistics(dark=0.1, saturation=0.2, edges=0.3, high_frequency=0.2, grid=0.05)
SOUND = IterationFacts(0, failed=0.0, zero_variance=0.1, diversity=0.2, kl=1e-7, logp_gap=1e-7, grad_norm=0.05)


def config(*overrides: str) -> RunConfig:
    return load_config("tiny-ocr", ["optimizer.warmup_iterations=1", "guard.reference_iterations=3", *overrides])


def values(mean: float, spread: float = 0.3, seed: int = 0, noise: float = 0.05) -> dict[int, float]:
    """A reward of every prompt: the prompts differ, and every version adds noise of its own."""
    prompts = np.random.default_rng(99).normal(0, spread, PROMPTS)
    return dict(enumerate(mean + prompts + np.random.default_rng(seed).normal(0, noise, PROMPTS)))


def sighting(
    version: int, reward: float = 0.5, gold: float | None = 0.5, pictures: PictureStatistics = BASE, noise: float = 0.05
) -> Sighting:
    golds = {} if gold is None else {"judge": values(gold, seed=1000 + version, noise=noise)}
    shown = dict.fromkeys(range(PROMPTS), pictures)
    return Sighting(version, values(reward, seed=version, noise=noise), golds, shown)


def run(guard: Guard, *sightings: Sighting, **facts: float | None) -> list[Verdict]:
    """Verdicts on sightings; the iterations before each are sound but for `facts`, from iteration 4 on."""
    verdicts = []
    done = max(guard.verdicts, default=0)
    for found in sightings:
        for iteration in range(done, found.version):
            special = facts if iteration >= 4 else {}
            guard.iteration(replace(SOUND, iteration=iteration, **special))
        done = found.version
        verdicts.append(guard.evaluation(found))
    return verdicts

"""The guard of a run: every evaluation is judged as ok, warn or stop, and the last good one is known.

    guard = Guard(config)
    guard.iteration(facts)                 for each iteration
    verdict = guard.evaluation(sighting)   for each evaluation, after the iterations that made its weights

A check stops the run when it is beyond its stop limit in `patience` evaluations in a row; before that it warns, and it
warns until its value is well below the warn limit. The last good evaluation is the latest one in which those checks
that stop the run were ok. A guard that is restored judges what it saw again: the same evidence gives the same verdicts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from digenrl.config import RunConfig
from digenrl.guard.checks import Reading, readings
from digenrl.guard.evidence import Evidence, IterationFacts, Sighting

Level = Literal["ok", "warn", "stop"]
LEVELS: tuple[Level, ...] = ("ok", "warn", "stop")


@dataclass(frozen=True)
class Finding:
    """A check with what follows from it.

    Attributes:
        reading: what the check found.
        level: what is made of it.
        beyond: evaluations in a row in which it was beyond its stop limit, this one included.
        last_ok: the latest version at which it was ok.
    """

    reading: Reading
    level: Level
    beyond: int
    last_ok: int


@dataclass(frozen=True)
class Verdict:
    """One evaluation, judged.

    Attributes:
        version: iterations that made its weights.
        level: the worst of its checks; with mode `warn` never stop.
        findings: by check.
        gold: mean of each gold reward.
        good: version that the run ends with, if it is stopped here.
        reason: one sentence if the level is not ok.
    """

    version: int
    level: Level = "ok"
    findings: Mapping[str, Finding] = field(default_factory=dict)
    gold: Mapping[str, float] = field(default_factory=dict)
    good: int = 0
    reason: str | None = None

    @property
    def stops(self) -> bool:
        """Whether the run must end."""
        return self.level == "stop"

    def metrics(self) -> dict[str, float]:
        """Numbers to log: the state and every check's value and state, 0 ok, 1 warn, 2 stop."""
        found = {"guard/state": float(LEVELS.index(self.level))}
        for name, finding in self.findings.items():
            found[f"guard/{name}"] = finding.reading.value
            found[f"guard/{name}_state"] = float(LEVELS.index(finding.level))
        return found | {f"eval/gold_{name}": mean for name, mean in self.gold.items()}


class Guard:
    """Judges the evaluations of one run, in order.

    Args:
        config: of the run.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config.guard
        self._warmup = config.optimizer.warmup_iterations
        self._facts: dict[int, IterationFacts] = {}
        self._sightings: dict[int, Sighting] = {}
        self.verdicts: dict[int, Verdict] = {}

    @property
    def may_stop(self) -> bool:
        """Whether the run may have to go back to an earlier evaluation."""
        return self._config.mode == "stop"

    @property
    def needed(self) -> frozenset[int]:
        """Versions that the run may have to go back to, of those that are judged."""
        last = self.last
        if last is None or not self.may_stop:
            return frozenset()
        return frozenset({last.good, *(finding.last_ok for finding in last.findings.values())})

    @property
    def last(self) -> Verdict | None:
        """The newest verdict."""
        return self.verdicts[max(self.verdicts)] if self.verdicts else None

    def iteration(self, facts: IterationFacts) -> None:
        """An iteration is complete."""
        self._facts[facts.iteration] = facts

    def evaluation(self, sighting: Sighting) -> Verdict:
        """Judge an evaluation. One that is there already, as after a resume, is judged again."""
        version = sighting.version
        self._sightings = {v: s for v, s in self._sightings.items() if v < version} | {version: sighting}
        self.verdicts = {v: found for v, found in self.verdicts.items() if v < version}
        self.verdicts[version] = verdict = self._judge(version)
        return verdict

    def _judge(self, version: int) -> Verdict:
        sightings = [self._sightings[v] for v in sorted(self._sightings)]
        since = sightings[-2].version if len(sightings) > 1 else 0
        facts = [self._facts[i] for i in sorted(self._facts) if i < version]
        evidence = Evidence(
            sightings, [f for f in facts if f.iteration >= since], [f for f in facts if f.iteration < since]
        )
        before = self.verdicts[sightings[-2].version] if len(sightings) > 1 else None
        findings = {
            reading.check: self._finding(reading, before, sightings)
            for reading in readings(self._config, self._warmup, evidence)
        }
        gold = {name: sum(v.values()) / len(v) for name, v in sightings[-1].gold.items() if v}
        return _verdict(version, findings, gold)

    def _finding(self, reading: Reading, before: Verdict | None, sightings: Sequence[Sighting]) -> Finding:
        earlier = before.findings.get(reading.check) if before is not None else None
        warn, stop = getattr(self._config, reading.check)
        beyond = (earlier.beyond if earlier is not None else 0) + 1 if reading.value > stop else 0
        # A check that was not made so far had nothing against the version before.
        last_ok = earlier.last_ok if earlier is not None else sightings[max(len(sightings) - 2, 0)].version
        limit = warn * (self._config.release if earlier is not None and earlier.level != "ok" else 1.0)
        if beyond >= self._config.patience and self._config.mode == "stop":
            return Finding(reading, "stop", beyond, last_ok)
        if beyond or reading.value > limit:
            return Finding(reading, "warn", beyond, last_ok)
        return Finding(reading, "ok", 0, sightings[-1].version)

    def until(self, iterations: int) -> dict[str, Any]:
        """JSON form of what was known when so many iterations were complete."""
        return {
            "iterations": [f.to_state() for i, f in sorted(self._facts.items()) if i < iterations],
            "evaluations": [s.to_state() for v, s in sorted(self._sightings.items()) if v <= iterations],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `until` gave."""
        for facts in state["iterations"]:
            self.iteration(IterationFacts(**facts))
        for sighting in state["evaluations"]:
            self.evaluation(Sighting.from_state(sighting))


def _verdict(version: int, findings: Mapping[str, Finding], gold: Mapping[str, float]) -> Verdict:
    found = Verdict(version, "ok", findings, gold, good=version)
    levels: list[Level] = ["ok", *(finding.level for finding in findings.values())]
    level = max(levels, key=LEVELS.index)
    if level == "ok":
        return found
    worst = [finding for finding in findings.values() if finding.level == level]
    good = min(finding.last_ok for finding in worst)
    texts = "; ".join(finding.reading.text for finding in worst)
    reason = f"after {version} iterations {texts}"
    if level == "stop":
        names = " and ".join(f"guard.{finding.reading.check}" for finding in worst)
        reason = f"the guard stopped the run ({names}): {reason}; it ends with {_result(good)}"
    return replace(found, level=level, good=good, reason=reason)


def _result(good: int) -> str:
    return f"the weights after {good} iterations" if good else "the base model, as no later evaluation was good"

"""Algorithms by the section of the configuration that asks for them.

algorithm_of          section -> Algorithm
policy_gradient_of    the same, of those that have likelihoods
"""

from __future__ import annotations

from digenrl.algorithms.base import Algorithm, PolicyGradient
from digenrl.algorithms.dance_grpo import DanceGrpo
from digenrl.algorithms.diffusion_nft import DiffusionNft
from digenrl.algorithms.flow_dppo import FlowDppo
from digenrl.algorithms.flow_grpo import FlowGrpo
from digenrl.algorithms.grpo_guard import GrpoGuard
from digenrl.algorithms.mix_grpo import MixGrpo
from digenrl.config import (
    AlgorithmConfig,
    DanceGrpoConfig,
    DiffusionNftConfig,
    FlowDppoConfig,
    FlowGrpoConfig,
    GrpoGuardConfig,
    MixGrpoConfig,
)

PolicyGradientConfig = FlowGrpoConfig | DanceGrpoConfig | GrpoGuardConfig | FlowDppoConfig | MixGrpoConfig


def algorithm_of(section: AlgorithmConfig) -> Algorithm:
    """The algorithm with the settings of its section."""
    return DiffusionNft(section) if isinstance(section, DiffusionNftConfig) else policy_gradient_of(section)


def policy_gradient_of(section: PolicyGradientConfig) -> PolicyGradient:
    """The same of those with likelihoods."""
    match section:
        case FlowGrpoConfig():
            return FlowGrpo(section)
        case DanceGrpoConfig():
            return DanceGrpo(section)
        case MixGrpoConfig():
            return MixGrpo(section)
        case GrpoGuardConfig():
            return GrpoGuard(section)
        case FlowDppoConfig():
            return FlowDppo(section)

"""Everything a run is configured by. Strict: an unknown key is an error.

RunConfig           one training run; its sections follow the life of a sample: model, data, rewards, algorithm,
                    optimiser, then how and where it is computed
model, algorithm, optimizer, schedule, surroundings, guard     the sections
run                 RunConfig, and what sections must agree on
load                read YAML, presets and overrides into a RunConfig
layers, yaml        what a file says, and where it says it
schema, explain     what may be said
errors, words       how an error reads
changes             what may change between the attempts of one run
"""

from digenrl.config.algorithm import (
    AlgorithmConfig,
    DanceGrpoConfig,
    DiffusionNftConfig,
    FlowDppoConfig,
    FlowGrpoConfig,
    GrpoGuardConfig,
    MixGrpoConfig,
    SlidingWindowConfig,
)
from digenrl.config.data import DataConfig, PromptSource
from digenrl.config.guard import GuardConfig
from digenrl.config.model import LoraConfig, ModelConfig
from digenrl.config.optimizer import OptimizerConfig
from digenrl.config.rewards import RequestConfig, RewardConfig
from digenrl.config.run import RunConfig
from digenrl.config.schedule import ObserveConfig, ScheduleConfig
from digenrl.config.section import Section
from digenrl.config.surroundings import (
    CheckpointConfig,
    ClusterConfig,
    EvaluationConfig,
    GatesConfig,
    KeepConfig,
    TrackingConfig,
)

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "DanceGrpoConfig",
    "DataConfig",
    "DiffusionNftConfig",
    "EvaluationConfig",
    "FlowDppoConfig",
    "FlowGrpoConfig",
    "GatesConfig",
    "GrpoGuardConfig",
    "GuardConfig",
    "KeepConfig",
    "LoraConfig",
    "MixGrpoConfig",
    "ModelConfig",
    "ObserveConfig",
    "OptimizerConfig",
    "PromptSource",
    "RequestConfig",
    "RewardConfig",
    "RunConfig",
    "ScheduleConfig",
    "Section",
    "SlidingWindowConfig",
    "TrackingConfig",
]

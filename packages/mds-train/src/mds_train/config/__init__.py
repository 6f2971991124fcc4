"""What a run is told: frozen dataclasses, one per TOML table, that check themselves."""

from mds_train.config.checkpoint import CheckpointConfig
from mds_train.config.data import DataConfig
from mds_train.config.distill import DistillConfig
from mds_train.config.engine import EngineConfig
from mds_train.config.fp16 import Fp16Config
from mds_train.config.lora import LoraConfig
from mds_train.config.memory import MemoryConfig
from mds_train.config.model import ModelConfig
from mds_train.config.optimizer import OptimizerConfig, ScheduleConfig
from mds_train.config.parallel import ParallelConfig
from mds_train.config.schema import TrainConfig
from mds_train.config.training import LoopConfig
from mds_train.config.watch import WatchConfig

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "DistillConfig",
    "EngineConfig",
    "Fp16Config",
    "LoopConfig",
    "LoraConfig",
    "MemoryConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ScheduleConfig",
    "TrainConfig",
    "WatchConfig",
]

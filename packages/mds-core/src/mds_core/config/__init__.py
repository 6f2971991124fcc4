"""What a model is (`GPTConfig`) and how it computes (`Execution`): checked, never written to."""

from mds_core.config.choices import (
    GATED,
    Activation,
    BalanceChoices,
    BalanceScope,
    DropPolicy,
    Normalization,
    PositionEmbedding,
)
from mds_core.config.execution import Execution
from mds_core.config.gpt import GPTConfig

__all__ = [
    "GATED",
    "Activation",
    "BalanceChoices",
    "BalanceScope",
    "DropPolicy",
    "Execution",
    "GPTConfig",
    "Normalization",
    "PositionEmbedding",
]

"""Models, each one readable file, with canonical parameter names."""

from mds_core.models.gpt import GPT, GPTLoss
from mds_core.models.weight_decay import no_weight_decay

__all__ = ["GPT", "GPTLoss", "no_weight_decay"]

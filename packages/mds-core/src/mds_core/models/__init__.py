"""Models, each one readable file, with canonical parameter names."""

from mds_core.models.adapters import add_adapters
from mds_core.models.bert import Bert, BertLogits, BertLoss
from mds_core.models.distilled import Distillation, DistilledGPT, DistilledLoss
from mds_core.models.gpt import GPT
from mds_core.models.losses import GPTLoss, RoutedLoss
from mds_core.models.t5 import T5
from mds_core.models.weight_decay import no_weight_decay

__all__ = [
    "GPT",
    "T5",
    "Bert",
    "BertLogits",
    "BertLoss",
    "Distillation",
    "DistilledGPT",
    "DistilledLoss",
    "GPTLoss",
    "RoutedLoss",
    "add_adapters",
    "no_weight_decay",
]

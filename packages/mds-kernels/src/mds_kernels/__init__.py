"""Fused training kernels with a float64 reference each, chosen per device and dtype.

Importing this compiles nothing, and loads neither triton nor NVIDIA apex: a backend is imported
when the registry chooses it.
"""

from mds_kernels.dispatch import Choice, check_ranks_agree, why
from mds_kernels.ops.adamw import adamw
from mds_kernels.ops.attention import attention
from mds_kernels.ops.bias import bias_dropout_add, bias_gelu
from mds_kernels.ops.cross_entropy import cross_entropy
from mds_kernels.ops.glu import geglu, swiglu
from mds_kernels.ops.linear_cross_entropy import LinearCrossEntropy, linear_cross_entropy
from mds_kernels.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from mds_kernels.ops.permutation import Permuted, moe_permute, moe_unpermute
from mds_kernels.ops.rope import rope
from mds_kernels.ops.softmax import scaled_masked_softmax
from mds_kernels.ops.wgrad import wgrad_accumulate
from mds_kernels.preference import BackendError, use_backend

__all__ = [
    "BackendError",
    "Choice",
    "LinearCrossEntropy",
    "Permuted",
    "adamw",
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "bias_dropout_add",
    "bias_gelu",
    "check_ranks_agree",
    "cross_entropy",
    "geglu",
    "layer_norm",
    "linear_cross_entropy",
    "moe_permute",
    "moe_unpermute",
    "rms_norm",
    "rope",
    "scaled_masked_softmax",
    "swiglu",
    "use_backend",
    "wgrad_accumulate",
    "why",
]

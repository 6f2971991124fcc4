"""The vocabulary losses of other libraries, as contestants of `linear_cross_entropy.py`.

Each is a function from hidden [n, h], weight [v, h] and labels [n] to the mean loss.
"""

import importlib.util
import os
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor


def liger(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Liger's fused op; without a GPU Triton interprets it, which says nothing about its speed."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    result = LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, labels)
    return result[0] if isinstance(result, tuple) else result


def megatron(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Megatron's vocabulary-parallel loss of fp32 logits, in a group of one."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        parallel_state.initialize_model_parallel()
    logits = (hidden @ weight.T).float()[:, None]
    return vocab_parallel_cross_entropy(logits, labels[:, None]).mean()


_PEERS = {"Liger": ("liger_kernel", liger), "Megatron": ("megatron", megatron)}


def installed(names: list[str]) -> Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Return those of the peers that are installed, and say which are not."""
    if "Liger" in names and not torch.cuda.is_available():
        # Read when triton is first imported, here and in the processes that measure memory.
        os.environ["TRITON_INTERPRET"] = "1"
    found = {}
    for name in names:
        module, contestant = _PEERS[name]
        if importlib.util.find_spec(module):
            found[name] = contestant
        else:
            print(f"left out: {name}: there is no module {module}\n")
    return found

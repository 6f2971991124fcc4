"""Weights of models of no known family, written as safetensors under the names that they have.

There is no configuration to write: the files go into a folder of the model that they belong to.
"""

from __future__ import annotations

from functools import partial

from mds_ckpt.checkpoint import Checkpoint
from mds_ckpt.families.rule import same
from mds_ckpt.plan import Options, Plan, refuse_layout
from mds_ckpt.writers.huggingface import SHARD_BYTES, outputs_of, shards_of, write_shards

__all__ = ["plan"]


def plan(checkpoint: Checkpoint, options: Options) -> Plan:
    """What writing the weights alone takes. Reads no tensor data."""
    refuse_layout(options, "hf")
    rules = [same(name, name, *tensor.shape) for name, tensor in checkpoint.tensors.items()]
    outputs = outputs_of(checkpoint, rules, options.dtype)
    shards = shards_of(outputs, options.shard_bytes or SHARD_BYTES)
    return Plan(
        used=[("weight", name) for name in checkpoint.tensors],
        dropped={
            (state, name): "the format holds weights only"
            for state, tensors in checkpoint.states.items()
            if state != "weight"
            for name in tensors
        },
        num_targets=len(rules),
        nbytes=sum(output.nbytes for output in outputs),
        write=partial(write_shards, checkpoint, shards, {}, options.jobs),
        notes=["weights of no model that we know: under their own names, without a config.json"],
    )

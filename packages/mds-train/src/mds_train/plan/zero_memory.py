"""What DeepSpeed 0.19 holds of one rank: states, and buffers and copies while it computes and sums.

Which copies it makes was read off torch's allocator in runs of all stages and precisions, and in
its sources: see the class that each comment names. Letters below: ``n`` trained parameters,
``bucket`` those of them that are summed at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from mds_train.config import TrainConfig
from mds_train.engines.deepspeed_config import deepspeed_config
from mds_train.engines.own_json import zero_settings

__all__ = ["Counts", "ZeroMemory"]

_FP32, _HALF = 4, 2
_BUCKET, _MOST_GATHERED = 500_000_000, 1_000_000_000
"""Parameters: DeepSpeed's defaults of reduce_bucket_size and stage3_max_live_parameters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Parameters of one rank."""

    held: int
    """That it computes with."""
    share: int
    """Of these what ZeRO 3 leaves it to keep."""
    trained: int
    trained_share: int
    sharers: int
    """Ranks over which ZeRO shares out."""


class ZeroMemory:
    """Bytes of one rank that follow from the stage, the precision and DeepSpeed's JSON.

    Args:
        config: The run.
        counts: The rank's parameters.
        on_cpu: There is no accelerator.
    """

    def __init__(self, config: TrainConfig, counts: Counts, *, on_cpu: bool) -> None:
        self._config, self._counts, self._on_cpu = config, counts, on_cpu
        self._stage = config.parallel.zero_stage
        self._low = config.train.precision != "fp32"
        self._value = _HALF if self._low else _FP32
        self._memory = config.memory
        self._n = counts.trained
        self._stepped = counts.trained_share if self._stage else counts.trained
        zero = deepspeed_config(config, dp_size=1, replicas=1, on_cpu=on_cpu)["zero_optimization"]
        zero = zero_settings(config) | zero
        self._bucket_size = _count(zero.get("reduce_bucket_size"), _BUCKET)
        self._bucket = min(self._n, self._bucket_size)
        self._most_gathered = _count(zero.get("stage3_max_live_parameters"), _MOST_GATHERED)
        self._is_flat = bool(zero.get("contiguous_gradients", True))
        # BF16_Optimizer, which is taken unless the state is offloaded.
        offloads = config.memory.offload_optimizer != "none"
        self._keeps_whole = self._stage == 1 and config.train.precision == "bf16" and not offloads

    @property
    def weights(self) -> int:
        """In the precision of the run."""
        if self._stage < 3:
            return self._value * self._counts.held
        return self._value * self._counts.share * (self._memory.offload_parameters == "none")

    @property
    def gradients(self) -> int:
        """Their sums, which are kept from one micro batch to the next."""
        return _FP32 * (self._counts.trained_share if self._stage >= 2 else self._n)

    @property
    def optimizer(self) -> int:
        """Masters, where there are any, and two moments; without what the host has."""
        on_host = self._memory.offload_ratio * (self._memory.offload_optimizer != "none")
        # ZeRO keeps its own flat fp32 copy of what it updates, also when the weights are fp32.
        masters = _FP32 if self._low or self._stage else 0
        return round((1 - on_host) * (masters + 2 * _FP32) * self._stepped)

    @property
    def buffers(self) -> int:
        """Beside the activations: weights that ZeRO 3 has gathered, gradients before they go."""
        gathered = waiting = 0
        if self._stage == 3:
            gathered = min(self._counts.held, self._most_gathered)
            waiting = self._bucket if self._counts.sharers > 1 and not self._flat else 0
        return self._value * (gathered + waiting) + self._always

    @property
    def summing(self) -> int:
        """New gradients, and copies of a bucket in which they are summed, in fp32."""
        return self._always + self._new + _FP32 * self._copies * self._bucket + self._partition

    @property
    def _always(self) -> int:
        """What is there at both moments."""
        # BF16_Optimizer adds gradients up in fp32 and keeps those of the weights, set to zero.
        pipelined = self._config.parallel.pp_size > 1
        kept = self._value * self._n if self._keeps_whole and not pipelined else 0
        return self._flat + kept

    @property
    def _flat(self) -> int:
        """The buffer that gradients are copied into one after another, of a bucket's full size."""
        if not self._is_flat or self._stage == 0 or self._keeps_whole:
            return 0
        wide = self._stage != 2 or not self._low
        return (_FP32 if wide else _HALF) * self._bucket_size

    @property
    def _new(self) -> int:
        """A bucket's gradients as the backward pass left them."""
        if self._stage < 2 or self._flat:
            return 0
        return self._value * self._bucket

    @property
    def _copies(self) -> int:
        """Copies of a bucket in fp32 that are there at once."""
        if self._stage == 0 or self._keeps_whole:
            return int(self._counts.sharers > 1)  # DeepSpeedEngine.allreduce_bucket
        widened = int(self._low and not (self._stage == 3 and self._flat))
        if self._stage == 3:  # __avg_scatter_grads, and reduce_scatter_coalesced's torch.cat
            return widened + 1 + int(self._on_cpu)  # gloo scatters a copy
        if self._flat:
            return widened if self._stage == 2 else 0
        return 1  # DeepSpeedZeroOptimizer.allreduce_bucket: flattened, and widened below

    @property
    def _partition(self) -> int:
        """A second copy: narrow and flat before it is widened, or the rank's part at the end."""
        if self._stage == 2 and self._low and not self._flat:
            return self._value * self._bucket
        return _FP32 * self._counts.trained_share * (self._stage == 1 and not self._keeps_whole)


def _count(said: object, usual: int) -> int:
    """A number of the JSON; DeepSpeed's own where it says none, or "auto"."""
    return int(said) if isinstance(said, int | float) else usual

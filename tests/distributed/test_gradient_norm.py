"""The global gradient norm counts each parameter once, and all ranks clip by that one number."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tiny_run import tiny_config
from torch import Tensor, nn

from mds_kernels.testing import run_ranks
from mds_train.config import TrainConfig

pytestmark = pytest.mark.timeout(240)

CASES = [(stage, precision) for precision in ("fp32", "bf16") for stage in (0, 1, 2, 3)]


class Toy(nn.Module):
    """A norm's weight that both ranks hold, and a weight that they share."""

    def __init__(self) -> None:
        super().__init__()
        self.copied = nn.Parameter(torch.ones(1))
        self.split = nn.Parameter(torch.ones(1))

    def forward(self, slope: Tensor) -> Tensor:
        return (3.0 * self.copied + slope * self.split).float().sum()


def norms_and_moments(
    configs: list[TrainConfig],
) -> list[tuple[float, bool, dict[str, float]]]:
    """One step in each case: gradients 3 on both ranks, 4 on the first and 12 on the second."""
    from mds_core import Layout, ProcessGroups
    from mds_train.engines.deepspeed import DeepSpeedEngine

    groups = ProcessGroups.build(Layout(tp_size=2))
    found = []
    for config in configs:
        dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
        engine = DeepSpeedEngine(
            Toy().to(dtype),
            config=config,
            groups=groups,
            split_names=frozenset({"split"}),
            shapes={"copied": (1,), "split": (2,)},
        )
        slope = torch.tensor([4.0, 12.0][dist.get_rank()], dtype=dtype)
        micro_batches = config.train.global_batch_size // config.train.micro_batch_size
        for index in range(micro_batches):
            loss = engine.forward(slope) / micro_batches
            engine.backward(loss, last=index == micro_batches - 1)
        update = engine.step(lr=0.1, weight_decay=0.0)
        moments = {
            fragment.name: fragment.moments["exp_avg"].item() for fragment in engine.fragments()
        }
        found.append((update.grad_norm, update.applied, moments))
        engine.close()
    return found


def test_a_copy_counts_once_and_all_ranks_clip_alike(tmp_path: Path) -> None:
    configs = [
        tiny_config(
            tmp_path / "store",
            tmp_path / "run",
            train={"precision": precision},
            parallel={"zero_stage": stage, "tp_size": 2},
        )
        for stage, precision in CASES
    ]

    found = run_ranks(norms_and_moments, 2, configs)

    for rank, slope in ((0, 4.0), (1, 12.0)):
        for case, (norm, applied, moments) in zip(CASES, found[rank], strict=True):
            assert norm == pytest.approx(13.0, rel=1e-6), case
            assert applied
            # AdamW keeps a tenth of the clipped gradient: clipped to a norm of 1, so divided by 13.
            clipped = {"copied": 0.1 * 3.0 / 13.0, "split": 0.1 * slope / 13.0}
            assert moments == pytest.approx(clipped, rel=1e-5), case


def norms_of_a_large_weight(configs: list[TrainConfig], gradient: Tensor) -> list[float]:
    """The norm in each case where the gradient of the one weight is ``gradient``."""
    from mds_core import ProcessGroups
    from mds_train.engines.deepspeed import DeepSpeedEngine

    found = []
    for config in configs:
        model = nn.Linear(gradient.shape[1], gradient.shape[0], bias=False)
        engine = DeepSpeedEngine(
            model,
            config=config,
            groups=ProcessGroups.single(),
            split_names=frozenset(),
            shapes={"weight": tuple(gradient.shape)},
        )
        engine.backward(
            (gradient * engine.forward(torch.eye(gradient.shape[1])).T).sum(), last=True
        )
        found.append(engine.step(lr=0.1, weight_decay=0.0).grad_norm)
        engine.close()
    return found


def test_the_norm_of_millions_of_elements_is_summed_in_float64(tmp_path: Path) -> None:
    # On a CPU torch's own float32 norm of this gradient is 4e-5 too small.
    gradient = torch.randn(8, 400_000, generator=torch.Generator().manual_seed(0)).pow(9)
    gradient = gradient.T.contiguous()
    configs = [
        tiny_config(
            tmp_path / "store",
            tmp_path / "run",
            train={"global_batch_size": 2},
            parallel={"zero_stage": stage},
        )
        for stage in (0, 1, 2, 3)
    ]
    exact = float(gradient.double().norm())

    (found,) = run_ranks(norms_of_a_large_weight, 1, configs, gradient)

    assert found == pytest.approx([exact] * 4, rel=1e-7)

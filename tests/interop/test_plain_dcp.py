"""What torch's own distributed checkpointing saves is listed and read, by its own names."""

from __future__ import annotations

from pathlib import Path

import pytest

from mds_ckpt import open_checkpoint
from mds_ckpt.verification import verify

torch = pytest.importorskip("torch", reason="it writes the checkpoint")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_torchs_own_distributed_checkpoint_is_read(tmp_path: Path) -> None:
    from torch.distributed import checkpoint as dcp

    tensors = {
        "model.layers.0.wq.weight": torch.randn(5, 3, dtype=torch.bfloat16),
        "model.norm.weight": torch.randn(7)[2:6],
        "step": torch.tensor(7),
        "transposed": torch.randn(3, 2).t(),
    }
    dcp.save({**tensors, "train_state": {"note": "any object"}}, checkpoint_id=tmp_path / "step-7")

    checkpoint = open_checkpoint(tmp_path / "step-7")

    assert checkpoint.model.family == "unknown"
    assert len(checkpoint.tensors) == len(tensors)
    for name, tensor in tensors.items():
        read = checkpoint.tensor(name).numpy()
        assert read.shape == tuple(tensor.shape)
        assert (read.astype("f8") == tensor.double().numpy()).all()
    assert list(verify(tmp_path / "step-7").problems) == []

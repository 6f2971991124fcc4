"""What torch's own distributed checkpointing saves is listed and read, by its own names."""

from __future__ import annotations

from pathlib import Path

import pytest

from mds_ckpt import convert, open_checkpoint
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


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_torchs_own_reader_reads_what_we_write(golden: Path, tmp_path: Path) -> None:
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    convert(golden / "llama_tp2pp2dp1_z1_bf16" / "ckpt", tmp_path / "ours", to="mcore")
    (step,) = (tmp_path / "ours").glob("iter_*")
    wanted = open_checkpoint(tmp_path / "ours")

    dcp_to_torch_save(step, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=False)
    part = {"decoder.layers.mlp.linear_fc1.weight": torch.zeros(4, 192, 32, dtype=torch.bfloat16)}
    dcp.load(part, checkpoint_id=step)

    for layer in range(4):
        ours = wanted.tensor(f"decoder.layers.{layer}.mlp.linear_fc1.weight").numpy()
        for found in (whole, part):
            theirs = found["decoder.layers.mlp.linear_fc1.weight"][layer]
            assert (theirs.float().numpy() == ours.astype("f4")).all()
    assert torch.equal(
        whole["output_layer.weight"][:600].float(),
        torch.from_numpy(wanted.tensor("output_layer.weight").numpy().astype("f4")),
    )

"""What all tests here share; puts this folder on the path, too, for those in its subfolders."""

import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist

# Ranks need DeepSpeed; see mds_kernels.testing.run_ranks.
os.environ.setdefault("MDS_RANKS_PRELOAD", "mds_train.loop,mds_train.engines.pipeline")


@pytest.fixture(scope="module", autouse=True)
def _one_process() -> Iterator[None]:
    """The first run of a file starts torch.distributed and leaves it for the next ones."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()

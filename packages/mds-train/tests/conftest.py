"""Puts this folder on the path, so that tests in its subfolders find the shared cases."""

import os

# Ranks need DeepSpeed; see mds_kernels.testing.run_ranks.
os.environ.setdefault("MDS_RANKS_PRELOAD", "mds_train.loop,mds_train.engines.pipeline")

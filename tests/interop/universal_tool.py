"""Run the real ``ds_to_universal``: ``python universal_tool.py INPUT OUTPUT``."""

from __future__ import annotations

import sys

from deepspeed.checkpoint import ds_to_universal
from real_megatron import pretend_megatron

if __name__ == "__main__":
    pretend_megatron()
    source, target = sys.argv[1:]
    workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    sys.argv[1:] = ["--input_folder", source, "--output_folder", target, *workers]
    ds_to_universal.main(ds_to_universal.parse_arguments())

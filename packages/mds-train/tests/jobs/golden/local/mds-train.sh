#!/usr/bin/env bash
# mds-train: on this machine, 8 ranks.
set -euo pipefail
export NOTE='it'"'"'s two words'
: "${WANDB_API_KEY:?set it before you submit the job}"
exec torchrun \
  --standalone \
  --nproc-per-node=8 -m mds_train run /home/me/configs/run.toml \
  --parallel.tp-size 8 \
  --train.run-dir '/data/my run' \
  --checkpoint.load '/data/my run' \
  --checkpoint.from-scratch-if-missing

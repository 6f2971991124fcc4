#!/usr/bin/env bash
# mds-train: 4 machines with 8 ranks each. Write their names into hostfile.
set -euo pipefail
MASTER_ADDR="${HEAD:?name the first machine in it, or write the job with --host}"
export MASTER_ADDR MASTER_PORT=29400
cd "$(dirname "$0")"
export NOTE='it'"'"'s two words'
: "${WANDB_API_KEY:?set it before you submit the job}"
# The ranks' own variables are read where the ranks are.
# shellcheck disable=SC2016
exec mpirun \
  --hostfile hostfile -np 32 \
  --map-by ppr:8:node:PE=8 -x NOTE -x WANDB_API_KEY -x MASTER_ADDR -x MASTER_PORT bash -c 'export RANK="$OMPI_COMM_WORLD_RANK" WORLD_SIZE="$OMPI_COMM_WORLD_SIZE" LOCAL_RANK="$OMPI_COMM_WORLD_LOCAL_RANK" LOCAL_WORLD_SIZE="$OMPI_COMM_WORLD_LOCAL_SIZE"; exec mds-train "$@"' mds-train run /home/me/configs/run.toml \
  --parallel.tp-size 8 \
  --train.run-dir '/data/my run' \
  --checkpoint.load '/data/my run' \
  --checkpoint.from-scratch-if-missing

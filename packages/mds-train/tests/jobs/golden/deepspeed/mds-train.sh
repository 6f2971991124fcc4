#!/usr/bin/env bash
# mds-train: 4 machines. Write their names into hostfile, then on every machine:
#   ./mds-train.sh 0    (on the first one; 1, 2 ... on the others, at the same time)
set -euo pipefail
rank="${1:?say which machine this is: 0 for the first one}"
head="${HEAD:?name the first machine in it, or write the job with --host}"
cd "$(dirname "$0")"
export NOTE='it'"'"'s two words'
: "${WANDB_API_KEY:?set it before you submit the job}"
exec deepspeed \
  --hostfile hostfile \
  --no_ssh \
  --node_rank "$rank" \
  --master_addr "$head" \
  --master_port 29400 \
  --module mds_train run /home/me/configs/run.toml \
  --parallel.tp-size 8 \
  --train.run-dir '/data/my run' \
  --checkpoint.load '/data/my run' \
  --checkpoint.from-scratch-if-missing

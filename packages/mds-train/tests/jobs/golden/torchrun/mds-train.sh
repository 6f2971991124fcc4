#!/usr/bin/env bash
# mds-train: 4 machines with 8 ranks each. On every machine:
#   ./mds-train.sh 0    (on HEAD_NODE; 1, 2 ... on the others, at the same time)
# The environment variable ADDRESS names this machine's address in the training network, HEAD that
# of the first machine, and GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME the interface of that network.
set -euo pipefail
rank="${1:?say which machine this is: 0 for the first one}"
head="${HEAD:?name the first machine in it, or write the job with --host}"
address="${ADDRESS:-$(hostname -I | cut -d ' ' -f 1)}"
export NOTE='it'"'"'s two words'
: "${WANDB_API_KEY:?set it before you submit the job}"
exec python -m mds_train.jobs.supervisor \
  --machine="$rank" \
  --machines=4 \
  --head="$head" \
  --address="$address" \
  --port=29400 \
  --processes=8 \
  --fewest=1 \
  --restarts=3 \
  -- run /home/me/configs/run.toml \
  --parallel.tp-size 8 \
  --train.run-dir '/data/my run' \
  --checkpoint.load '/data/my run' \
  --checkpoint.from-scratch-if-missing

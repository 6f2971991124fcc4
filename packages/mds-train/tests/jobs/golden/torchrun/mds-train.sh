#!/usr/bin/env bash
# mds-train: 4 machines with 8 ranks each. On every machine:
#   ./mds-train.sh 0    (on HEAD_NODE; 1, 2 ... on the others, at the same time)
# The environment variable ADDRESS names this machine's address in the training network.
set -euo pipefail
rank="${1:?say which machine this is: 0 for the first one}"
run_dir='/data/my run'
head="${HEAD:-HEAD_NODE}"
address="${ADDRESS:-$(hostname -I | cut -d ' ' -f 1)}"
is_head=$((rank == 0))
export NOTE='it'"'"'s two words'
: "${WANDB_API_KEY:?set it before you submit the job}"

mkdir -p "$run_dir"
for ((attempt = 0; attempt <= 3; attempt++)); do
  if ((rank == 0)); then
    echo "mds-train-$(date +%s)" > "$run_dir/rendezvous"
  else
    sleep 10
  fi
  id="$(< "$run_dir/rendezvous")"
  if torchrun \
    --nnodes=4 \
    --nproc-per-node=8 \
    --rdzv-backend=c10d \
    --rdzv-endpoint="$head:29400" \
    --rdzv-id="$id" \
    --rdzv-conf=is_host="$is_head" \
    --local-addr="$address" -m mds_train run configs/run.toml \
    --parallel.tp-size 8 \
    --train.run-dir '/data/my run' \
    --checkpoint.load '/data/my run' \
    --checkpoint.from-scratch-if-missing; then
    exit 0
  fi
  echo "Start $attempt failed; all machines start again from the newest checkpoint." >&2
  sleep 30
done
echo "Gave up after 3 restarts." >&2
exit 1

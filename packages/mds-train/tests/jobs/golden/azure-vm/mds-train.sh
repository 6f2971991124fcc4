#!/usr/bin/env bash
# mds-train: 4 machines of Standard_ND96isr_H100_v5 in one placement group, on one fast network.
# They start the job themselves. It ends, and its costs with it, by:
#   az vmss delete --resource-group mds-train-group --name mds-train
set -euo pipefail
az vmss create --resource-group mds-train-group \
  --name mds-train \
  --instance-count 4 \
  --vm-sku Standard_ND96isr_H100_v5 \
  --image microsoft-dsvm:ubuntu-hpc:2204:latest \
  --orchestration-mode Uniform \
  --single-placement-group true \
  --disable-overprovision \
  --computer-name-prefix mds-train \
  --assign-identity \
  --custom-data mds-train.cloud-init.yaml

"""Checkpoints of Megatron and Megatron-DeepSpeed: names, layouts, readers, targets."""

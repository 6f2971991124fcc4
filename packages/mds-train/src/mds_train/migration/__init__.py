"""From Megatron(-DeepSpeed)'s launch scripts to a configuration of ours: read, never executed."""

"""Token stores: opened, written, changed and checked; Megatron's pairs beside them."""

"""Fine-tuning: a run whose model and defaults come from a checkpoint and a store."""

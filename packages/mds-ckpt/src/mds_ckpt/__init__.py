"""Opens, checks and converts checkpoints of large models, without torch and without trust in the file."""

"""Files of an untrusted folder, opened, parsed and written strictly. Knows no checkpoints."""

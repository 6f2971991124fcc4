"""Keep checkpoints safe: encrypted at rest, and backed up to a second place."""

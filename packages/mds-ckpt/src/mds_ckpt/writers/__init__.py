"""How checkpoints are written in each format that a conversion can end in: one module a format."""

"""Job files for machines and clusters: written, never submitted."""

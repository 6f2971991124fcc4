"""Datasets over a token store: numpy out, no files but the store."""

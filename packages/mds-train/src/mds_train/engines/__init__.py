"""Engines: what turns losses into updates, and knows where each rank's optimizer state lies."""

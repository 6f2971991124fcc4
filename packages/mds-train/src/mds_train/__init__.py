"""Trains large transformers on any layout, from one CPU to a cluster, and resumes exactly."""

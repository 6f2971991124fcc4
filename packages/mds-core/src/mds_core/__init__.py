"""Parallel transformer layers, models and pipeline schedules that equal one process."""

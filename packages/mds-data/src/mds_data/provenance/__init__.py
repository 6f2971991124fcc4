"""Where a dataset comes from and under which terms: facts at the start, carried to the end."""

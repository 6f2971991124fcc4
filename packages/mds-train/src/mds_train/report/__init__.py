"""Reports on runs: one HTML page, pictures and tables from what the runs wrote."""

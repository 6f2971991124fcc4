"""Choose which texts a corpus keeps: clean, deduplicate, decontaminate, each with a report."""

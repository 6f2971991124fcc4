"""How hard each sample or document is: measured in parallel, kept beside the store."""

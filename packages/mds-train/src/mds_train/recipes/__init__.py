"""Ready configurations of known models; each is a TOML file that `mds-train run` takes."""

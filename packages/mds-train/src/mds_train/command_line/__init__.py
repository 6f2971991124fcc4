"""What `mds-train COMMAND` takes and does, command by command; cli.py brings it together."""

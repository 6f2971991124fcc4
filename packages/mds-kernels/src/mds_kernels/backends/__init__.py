"""One folder a backend; nothing in it is imported before the registry chooses it."""

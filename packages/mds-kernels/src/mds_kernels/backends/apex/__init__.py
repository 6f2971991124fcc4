"""NVIDIA apex as a backend, where it is truly there; imported only once it is chosen."""

"""The backend that is always usable: plain torch, on every device and dtype."""

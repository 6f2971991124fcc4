"""What the commands do, how each is spelled, and what they print."""

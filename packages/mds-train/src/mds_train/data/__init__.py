"""What a step trains on: stores and their blends, how many samples, how long they are."""

"""What ranks know of one another besides the numbers that they exchange."""

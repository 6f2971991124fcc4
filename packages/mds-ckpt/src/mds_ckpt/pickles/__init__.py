"""What ``torch.save`` writes, read as data and written by hand; nothing is imported or called."""

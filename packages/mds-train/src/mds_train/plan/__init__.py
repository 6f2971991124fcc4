"""What a run will need before it starts: memory, time, traffic, disk, and layouts that fit."""

"""Does growing help? Compares a learned controller with its rivals on the same hosts."""

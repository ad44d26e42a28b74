"""`esper train`: growing hosts as rows of a rollout, and the run that learns to grow them."""

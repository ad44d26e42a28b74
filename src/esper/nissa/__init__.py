"""nissa: telemetry -- where events go (console, TensorBoard)."""

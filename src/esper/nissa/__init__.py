"""nissa: telemetry -- where events go (console, TensorBoard, the run's database)."""

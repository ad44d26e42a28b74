"""kasmina: growth -- host networks and the seeds that grow in their slots."""

"""Kernels behind `compute_gae`, one file each."""

"""Kernels for the policy's hot paths, one file each, imported where they are used."""

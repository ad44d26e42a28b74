"""Kernels that train the hosts of a population; see `esper.kernels` for their twins and tests."""

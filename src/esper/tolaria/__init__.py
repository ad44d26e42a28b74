"""tolaria: execution -- trains many growing hosts at once, and keeps them safe.

A `Population` (`population.py`) is P hosts of one architecture, trained as one program on a task
(`tasks.py`). Its `Governor` (`governor.py`) rolls back hosts that diverge. Several populations form
a host batch (`host_batch.py`), and `GrowthEnvironment` (`environment.py`) adds episodes, prices and
reports for a controller. A population runs the plain code of `batched.py`, or kernels.
"""

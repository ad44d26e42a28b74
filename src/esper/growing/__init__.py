"""growing: adoption -- your own nn.Module, grown within a budget and returned as a plain one.

`run.py` is `esper.grow`, `growth.py` is `esper.Growth`. Sites are found by `tracing.py`, `sites.py`
and `pairs.py`; seeds live in `slots.py` and `network.py`; `plain.py` and `export.py` return them.
"""

"""kasmina: growth -- host networks and the seeds that grow in their slots.

A host (`hosts.py`) is a small network with a slot after each segment. A seed is a few layers from
a blueprint (`blueprints.py`). `lifecycle.py` moves seeds through their stages, and `blending.py`
mixes their outputs into the host. Layers (`layers.py`) are data, so that costs are known before
anything is built and many hosts can run as one program.
"""

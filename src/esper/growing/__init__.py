"""growing: adoption -- a run that grows your own nn.Module within a budget and returns a plain one.

`run.py` is `esper.grow`, `growth.py` is `esper.Growth`. What is done to the model is in
`esper.surgery`, and what is written down in `esper.nissa`.
"""

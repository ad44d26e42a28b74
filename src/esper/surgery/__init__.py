"""surgery: operations -- a user's nn.Module: where it can change, what is attached to it, and how it is written to files.

`tracing.py` watches a forward pass. `sites.py` and `pairs.py` find where seeds and new units fit.
`slots.py` and `branches.py` attach them with hooks. `plain.py` folds them into a plain model, and
`export.py` writes it to files.
"""

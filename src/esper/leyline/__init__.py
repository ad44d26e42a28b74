"""leyline: contracts -- the types and tables that all other packages share.

It imports only `runtime`. `stages.py` has the stages of a seed and the table of legal moves,
`factored_actions.py` the actions and their masks, `reports.py` what a controller sees,
`protocols.py` the interfaces between packages, and `sequences.py` the episodes of a rollout.
"""

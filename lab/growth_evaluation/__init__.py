"""growth_evaluation: the claims about growth that are published, and what they rest on.

`esper evaluate` compares a controller with its rivals in one small table. This package compares
several controllers with everything that a search could find, and judges claims that were fixed
before any result:

- `python -m growth_evaluation` trains controllers and judges the claims (`evaluation.py`).
- `python -m growth_evaluation.widening` judges controllers that may widen layers.
- `python -m growth_evaluation.training_settings` measures what each setting of training is worth.

All arms grow the hosts of `esper.simic.growth.comparison`, many arms side by side in one host batch
(`paired_experiment.py`). Rivals are the best of many constant plans (`plan_search.py`), tuned
settings (`tuning.py`), networks that start fully grown (`preset_seeds.py`), and static hosts of
other widths (`static_hosts.py`). `claims.py` has the claims; `estimates.py`, `frontier.py` and
`random_search.py` their statistics; `report.py` and `frontier_plot.py` show them.
"""

"""adapt_practice: the practice that trains controllers for `esper.adapt`.

`python -m adapt_practice` trains models (`scenarios.py`), tries every plan on shifted data
(`shifts.py`, `trials.py`, `fitting.py`), and trains a controller on the results by PPO
(`outcomes.py`, `training.py`). The controller that ships with Esper was trained with it.
"""

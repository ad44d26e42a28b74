"""adapting: adaptation -- a trained model, changed for other data by a controller that practised on many shifts.

`adapt.py` is `esper.adapt`. `plans.py` lists what can change, `evidence.py` measures signals, and
`controller.py` chooses. The practice is not in the package: see `lab/adapt_practice`.
"""

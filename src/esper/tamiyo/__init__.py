"""tamiyo: policy -- sees reports, chooses actions.

A controller gets the reports and masks of N hosts and returns one action each:

- `scripted`: random actions, a fixed schedule, a constant plan;
- `heuristic`: rules with a fitted prior;
- `learned`: a trained policy.

`policy` has the network that `simic` trains, for Tamiyo and for any other environment.
"""

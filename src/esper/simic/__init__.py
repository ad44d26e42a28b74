"""simic: learning -- turns experience into a better policy.

`agent` has the rollout buffer, GAE and PPO. `trainer.py` is the loop of one round, for any
environments. `gym` is `esper.PPO`, and `growth` is `esper train`.
"""

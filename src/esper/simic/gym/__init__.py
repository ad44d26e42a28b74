"""`esper.PPO`: Gymnasium environments as rows of a rollout, and the model that learns them."""

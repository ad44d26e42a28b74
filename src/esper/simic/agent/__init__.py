"""The PPO agent: rollout buffer, advantages, update."""

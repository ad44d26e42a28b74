"""Recurrent, masked PPO on a Gymnasium environment: train, save, load, predict."""

import gymnasium

from esper.simic.training.gymnasium import GymAgent, train

envs = gymnasium.make_vec("Taxi-v4", num_envs=8, vectorization_mode="sync")
agent = train(envs, total_steps=4_000, on_round=lambda step, m: print(step, m["ppo/kl"]))
agent.save("taxi.pt")

agent = GymAgent.load("taxi.pt")
env = gymnasium.make("Taxi-v4")
observation, info = env.reset(seed=0)
state, terminated, truncated = None, False, False
while not (terminated or truncated):
    action, state = agent.predict(observation, state, info["action_mask"])
    observation, reward, terminated, truncated, info = env.step(int(action))
print("delivered" if terminated else "out of time")

"""Recurrent, masked PPO on a Gymnasium environment: train, save, load, predict."""

import gymnasium

import esper

envs = gymnasium.make_vec("Taxi-v4", num_envs=8, vectorization_mode="sync")
model = esper.PPO(envs)
model.learn(4_000, callback=lambda steps, metrics: print(steps, metrics["ppo/kl"]))
model.save("taxi.pt")

model = esper.PPO.load("taxi.pt")
env = gymnasium.make("Taxi-v4")
observation, info = env.reset(seed=0)
state, terminated, truncated = None, False, False
while not (terminated or truncated):
    action, state = model.predict(observation, state, mask=info["action_mask"])
    observation, reward, terminated, truncated, info = env.step(int(action))
print("delivered" if terminated else "out of time")

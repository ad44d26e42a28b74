"""PPO's loss and its gradient in one pass over the rows of a minibatch, on a CPU."""

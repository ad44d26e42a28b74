"""Agents for all kinds of actions, and rollouts that they collected from random observations."""

from itertools import pairwise

import torch
from torch import Tensor, nn

from esper.leyline.factored_actions import ActionMasks, FactoredActionSpace, Head
from esper.simic.agent.ppo import PPOAgent, PPOConfig
from esper.simic.agent.rollout import LEARNED_FROM, Rollout
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer, TamiyoRolloutStep
from esper.tamiyo.policy.features import FeatureLayout
from esper.tamiyo.policy.network import PolicyConfig, RecurrentState
from esper.tamiyo.policy.plain_heads import flat_policy
from esper.tamiyo.policy.slot_heads import tamiyo_policy

NUMBERS = 5  # flat features of an observation
TAMIYO = FeatureLayout(3, 5)
SPACES = {
    "plain": FactoredActionSpace((Head("a", 3), Head("b", 2), Head("c", 4))),
    "dependent": FactoredActionSpace(
        (
            Head("op", 3),
            Head("slot", 2, given=("op",)),
            Head("kind", 4, given=("op", "slot")),
            Head("when", 5),
        )
    ),
    "continuous": FactoredActionSpace((Head("x", continuous=True), Head("y", continuous=True))),
    "mixed": FactoredActionSpace(
        (
            Head("kind", 3),
            Head("speed", continuous=True),
            Head("target", 4, given=("kind",)),
            Head("aim", given=("kind",), continuous=True),
        )
    ),
    "optional": FactoredActionSpace((Head("op", 3), Head("tool", 4, given=("op",), optional=True))),
}


class SmallEncoder(nn.Module):
    """A custom encoder of the numbers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(NUMBERS, 7)

    def forward(self, numbers: Tensor) -> Tensor:
        return self.layer(numbers).relu()


def make_agent(space="plain", *, device="cpu", rng_seed=0, images=(), encoder=None, hidden=8,
               layers=1, memory=True, floor=0.0, **settings):  # fmt: skip
    """An agent whose choices are far from uniform, for actions of `SPACES`, or Tamiyo's."""
    torch.manual_seed(rng_seed)
    config = PolicyConfig(lstm_hidden_dim=hidden, lstm_layers=layers, memory=memory, floor=floor)
    if space == "tamiyo":
        policy = tamiyo_policy(TAMIYO, config)
    else:
        policy = flat_policy(SPACES[space], NUMBERS, config, images=images, encoder=encoder)
    stir(policy, 0.1 if images or hidden >= 64 else 0.3)
    return PPOAgent(policy.to(device), PPOConfig(**({"num_minibatches": 2} | settings)))


@torch.no_grad()
def stir(policy, size=0.15):
    """Move all weights, so that no output is near its initial value."""
    for parameter in policy.parameters():
        change = size * torch.randn(parameter.shape)  # the same on every device
        parameter.add_(change.to(parameter.device))


def random_masks(space, num_envs, rng):
    """Masks that differ in every row; conditional heads often have nothing to choose."""
    masks = {}
    for head in space:
        mask = torch.rand(num_envs, *space.mask_shape(head.name), generator=rng) < 0.6
        if not head.given:
            legal = torch.randint(head.size, (num_envs, 1), generator=rng)
            mask.scatter_(1, legal, True)
        masks[head.name] = mask
    return ActionMasks(space, masks)


def random_features(policy, num_rows, rng):
    """Numbers around 1."""
    return 3 * torch.randn(num_rows, policy.feature_size, generator=rng) + 1


def random_frames(policy, num_rows, rng):
    """Pixels from 0 to 255, of all images."""
    shape = (num_rows, policy.frame_size)
    return torch.randint(256, shape, generator=rng, dtype=torch.uint8)


def collect(agent, step_counts=(9, 4, 12, 11), *, rng_seed=0, forced_env=None):
    """A rollout with rows of these lengths, several episodes a row and both kinds of ends.

    Short rows begin late, all with a random recurrent state. `forced_env` has one legal action.
    """
    policy = agent.policy
    space = policy.action_space
    config = policy.config
    device = agent.device
    counts = torch.tensor(step_counts)
    num_envs, num_steps = len(counts), int(counts.max())
    rng = torch.Generator().manual_seed(rng_seed)
    draws = torch.Generator(device).manual_seed(rng_seed)
    size = (num_envs, config.lstm_layers, config.lstm_hidden_dim)
    buffer = TamiyoRolloutBuffer(
        num_envs,
        num_steps + 2,
        policy.feature_size,
        space,
        config.lstm_hidden_dim,
        config.lstm_layers,
        device,
        policy.frame_size,
    )
    state = RecurrentState(*(torch.randn(size, generator=rng).to(device) for _ in "hc"))
    initial = state
    for t in range(num_steps):
        features = random_features(policy, num_envs, rng)
        frames = random_frames(policy, num_envs, rng)
        masks = random_masks(space, num_envs, rng)
        if forced_env is not None:
            force(masks, forced_env)
        decision = agent.act(
            features.to(device),
            masks.to(device),
            state,
            frames=frames.to(device),
            generator=draws,
        )
        terminated = torch.rand(num_envs, generator=rng) < 0.15
        truncated = (torch.rand(num_envs, generator=rng) < 0.15) & ~terminated
        step = TamiyoRolloutStep(
            features,
            decision.actions,
            decision.log_probs,
            decision.masks,
            decision.values,
            torch.randn(num_envs, generator=rng),
            terminated,
            truncated,
            torch.randn(num_envs, generator=rng),
            *state,
            frames,
        )
        has_begun = t >= num_steps - counts
        envs = has_begun.nonzero()[:, 0]
        buffer.add_batch(TamiyoRolloutStep(*(field[envs] for field in step)), envs)
        ended = (terminated | truncated)[:, None, None].to(device)
        waits = ~has_begun[:, None, None].to(device)
        state = RecurrentState(
            *(
                torch.where(waits, first, torch.where(ended, 0.0, now))
                for first, now in zip(initial, decision.state, strict=True)
            )
        )
    return buffer


def force(masks, env):
    """Leave the env only choice 0 of heads that are given no other, and no choice of the rest."""
    for head in masks.action_space:
        masks[head.name][env] = False
        if not head.given:
            masks[head.name][env, 0] = True


def rollout_of(buffer) -> Rollout:
    buffer.compute_advantages_and_returns()
    buffer.normalize_advantages()
    rollout = buffer.rollout()
    rollout.targets.copy_(rollout.returns)  # an update scales them
    return rollout


def episodes_of(rollout):
    """Each episode, or part of one, as a rollout of its own `[steps, 1, ...]`, and where it was.

    Its state is zero before its first row, unless it began before the rollout did.
    """
    episodes = []
    for env in range(rollout.valid.shape[1]):
        count = int(rollout.valid[:, env].sum())
        starts = rollout.starts[:count, env].nonzero()[:, 0].tolist()
        edges = [0, *starts, count] if count else [0]
        for first, end in pairwise(edges):
            rows = slice(first, end)
            keeps = 1.0 if first == 0 else 0.0
            fields = {
                name: getattr(rollout, name)[rows, env : env + 1]
                for name in LEARNED_FROM
                if name != "starts"
            }
            alone = Rollout(
                **fields,
                starts=torch.zeros_like(fields["valid"]),
                initial_h=keeps * rollout.initial_h[env : env + 1],
                initial_c=keeps * rollout.initial_c[env : env + 1],
            )
            episodes.append((rows, env, alone))
    return episodes

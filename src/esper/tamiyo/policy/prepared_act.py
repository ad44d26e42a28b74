"""`act` for many steps between two updates: weights are prepared once, and operations are few.

    act = prepared_act(policy, mean, std)           # None: use `policy.act`
    decision = act(features, masks, state, generator=rng)

For plain policies with independent choices on a CPU: there, the calls of torch take longer than the
arithmetic. Choices are those of `policy.act` with the same generator.
"""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from esper.leyline.factored_actions import ActionMasks
from esper.leyline.ranks import noise
from esper.tamiyo.policy.distributions import MASKED
from esper.tamiyo.policy.network import Decision, FactoredRecurrentActorCritic, RecurrentState
from esper.tamiyo.policy.plain_heads import PlainHeads


class Act(Protocol):
    """The signature of `policy.act`."""

    def __call__(
        self,
        features: Tensor,
        masks: ActionMasks,
        state: RecurrentState,
        *,
        generator: torch.Generator | None = None,
        deterministic: bool = False,
    ) -> Decision: ...


def prepared_act(policy: FactoredRecurrentActorCritic, mean: Tensor, std: Tensor) -> Act | None:
    """`policy.act` with its current weights, and values scaled by `std` and shifted by `mean`.

    None for a policy that this is not written for.
    """
    config, heads, space = policy.config, policy.heads, policy.action_space
    if (
        not isinstance(heads, PlainHeads)
        or not isinstance(heads.encoder, nn.Sequential)
        or heads.images
        or heads.is_custom
        or space.continuous
        or len(space.head_groups) > 1
        or config.lstm_layers > 1
        or config.floor > 0
        or policy.device.type != "cpu"
        or policy.readout.weight.dtype != torch.float32
    ):
        return None
    return _PreparedAct(policy, heads, heads.encoder, mean, std)


class _PreparedAct:
    @torch.no_grad()
    def __init__(
        self,
        policy: FactoredRecurrentActorCritic,
        heads: PlainHeads,
        encoder: nn.Sequential,
        mean: Tensor,
        std: Tensor,
    ):
        self.policy, self.mean, self.std = policy, mean, std
        self.center, self.scale, self.bound = (
            part.numpy() for part in heads.scales._scale(torch.float32)
        )
        layers = [layer for layer in encoder if isinstance(layer, nn.Linear)]
        self.encoder = [(layer.bias.detach(), layer.weight.t().contiguous()) for layer in layers]
        w_ih, w_hh, b_ih, b_hh = (_cell_gate_last(weight) for weight in policy.core.all_weights[0])
        self.core_bias = b_ih + b_hh
        self.core_weight = torch.cat((w_ih, w_hh), dim=1).t().contiguous()
        weight, self.read_bias = policy.readout.weight.clone(), policy.readout.bias.clone()
        weight[-1].mul_(std)
        self.read_bias[-1:].mul_(std).add_(mean)
        self.read_weight = weight.t().contiguous()

    @torch.no_grad()
    def __call__(
        self,
        features: Tensor,
        masks: ActionMasks,
        state: RecurrentState,
        *,
        generator: torch.Generator | None = None,
        deterministic: bool = False,
    ) -> Decision:
        core, next_state = self._unroll(features, state)
        read = torch.addmm(self.read_bias, core, self.read_weight).numpy()
        legal, space = masks.groups[0].numpy(), self.policy.action_space
        num_envs = len(read)
        actions = np.empty((num_envs, space.num_heads), dtype=np.int64)
        log_probs = np.empty((num_envs, space.num_heads), dtype=np.float32)
        if not deterministic:  # exponential clocks, as in `MaskedFactoredCategorical.sample`
            like = core.new_empty(num_envs, space.num_heads, max(space.sizes))
            clocks = noise(like, "exponential_", generator).clamp_(1e-30, 1e3).numpy()
        rows, is_ok = np.arange(num_envs), True
        for head, part in enumerate(space.slices):
            logits = np.where(legal[:, part], read[:, part], np.float32(MASKED))
            logits -= logits.max(axis=1, keepdims=True)
            weights = np.exp(logits)
            rates = weights if deterministic else weights / clocks[:, head, : logits.shape[1]]
            actions[:, head] = choice = rates.argmax(axis=1)
            totals = weights.sum(axis=1)
            log_probs[:, head] = logits[rows, choice] - np.log(totals)
            is_ok = is_ok and bool(legal[rows, part.start + choice].all() & (totals > 0).all())
        if not is_ok:  # raises the error, with env and head; a logit of infinity is clipped there
            found = self.policy.act(
                features, masks, state, generator=generator, deterministic=deterministic
            )
            return found._replace(values=found.values * self.std + self.mean)
        return Decision(
            torch.from_numpy(actions),
            torch.from_numpy(log_probs),
            masks.groups[0],
            torch.from_numpy(read[:, -1]),
            next_state,
        )

    def _unroll(self, features: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
        """What the heads read, and the state after the step."""
        scaled = ((features.numpy() - self.center) / self.scale).clip(-self.bound, self.bound)
        core = torch.from_numpy(scaled)
        for bias, weight in self.encoder:
            core = torch.addmm(bias, core, weight).tanh_()
        if not self.policy.config.memory:
            return core, state
        gates = torch.addmm(
            self.core_bias, torch.cat((core, state.h[:, 0]), dim=1), self.core_weight
        )
        hidden = self.policy.config.lstm_hidden_dim
        i, f, o = gates[:, : 3 * hidden].sigmoid_().chunk(3, dim=1)
        c = torch.addcmul(f * state.c[:, 0], i, gates[:, 3 * hidden :].tanh_())
        h = o * c.tanh()
        return core + h, RecurrentState(h.unsqueeze(1), c.unsqueeze(1))


def _cell_gate_last(weight: Tensor) -> Tensor:
    """Rows of the gates input, forget, cell, output with those of the cell gate, a tanh, last."""
    i, f, z, o = weight.chunk(4)
    return torch.cat((i, f, o, z))

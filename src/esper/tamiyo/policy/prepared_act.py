"""`act` for many steps between two updates: weights are prepared once, and a step is two kernels.

    act = prepared_act(policy, mean, std)           # None: use `policy.act`
    decision = act(features, masks, state, generator=rng)

For plain policies with independent choices on a CPU: there, the calls of torch take longer than the
arithmetic. Choices are those of `policy.act` with the same generator.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from esper.leyline.factored_actions import ActionMasks
from esper.tamiyo.policy.distributions import MASKED
from esper.tamiyo.policy.network import Decision, FactoredRecurrentActorCritic, RecurrentState
from esper.tamiyo.policy.plain_heads import PlainHeads

MOST_ENVS = 64  # from about 128 envs on, `policy.act` is as fast


Act = Callable[..., Decision]  # with the arguments of `policy.act`


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
        scales = heads.scales
        layers = [layer for layer in encoder if isinstance(layer, nn.Linear)]
        w_ih, w_hh, b_ih, b_hh = policy.core.all_weights[0]
        self.step_arguments = (
            scales.center.numpy().copy(),
            scales.scale.numpy().copy(),
            scales.bound.numpy()[()],
            tuple(_columns(layer.weight) for layer in layers),
            tuple(layer.bias.detach().numpy().copy() for layer in layers),
            (_columns(w_ih), _columns(w_hh)),
            (b_ih + b_hh).numpy(),
            policy.config.memory,
        )
        weight, bias = policy.readout.weight.clone(), policy.readout.bias.clone()
        weight[-1].mul_(std)
        bias[-1:].mul_(std).add_(mean)
        self.readout = _columns(weight), bias.numpy()
        sizes = policy.action_space.sizes
        self.starts = np.cumsum([0, *sizes])
        self.grid = len(sizes), max(sizes)

    def __call__(
        self, features: Tensor, masks: ActionMasks, state: RecurrentState, **options: Any
    ) -> Decision:
        if len(features) <= MOST_ENVS:
            # compiled code does no bounds checks
            self.policy.check_step(features, state, masks)
            if decision := self._decide(features, masks.groups[0], state, **options):
                return decision
        plain = self.policy.act(features, masks, state, **options)
        return plain._replace(values=plain.values * self.std + self.mean)

    @torch.no_grad()
    def _decide(
        self,
        features: Tensor,
        legal: Tensor,
        state: RecurrentState,
        *,
        generator: torch.Generator | None = None,
        deterministic: bool = False,
    ) -> Decision | None:
        """None if a value is not finite: `policy.act` clips it, or raises with env and head."""
        from esper.kernels.lstm import numba_lstm

        before = tuple(part[:, 0].numpy() for part in state)
        core, *after = numba_lstm.step(features.numpy(), *self.step_arguments, *before)
        clocks = features.new_empty(len(features), *self.grid)
        if not deterministic:
            clocks.exponential_(generator=generator).clamp_(1e-30, 1e3)
        *chosen, is_ok = numba_lstm.choose(
            core,
            *self.readout,
            legal.numpy(),
            self.starts,
            clocks.numpy(),
            not deterministic,
            np.float32(MASKED),
        )
        if not is_ok:
            return None
        actions, log_probs, values = map(torch.from_numpy, chosen)
        next_state = RecurrentState(*(torch.from_numpy(part).unsqueeze(1) for part in after))
        if not self.policy.config.memory:
            next_state = state
        return Decision(actions, log_probs, legal, values, next_state)


def _columns(weight: Tensor) -> "np.ndarray[Any, Any]":
    """Weights `[outputs, inputs]` as an array `[inputs, outputs]`."""
    return weight.detach().t().contiguous().numpy()

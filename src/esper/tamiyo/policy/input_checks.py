"""Checks of a policy's inputs; errors name the env or row, the head and the value."""

import torch
from torch import Tensor, nn

from esper.leyline.checks import DeferredChecks
from esper.leyline.factored_actions import ActionMasks, FactoredActionSpace
from esper.leyline.sequences import SequenceLayout
from esper.tamiyo.policy.distributions import MASKED

_IMPOSSIBLE = MASKED / 4  # between the log-probs of legal and of masked choices


class ChoiceChecks(nn.Module):
    """Checks of the choices of one action space; failures are collected in `deferred`."""

    offsets: Tensor
    last_choices: Tensor
    is_conditional: Tensor

    def __init__(self, action_space: FactoredActionSpace):
        super().__init__()
        self.action_space = action_space
        self.deferred = DeferredChecks()
        for name, values in (
            ("offsets", [part.start for part in action_space.slices]),
            ("last_choices", [size - 1 for size in action_space.sizes]),
            ("is_conditional", [bool(head.given) for head in action_space]),
        ):
            self.register_buffer(name, torch.tensor(values), persistent=False)

    def check_fresh(self, actions: Tensor, log_probs: Tensor, masks: Tensor) -> None:
        """Check new choices: finite logits, and a legal choice for heads given no other head."""
        is_legal = masks.gather(-1, actions + self.offsets)
        ok = (log_probs > _IMPOSSIBLE) & (is_legal | self.is_conditional)

        def describe(env: int, head: int) -> str:
            name = self.action_space.names[head]
            if log_probs[env, head] > _IMPOSSIBLE:
                return f"env {env}, head {name!r}: no legal choice"
            return (
                f"env {env}, head {name!r}: logits are not finite, log-prob {log_probs[env, head]}"
            )

        self.deferred.require(ok, describe)

    def in_range(self, actions: Tensor, masks: Tensor, rows: Tensor, max_steps: int) -> Tensor:
        """Stored choices `[R, H]` clamped to their range; those outside it fail the check.

        `rows` are their flat positions in the rollout, on the CPU.
        """
        safe = torch.minimum(actions.clamp(min=0), self.last_choices)

        def describe(row: int, head: int) -> str:
            return self._illegal(row, head, actions, masks, rows, max_steps)

        self.deferred.require(safe == actions, describe)
        return safe

    def check_stored(
        self, actions: Tensor, log_probs: Tensor, masks: Tensor, layout: SequenceLayout
    ) -> None:
        """Check stored choices: each is legal (or 0 if none is), and its log-prob is a number."""
        log_probs = log_probs.detach()

        def describe(row: int, head: int) -> str:
            if log_probs[row, head].isnan():
                where = self._place(row, head, layout.rows, layout.max_steps)
                return f"{where}: logits are not finite, log-prob {log_probs[row, head]}"
            return self._illegal(row, head, actions, masks, layout.rows, layout.max_steps)

        self.deferred.require(log_probs > _IMPOSSIBLE, describe)

    def _illegal(
        self, row: int, head: int, actions: Tensor, masks: Tensor, rows: Tensor, max_steps: int
    ) -> str:
        legal = masks[row, self.action_space.slices[head]].nonzero()[:, 0].tolist()
        where = self._place(row, head, rows, max_steps)
        action = int(actions[row, head])
        return f"{where}: action {action} is not legal; legal here: {legal or 'only 0'}"

    def _place(self, row: int, head: int, rows: Tensor, max_steps: int) -> str:
        env, step = divmod(int(rows[row]), max_steps)
        return f"row {row} (env {env}, step {step}), head {self.action_space.names[head]!r}"


def check_shape(name: str, tensor: Tensor, expected: tuple[int, ...], letters: str) -> None:
    if tuple(tensor.shape) != expected:
        raise ValueError(f"{name}: got {tuple(tensor.shape)}, expected {expected} ({letters})")


def check_masks(masks: ActionMasks, action_space: FactoredActionSpace, num_envs: int) -> None:
    if masks.action_space != action_space:
        expected, got = sizes_by_name(action_space), sizes_by_name(masks.action_space)
        wrong = [name for name in expected | got if expected.get(name) != got.get(name)]
        raise ValueError(f"masks are for heads {got}, expected {expected}; these differ: {wrong}")
    if masks.num_envs != num_envs:
        raise ValueError(f"masks are for {masks.num_envs} envs, features for {num_envs}")


def sizes_by_name(action_space: FactoredActionSpace) -> dict[str, int]:
    return dict(zip(action_space.names, action_space.sizes, strict=True))

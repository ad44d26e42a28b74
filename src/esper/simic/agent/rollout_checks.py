"""What a rollout must hold before anything is learned from it, and errors that name env and step."""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from esper.leyline.factored_actions import FactoredActionSpace
from esper.simic.agent.rollout_fields import INTEGERS, as_tensor

PROBLEMS_SHOWN = 5  # bad values that one error message lists


def checked_env_ids(env_ids: Tensor | Sequence[int], num_envs: int) -> Tensor:
    """The ids as CPU int64 `[K]`; raises unless they are different envs of the rollout."""
    envs = as_tensor("env_ids", env_ids)
    if envs.ndim != 1 or (envs.numel() and envs.dtype not in INTEGERS):
        raise ValueError(
            f"env_ids: got {envs.dtype} {tuple(envs.shape)}, expected integers of shape [K]"
        )
    if envs.device.type != "cpu":
        raise ValueError(f"env_ids are on {envs.device}; pass them on the CPU")
    envs = envs.long()
    outside = [env for env in envs.tolist() if not 0 <= env < num_envs]
    if outside:
        raise ValueError(f"env_ids {outside} are out of range for num_envs={num_envs}")
    repeated = [env for env, count in Counter(envs.tolist()).items() if count > 1]
    if repeated:
        raise ValueError(f"env_ids {repeated} appear more than once in one batch")
    return envs


def check_step_counts(counts: object, num_envs: int, most: int) -> None:
    """Raise if `step_counts` was replaced or overwritten with what cannot be."""
    if not isinstance(counts, Tensor):
        raise ValueError(
            f"step_counts is a {type(counts).__name__}; change it only through add and reset"
        )
    if counts.shape != (num_envs,) or counts.dtype != torch.int64 or counts.is_cuda:
        raise ValueError(
            f"step_counts is {counts.dtype} {tuple(counts.shape)} on {counts.device}; expected "
            f"torch.int64 ({num_envs},) on cpu. Change it only through add and reset"
        )
    is_wrong = (counts < 0) | (counts > most)
    if bool(is_wrong.any()):
        env = int(is_wrong.nonzero()[0])
        raise ValueError(
            f"step_counts[{env}] is {int(counts[env])}; expected 0 to {most}. "
            "Change it only through add and reset"
        )


def raise_on_bad_values(
    fields: Mapping[str, Tensor],
    valid: Tensor,
    bad_state: Tensor,
    action_space: FactoredActionSpace,
) -> None:
    """Check all values that learning uses, `[T, N, ...]`, with one synchronisation."""
    is_last = valid.clone()
    is_last[:-1] &= ~valid[1:]
    needs_bootstrap = ~fields["terminated"] & (fields["truncated"] | is_last)
    bad = {
        "the state is not finite": ~fields["states"].isfinite().all(dim=-1),
        "the reward is not finite": ~fields["rewards"].isfinite(),
        "the value is not finite": ~fields["values"].isfinite(),
        "a bootstrap value is needed, but none was given or it is not finite": needs_bootstrap
        & ~fields["bootstrap_values"].isfinite(),
        "the recurrent state is not finite, or was not reset after an episode that ended; zero "
        "hidden_h and hidden_c [envs, layers, hidden] at episode ends": bad_state,
    }
    for head, name in enumerate(action_space.names):
        is_bad = ~fields["log_probs"][..., head].isfinite()
        bad[f"head {name!r}: the log-prob is not finite, so its logits were not"] = is_bad
    for head in action_space.unconditional:
        part = fields["masks"][..., action_space.slices[head]]
        bad[f"head {action_space.names[head]!r} has no legal choice"] = ~part.any(dim=-1)
    problems = torch.stack(list(bad.values())) & valid
    if not bool(problems.any()):
        return
    found = problems.permute(2, 1, 0).nonzero().tolist()  # by env, then by step
    reasons = list(bad)
    shown = [f"env {e}, step {t}: {reasons[r]}" for e, t, r in found[:PROBLEMS_SHOWN]]
    if len(found) > PROBLEMS_SHOWN:
        shown.append(f"and {len(found) - PROBLEMS_SHOWN} more")
    raise ValueError("bad values in the rollout: " + "; ".join(shown))

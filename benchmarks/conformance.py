"""The conformance checks of `conformance_kit.py`, on Esper and on the libraries that are installed.

    pip install stable-baselines3 sb3-contrib torchrl
    python benchmarks/conformance.py

Each library is called through its own functions, as its own training calls them. CleanRL's
scripts have their advantages and updates inline, so there is no function to check.
"""

import json
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
from conformance_kit import conformance
from torch import Tensor, nn

import esper
from esper.leyline.factored_actions import ActionMasks
from esper.simic.agent.gae import compute_gae
from esper.simic.trainer import zero_rows
from esper.tamiyo.policy.distributions import MaskedFactoredCategorical
from esper.tamiyo.policy.network import Steps
from esper.tamiyo.policy.plain_heads import flat_policy

ENV_ID = "CartPole-v1"


# -- Esper ------------------------------------------------------------------------------------


def esper_functions() -> dict[str, Callable[..., Any]]:
    space = esper.ActionSpace((esper.Head("action", 6),))
    policy = flat_policy(space, 4)
    nn.init.normal_(policy.readout.weight)  # V(s) starts at 0, which would show nothing

    def gae(*rows: Any, step_counts: Tensor | None = None) -> Tensor:
        *columns, gamma, gae_lambda = rows
        settings = {"gamma": gamma, "gae_lambda": gae_lambda, "step_counts": step_counts}
        return compute_gae(*columns, **settings)[0]

    def step(observation: Tensor, state: Any, starts: Tensor) -> tuple[Tensor, Any]:
        state = zero_rows(state or policy.initial_state(len(observation)), starts)
        masks = ActionMasks.all_legal(space, len(observation))
        decision = policy.act(observation, masks, state)
        return decision.values.unsqueeze(-1), decision.state

    def unroll(observations: Tensor, starts: Tensor) -> Tensor:
        rows = starts.shape
        steps = Steps(
            observations,
            torch.zeros(*rows, 1, dtype=torch.int64),
            torch.ones(*rows, 6, dtype=torch.bool),
            starts,
            policy.initial_state(rows[1]),
        )
        return policy.evaluate(steps).values.detach().unsqueeze(-1)

    def ratios() -> Tensor:
        errors: list[float] = []
        esper.PPO(ENV_ID).learn(1, lambda _, m: errors.append(m["ppo/first_ratio_error"]))
        return 1 + torch.tensor(errors)

    def masked_probs(logits: Tensor, masks: Tensor) -> Tensor:
        return MaskedFactoredCategorical(space, logits, masks).probs[:, 0]

    return {"gae": gae, "masked_probs": masked_probs, "step": step, "unroll": unroll, "ratios": ratios}  # fmt: skip


# -- Stable-Baselines3 and sb3-contrib ----------------------------------------------------------


def sb3_gae(
    rewards: Tensor,
    values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    bootstraps: Tensor,
    gamma: float,
    gae_lambda: float,
    step_counts: Tensor | None = None,
) -> Tensor:
    """As `collect_rollouts` fills its buffer: gamma V(final observation) is added to the reward."""
    from gymnasium import spaces
    from stable_baselines3.common.buffers import RolloutBuffer

    if step_counts is not None:
        raise NotImplementedError("rows have one length")
    num_envs, num_steps = rewards.shape
    box = spaces.Box(-1, 1, (1,))
    buffer = RolloutBuffer(num_steps, box, box, gae_lambda=gae_lambda, gamma=gamma, n_envs=num_envs)
    ended = (terminated | truncated).numpy()
    rewards = rewards + gamma * torch.where(truncated & ~terminated, bootstraps, 0.0)
    buffer.rewards[:], buffer.values[:] = rewards.numpy().T, values.numpy().T
    buffer.episode_starts[1:] = ended.T[:-1]
    buffer.compute_returns_and_advantage(bootstraps[:, -1], ended[:, -1])
    return torch.from_numpy(buffer.advantages.T.copy())


def sb3_functions() -> dict[str, Callable[..., Any]]:
    def ratios() -> Tensor:
        from stable_baselines3 import PPO

        model = PPO("MlpPolicy", ENV_ID, n_steps=256, device="cpu")
        data = collected(model, 256)
        _, log_probs, _ = model.policy.evaluate_actions(data.observations, data.actions.flatten())
        return (log_probs - data.old_log_prob).exp().detach()

    return {"gae": sb3_gae, "ratios": ratios}


def collected(model: Any, batch_size: int) -> Any:
    """The first minibatch of a rollout that the model's own loop has collected."""
    _, callback = model._setup_learn(batch_size)
    model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
    return next(iter(model.rollout_buffer.get(batch_size)))


def sb3_contrib_functions() -> dict[str, Callable[..., Any]]:
    from gymnasium import spaces
    from sb3_contrib import RecurrentPPO
    from sb3_contrib.common.maskable.distributions import MaskableCategorical
    from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy

    policy = RecurrentActorCriticPolicy(
        spaces.Box(-9, 9, (4,)), spaces.Discrete(2), lambda _: 1e-3, lstm_hidden_size=16
    )

    def run(observations: Tensor, state: Any, starts: Tensor, num_envs: int) -> tuple[Tensor, Any]:
        lstm = policy.lstm_actor
        zeros = torch.zeros(1, num_envs, 16)
        return policy._process_sequence(observations, state or (zeros, zeros), starts.float(), lstm)

    def step(observation: Tensor, state: Any, starts: Tensor) -> tuple[Tensor, Any]:
        return run(observation, state, starts, len(observation))

    def unroll(observations: Tensor, starts: Tensor) -> Tensor:
        num_steps, num_envs = starts.shape
        rows = observations.transpose(0, 1).flatten(0, 1)
        output, _ = run(rows, None, starts.T.flatten(), num_envs)
        return output.detach().view(num_envs, num_steps, -1).transpose(0, 1)

    def ratios() -> Tensor:
        model = RecurrentPPO("MlpLstmPolicy", ENV_ID, n_steps=256, device="cpu")
        data = collected(model, 256)
        _, log_probs, _ = model.policy.evaluate_actions(
            data.observations, data.actions.flatten(), data.lstm_states, data.episode_starts
        )
        return (log_probs - data.old_log_prob).exp()[data.mask > 1e-8].detach()

    def masked_probs(logits: Tensor, masks: Tensor) -> Tensor:
        return MaskableCategorical(logits=logits, masks=masks).probs

    return {"gae": sb3_gae, "masked_probs": masked_probs, "step": step, "unroll": unroll, "ratios": ratios}  # fmt: skip


# -- TorchRL ------------------------------------------------------------------------------------


def torchrl_functions() -> dict[str, Callable[..., Any]]:
    from tensordict import TensorDict
    from torchrl.modules import LSTMModule, MaskedCategorical, set_recurrent_mode
    from torchrl.objectives.value.functional import vec_generalized_advantage_estimate

    lstm = LSTMModule(4, 16, in_keys=["seen", "h", "c"], out_keys=["out", ("next", "h"), ("next", "c")])  # fmt: skip

    def gae(*columns: Any, step_counts: Tensor | None = None) -> Tensor:
        if step_counts is not None:
            raise NotImplementedError("rows have one length")
        *rows, gamma, gae_lambda = columns
        rewards, values, terminated, truncated, nexts = (row.unsqueeze(-1) for row in rows)
        advantages, _ = vec_generalized_advantage_estimate(
            gamma, gae_lambda, values, nexts, rewards, terminated | truncated, terminated
        )
        return advantages.squeeze(-1)

    def step(observation: Tensor, state: Any, starts: Tensor) -> tuple[Tensor, Any]:
        num_envs = len(observation)
        zeros = torch.zeros(num_envs, 1, 16)
        h, c = state or (zeros, zeros)
        data = {"seen": observation, "h": h, "c": c, "is_init": starts.unsqueeze(-1)}
        with set_recurrent_mode(False):
            result = lstm(TensorDict(data, [num_envs]))
        return result["out"], (result["next", "h"], result["next", "c"])

    def unroll(observations: Tensor, starts: Tensor) -> Tensor:
        num_steps, num_envs = starts.shape
        zeros = torch.zeros(num_envs, num_steps, 1, 16)
        data = {"seen": observations.transpose(0, 1), "h": zeros, "c": zeros, "is_init": starts.T.unsqueeze(-1)}  # fmt: skip
        with set_recurrent_mode(True):
            result = lstm(TensorDict(data, [num_envs, num_steps]))
        return result["out"].detach().transpose(0, 1)

    def masked_probs(logits: Tensor, masks: Tensor) -> Tensor:
        return MaskedCategorical(logits=logits, mask=masks).probs

    return {"gae": gae, "masked_probs": masked_probs, "step": step, "unroll": unroll}


LIBRARIES = {
    "esper": ("esper-lite", esper_functions),
    "stable-baselines3": ("stable-baselines3", sb3_functions),
    "sb3-contrib": ("sb3-contrib", sb3_contrib_functions),
    "torchrl": ("torchrl", torchrl_functions),
}


def main() -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 -- sb3 draws from the global generator
    table: dict[str, dict[str, str]] = {}
    for library, (package, functions) in LIBRARIES.items():
        try:
            name = f"{library} {version(package)}"
            table[name] = conformance(**functions())
        except (PackageNotFoundError, ImportError) as error:
            print(f"{library}: not installed ({error})")
    checks = list(next(iter(table.values())))
    print("| check | " + " | ".join(table) + " |\n" + "|---" * (len(table) + 1) + "|")
    for check in checks:
        print(
            f"| {check} | " + " | ".join(found.get(check, "-") for found in table.values()) + " |"
        )
    passed = float(all(result == "pass" for result in next(iter(table.values())).values()))
    bars = {"esper_passes": {"value": passed, "bar": 1.0, "met": passed == 1.0}}
    print(json.dumps({"benchmark": "conformance", "device": "cpu", "bars": bars}))


if __name__ == "__main__":
    main()

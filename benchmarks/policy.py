"""Time of the policy's `evaluate()` on stored rollouts, and of `act()` on single steps.

    python benchmarks/policy.py [--device cpu|cuda] [--quick]

`evaluate()` is measured with its backward pass on 128 rows of 64 envs (16 with `--quick`), with an
episode end about every 20 steps. Rivals use the same weights: a loop over time that resets the state
(with `lstm_cell`, and with `nn.LSTM` on one step), and all episodes padded to the longest. All are
first checked for equal results.

`act()` is measured for each kind of action, with the round's random numbers drawn before, and with
choices written into a rollout's row.

All alternate in one process, and the tables show medians: of CPU time on one thread, or of time
on a GPU.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from esper.leyline.factored_actions import (
    ActionMasks,
    FactoredActionSpace,
    Head,
    audit_action_space,
)
from esper.tamiyo.policy.distributions import (
    Choices,
    MaskedFactoredCategorical,
    draw_noise,
)
from esper.tamiyo.policy.features import FeatureLayout
from esper.tamiyo.policy.network import (
    FactoredRecurrentActorCritic,
    RecurrentState,
    Steps,
    full_precision,
)
from esper.tamiyo.policy.plain_heads import flat_policy
from esper.tamiyo.policy.slot_heads import tamiyo_policy

NUM_STEPS, EPISODE_LENGTH = 128, 20
PICTURE = (3, 7, 7)
DEPENDENT = FactoredActionSpace(
    (Head("unit", 3), Head("order", 4, given=("unit",)), Head("place", 5, given=("unit", "order")))
)
BOX = FactoredActionSpace(tuple(Head(name, continuous=True) for name in "xyz"))
POLICIES: dict[str, Callable[[], FactoredRecurrentActorCritic]] = {
    "one head": lambda: flat_policy(FactoredActionSpace((Head("move", 2),)), 4),
    "four heads": lambda: flat_policy(audit_action_space(), 32),
    "dependent heads": lambda: flat_policy(DEPENDENT, 32),
    "Box": lambda: flat_policy(BOX, 32),
    "picture": lambda: flat_policy(audit_action_space(), 32, images=(PICTURE,)),
    "Tamiyo, 3 slots": lambda: tamiyo_policy(FeatureLayout(3, 8)),
}
EVALUATED = ("four heads", "Tamiyo, 3 slots")
EVALUATE_BARS = {"cpu": 1.0, "cuda": 10.0}
# a CPU step with these may take twice as long as with four heads
ACT_BARS = {"dependent heads": 0.5, "Box": 0.5}
COMPARED_ENVS = 8

Unroll = Callable[[Steps, FactoredRecurrentActorCritic, Tensor], Tensor]
Scores = tuple[Tensor, Tensor]  # log-probs [T, B, H] and values [T, B]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="finish within 40 seconds")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = arguments.device
    num_envs, budget_s = (16, 0.5) if arguments.quick else (64, 8.0)
    values: dict[str, tuple[float, float]] = {}
    for name in EVALUATED:
        ratio = measure_evaluate(name, device, num_envs, budget_s)
        values[f"evaluate_vs_loop_{key(name)}"] = (ratio, EVALUATE_BARS[device])
    times = measure_act(device, budget_s / 4)
    if device == "cpu":
        plain = times[COMPARED_ENVS]["four heads"]
        for name, bar in ACT_BARS.items():
            values[f"act_four_heads_vs_{key(name)}"] = (plain / times[COMPARED_ENVS][name], bar)
    bars = {
        name: {"value": round(value, 2), "bar": bar, "met": value >= bar}
        for name, (value, bar) in values.items()
    }
    print(json.dumps({"benchmark": "policy", "device": device, "bars": bars}))


def key(name: str) -> str:
    return name.split(",")[0].replace(" ", "_").lower()


# -- evaluate -------------------------------------------------------------------------------------


def random_steps(policy: FactoredRecurrentActorCritic, num_envs: int, device: str) -> Steps:
    """Random steps `[T, B, ...]` with full rows."""
    rng = torch.Generator().manual_seed(0)
    space, shape = policy.action_space, (NUM_STEPS, num_envs)
    masks = torch.rand(*shape, space.num_choices, generator=rng) < 0.7
    actions = []
    for part in space.slices:
        masks[..., part.start] |= ~masks[..., part].any(dim=-1)
        weights = masks[..., part] * torch.rand(*shape, part.stop - part.start, generator=rng)
        actions.append(weights.argmax(dim=-1))
    starts = torch.rand(shape, generator=rng) < 1 / EPISODE_LENGTH
    starts[0] = False  # the state before the first row is given
    state_shape = (num_envs, 1, policy.config.lstm_hidden_dim)
    return Steps(
        torch.rand(*shape, policy.feature_size, generator=rng).to(device),
        torch.stack(actions, dim=-1).to(device),
        masks.to(device),
        starts.to(device),
        RecurrentState(*(torch.rand(state_shape, generator=rng).to(device) for _ in "hc")),
    )


def measure_evaluate(name: str, device: str, num_envs: int, budget_s: float) -> float:
    """Print a table; return the time of the `lstm_cell` loop divided by ours."""
    torch.manual_seed(0)
    policy = POLICIES[name]().to(device)
    steps = random_steps(policy, num_envs, device)

    def ours() -> Scores:
        evaluation = policy.evaluate(steps)
        return evaluation.log_probs, evaluation.values

    def rival(unroll: Unroll) -> Callable[[], Scores]:
        return lambda: evaluate_with(unroll, policy, steps)

    scored = {
        "evaluate()": ours,
        "loop of lstm_cell": rival(loop_of_cells),
        "loop of nn.LSTM": rival(loop_of_lstms),
        "padded to the longest": rival(padded_to_longest),
    }
    check(policy, scored)
    ways = {way: lambda f=f: learn(policy, f) for way, f in scored.items()}
    medians = time_in_turns(ways, device, budget_s)
    ours_s = medians["evaluate()"]
    num_episodes = num_envs + int(steps.starts.sum())
    print(
        f"\nevaluate and backward, {name}, {num_envs} x {NUM_STEPS} steps, {num_episodes} episodes"
    )
    for way, seconds in medians.items():
        print(f"  {way:24}{seconds * 1e3:10.2f} ms{seconds / ours_s:9.2f}x")
    return medians["loop of lstm_cell"] / ours_s


def learn(policy: FactoredRecurrentActorCritic, score: Callable[[], Scores]) -> None:
    policy.zero_grad(set_to_none=True)
    log_probs, values = score()
    with full_precision(policy.device):
        (log_probs.mean() + values.square().mean()).backward()


def check(policy: FactoredRecurrentActorCritic, ways: dict[str, Callable[[], Scores]]) -> None:
    """Check that all ways give the same scores within 1e-5, and the same gradients."""
    expected: list[Tensor] = []
    gradients: list[Tensor] = []
    for way, score in ways.items():
        scores = [part.detach() for part in score()]
        learn(policy, score)
        found = [parameter.grad.clone() for parameter in policy.parameters()]
        if not expected:
            expected, gradients = scores, found
        torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5, msg=way)
        torch.testing.assert_close(found, gradients, rtol=1e-3, atol=1e-5, msg=way)


def evaluate_with(unroll: Unroll, policy: FactoredRecurrentActorCritic, steps: Steps) -> Scores:
    """Scores like those of `evaluate`, with another way through the LSTM."""
    space = policy.action_space
    actions = steps.actions.flatten(0, 1)
    with full_precision(policy.device):
        encoded, scene = policy.heads.encode(steps.features.flatten(0, 1))
        rows = encoded.view(*steps.starts.shape, -1)
        core = encoded + unroll(steps, policy, rows).flatten(0, 1)
        both = policy.readout(core)
        later = [
            policy.heads.logits(group, core, scene, actions)
            for group in range(1, len(space.head_groups))
        ]
    logits = torch.cat([both[:, :-1], *later], dim=-1)
    distribution = MaskedFactoredCategorical(space, logits, steps.masks.flatten(0, 1))
    distribution.normalize(distribution.entropy())
    log_probs = distribution.log_prob(actions).view(steps.actions.shape)
    return log_probs, both[:, -1].view(steps.starts.shape)


def loop_of_cells(steps: Steps, policy: FactoredRecurrentActorCritic, rows: Tensor) -> Tensor:
    keep = (~steps.starts).to(rows.dtype).unsqueeze(-1)
    (weights,) = policy.core.all_weights
    h, c = (state[:, 0] for state in steps.initial)
    outputs = []
    for row, kept in zip(rows, keep, strict=True):
        h, c = torch.lstm_cell(row, (h * kept, c * kept), *weights)
        outputs.append(h)
    return torch.stack(outputs)


def loop_of_lstms(steps: Steps, policy: FactoredRecurrentActorCritic, rows: Tensor) -> Tensor:
    keep = (~steps.starts).to(rows.dtype).unsqueeze(-1)
    h, c = (state.transpose(0, 1).contiguous() for state in steps.initial)
    outputs = []
    for row, kept in zip(rows, keep, strict=True):
        output, (h, c) = policy.core(row.unsqueeze(0), (h * kept, c * kept))
        outputs.append(output)
    return torch.cat(outputs)


def padded_to_longest(steps: Steps, policy: FactoredRecurrentActorCritic, rows: Tensor) -> Tensor:
    """Every episode as a sequence of its own: cut, padded, and joined again."""
    num_steps, num_envs = steps.starts.shape
    begins = steps.starts.t().clone()  # [B, T]
    begins[:, 0] = True
    places = begins.flatten().nonzero().squeeze(1).tolist()
    lengths = [
        end - first for first, end in zip(places, [*places[1:], begins.numel()], strict=True)
    ]
    by_env = rows.transpose(0, 1).flatten(0, 1)  # [B * T, hidden]
    padded = pad_sequence(list(by_env.split(lengths)))  # [longest, episodes, hidden]
    is_first = torch.tensor([place % num_steps == 0 for place in places], device=rows.device)
    state = []
    for part in steps.initial:
        of_episodes = part.new_zeros(1, len(places), part.shape[-1])
        of_episodes[0, is_first] = part[:, 0]
        state.append(of_episodes)
    outputs = policy.core(padded, tuple(state))[0]
    joined = torch.cat([outputs[:length, i] for i, length in enumerate(lengths)])
    return joined.view(num_envs, num_steps, -1).transpose(0, 1)


# -- act ------------------------------------------------------------------------------------------


def measure_act(device: str, budget_s: float) -> dict[int, dict[str, float]]:
    """Print a table; return the seconds of a step, by number of envs and policy."""
    print("\nact, microseconds per step")
    print(f"{'envs':>6}" + "".join(f"{name:>17}" for name in POLICIES))
    times = {}
    for num_envs in (1, COMPARED_ENVS, 64, 512):
        ways = {
            name: one_step(new_policy().to(device), num_envs)
            for name, new_policy in POLICIES.items()
        }
        times[num_envs] = time_in_turns(ways, device, budget_s)
        row = "".join(f"{seconds * 1e6:17.0f}" for seconds in times[num_envs].values())
        print(f"{num_envs:>6}{row}")
    return times


def one_step(policy: FactoredRecurrentActorCritic, num_envs: int) -> Callable[[], object]:
    space = policy.action_space
    features = torch.rand(num_envs, policy.feature_size, device=policy.device)
    frames = torch.randint(256, (num_envs, policy.frame_size), device=policy.device).byte()
    masks = ActionMasks.all_legal(space, num_envs, policy.device)
    state = policy.initial_state(num_envs)
    noise = draw_noise(space, (num_envs,), policy.device)
    row = Choices.empty(space, num_envs, policy.device)
    return lambda: policy.act(features, masks, state, frames=frames, noise=noise, out=row)


# -- time -----------------------------------------------------------------------------------------


def time_in_turns(
    ways: dict[str, Callable[[], object]], device: str, budget_s: float
) -> dict[str, float]:
    """Median seconds of each way: of this process on a CPU, else of the clock on the wall."""
    is_gpu = device == "cuda"
    synchronize = torch.cuda.synchronize if is_gpu else lambda: None
    clock = time.perf_counter if is_gpu else time.process_time
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for function in ways.values():
        function()
    deadline = time.perf_counter() + budget_s * len(ways)
    while time.perf_counter() < deadline or len(next(iter(seconds.values()))) < 3:
        for way, function in ways.items():
            synchronize()
            start = clock()
            function()
            synchronize()
            seconds[way].append(clock() - start)
    return {way: statistics.median(values) for way, values in seconds.items()}


if __name__ == "__main__":
    main()

"""Time of the policy's `evaluate()` on stored rollouts, and of `act()` on single steps.

    python benchmarks/policy.py [--device cpu|cuda] [--quick]

`evaluate()` is measured with its backward pass on 64 rows of 128 steps, with an episode end about
every 20 steps. On a GPU it is also measured as the graph that an update replays for layouts that
come up often; the bar is the graph's. Rivals use the same weights: a loop over time that resets the
state (with `lstm_cell`, and with `nn.LSTM` on one step), and all episodes padded to the longest. All
are first checked for equal results. CPU figures are for one thread; rivals alternate in one process,
and the table shows medians.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.leyline.factored_actions import (
    ActionMasks,
    FactoredActionSpace,
    Head,
    audit_action_space,
)
from esper.leyline.sequences import SequenceLayout, SequenceParts
from esper.simic.agent.captured import Captured
from esper.tamiyo.policy.distributions import MaskedFactoredCategorical
from esper.tamiyo.policy.features import FeatureLayout
from esper.tamiyo.policy.network import (
    FactoredRecurrentActorCritic,
    RecurrentState,
    StoredSteps,
    full_precision,
)
from esper.tamiyo.policy.plain_heads import flat_policy
from esper.tamiyo.policy.slot_heads import tamiyo_policy

NUM_ENVS, NUM_STEPS, EPISODE_LENGTH = 64, 128, 20
POLICIES: dict[str, Callable[[], FactoredRecurrentActorCritic]] = {
    "one head": lambda: flat_policy(FactoredActionSpace((Head("move", 2),)), 4),
    "four heads": lambda: flat_policy(audit_action_space(), 32),
    "Tamiyo, 3 slots": lambda: tamiyo_policy(FeatureLayout(3, 8)),
}
BARS = {"cpu": 1.0, "cuda": 10.0}

Unroll = Callable[["Rollout", FactoredRecurrentActorCritic, Tensor], Tensor]
Scores = tuple[Tensor, Tensor]  # log-probs [N * T, H] and values [N * T]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, within 40 seconds")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device, budget_s = arguments.device, 1.0 if arguments.quick else 8.0
    bars: dict[str, object] = {}
    for name in ("four heads", "Tamiyo, 3 slots"):
        ratio = measure_evaluate(name, device, budget_s)
        bar = {"value": round(ratio, 2), "bar": BARS[device], "met": ratio >= BARS[device]}
        bars[f"evaluate_vs_loop_{name.split(',')[0].replace(' ', '_').lower()}"] = bar
    measure_act(device, budget_s)
    print(json.dumps({"benchmark": "policy", "device": device, "bars": bars}))


@dataclass
class Rollout:
    """A random rollout with full rows, so that the rivals need not gather."""

    features: Tensor
    actions: Tensor
    masks: Tensor
    layout: SequenceLayout
    initial: RecurrentState
    begins: Tensor  # [N, T]: the first step of an episode that starts inside the row

    @classmethod
    def random(cls, policy: FactoredRecurrentActorCritic, device: str) -> "Rollout":
        rng = torch.Generator().manual_seed(0)
        space, shape = policy.action_space, (NUM_ENVS, NUM_STEPS)
        features = torch.rand(*shape, policy.feature_size, generator=rng)
        masks = torch.rand(*shape, space.num_choices, generator=rng) < 0.7
        parts = []
        for part in space.slices:
            masks[..., part.start] |= ~masks[..., part].any(dim=-1)
            weights = masks[..., part] * torch.rand(*shape, part.stop - part.start, generator=rng)
            parts.append(weights.argmax(dim=-1))
        ended = torch.rand(shape, generator=rng) < 1 / EPISODE_LENGTH
        state_shape = (NUM_ENVS, 1, policy.config.lstm_hidden_dim)
        begins = torch.cat((torch.zeros(NUM_ENVS, 1, dtype=torch.bool), ended[:, :-1]), dim=1)
        return cls(
            features.to(device),
            torch.stack(parts, dim=-1).to(device),
            masks.to(device),
            SequenceLayout.from_flags(ended, torch.full((NUM_ENVS,), NUM_STEPS)),
            RecurrentState(*(torch.rand(state_shape, generator=rng).to(device) for _ in "hc")),
            begins.to(device),
        )


def measure_evaluate(name: str, device: str, budget_s: float) -> float:
    """Print a table; return the time of the `lstm_cell` loop divided by ours."""
    torch.manual_seed(0)
    policy = POLICIES[name]().to(device)
    rollout = Rollout.random(policy, device)
    parts = SequenceParts((rollout.layout,))  # a PPO update makes them once for all passes

    def gathered() -> StoredSteps:
        r = rollout
        return policy.gather(r.features, r.actions, r.masks, parts, r.initial)[0]

    def ours() -> Scores:
        scores = policy.evaluate(gathered(), rollout.layout)
        return scores.log_probs, scores.values

    def gradients(inputs: tuple[StoredSteps], layout: SequenceLayout) -> Scores:
        scores = policy.score(*inputs, layout)
        backward(policy, scores.log_probs, scores.values)
        return scores.log_probs.detach(), scores.values.detach()

    captured = Captured(gradients, list(policy.parameters()))

    def as_graph() -> Scores:
        policy.zero_grad(set_to_none=True)
        return captured((gathered(),), rollout.layout)

    def rival(unroll: Unroll) -> Callable[[], Scores]:
        return lambda: score_in_rows(policy, rollout, unroll)

    scored = {
        "evaluate()": ours,
        "loop of lstm_cell": rival(loop_of_cells),
        "loop of nn.LSTM": rival(loop_of_lstms),
        "padded to the longest": rival(padded_to_longest),
    }
    check(policy, rollout, scored)
    ways = {way: lambda f=f: learn(policy, f) for way, f in scored.items()}
    if device == "cuda":
        ways = {"evaluate() as a graph": as_graph, **ways}
        check_graph(policy, captured, as_graph, ours)
    medians = time_in_turns(ways, device, budget_s)
    ours_s = next(iter(medians.values()))
    print(
        f"\nevaluate and backward, {name}, {NUM_ENVS} x {NUM_STEPS} steps, "
        f"{rollout.layout.num_episodes} episodes, the longest {len(rollout.layout.batch_sizes)}"
    )
    for way, seconds in medians.items():
        print(f"  {way:24}{seconds * 1e3:10.2f} ms{seconds / ours_s:9.2f}x")
    return medians["loop of lstm_cell"] / ours_s


def learn(policy: FactoredRecurrentActorCritic, score: Callable[[], Scores]) -> None:
    policy.zero_grad(set_to_none=True)
    with full_precision(policy.device):
        backward(policy, *score())


def backward(policy: FactoredRecurrentActorCritic, log_probs: Tensor, values: Tensor) -> None:
    with full_precision(policy.device):
        (log_probs.mean() + values.square().mean()).backward()


def check_graph(
    policy: FactoredRecurrentActorCritic,
    captured: Captured,
    as_graph: Callable[[], Scores],
    score: Callable[[], Scores],
) -> None:
    """Check that a replayed graph gives the scores and gradients of `evaluate` within 1e-6."""
    while not captured.graphs:
        as_graph()
    expected = score()
    learn(policy, score)
    gradients = [p.grad.clone() for p in policy.parameters()]
    for mine, theirs in zip(as_graph(), expected, strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=0, atol=1e-6)
    for mine, parameter in zip(gradients, policy.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, mine, rtol=1e-4, atol=1e-6)


def check(
    policy: FactoredRecurrentActorCritic,
    rollout: Rollout,
    ways: dict[str, Callable[[], Scores]],
) -> None:
    """Check that all ways give the same scores within 1e-5, and the same gradients."""
    layout = rollout.layout
    expected = [s.detach() for s in ways["evaluate()"]()]
    learn(policy, ways["evaluate()"])
    gradients = [p.grad.clone() for p in policy.parameters()]
    for way, score in ways.items():
        if way == "evaluate()":
            continue
        rows = layout.rows.to(expected[0].device)
        for mine, theirs in zip(expected, score(), strict=True):
            torch.testing.assert_close(theirs[rows], mine, rtol=0, atol=1e-5, msg=way)
        learn(policy, score)
        for mine, parameter in zip(gradients, policy.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, mine, rtol=1e-3, atol=1e-5, msg=way)
    policy.raise_on_bad_values()


def score_in_rows(policy: FactoredRecurrentActorCritic, rollout: Rollout, unroll: Unroll) -> Scores:
    """Scores like those of `evaluate`, in stored order, with another way through the LSTM."""
    space, actions = policy.action_space, rollout.actions.flatten(0, 1)
    with full_precision(policy.device):
        encoded, scene = policy.heads.encode(rollout.features.flatten(0, 1))
        core = encoded + unroll(rollout, policy, encoded)
        both = policy.readout(core)
        later = [
            policy.heads.logits(group, core, scene, actions)
            for group in range(1, len(space.head_groups))
        ]
    logits = torch.cat([both[:, :-1], *later], dim=-1)
    distribution = MaskedFactoredCategorical(space, logits, rollout.masks.flatten(0, 1))
    distribution.normalize(distribution.entropy())
    return distribution.log_prob(actions), both[:, -1]


def loop_of_cells(
    rollout: Rollout, policy: FactoredRecurrentActorCritic, encoded: Tensor
) -> Tensor:
    inputs = encoded.view(NUM_ENVS, NUM_STEPS, -1).unbind(1)
    keep = (~rollout.begins).to(encoded.dtype).unsqueeze(-1).unbind(1)
    (weights,) = policy.core.all_weights
    h, c = (state[:, 0] for state in rollout.initial)
    outputs = []
    for step, kept in zip(inputs, keep, strict=True):
        h, c = torch.lstm_cell(step, (h * kept, c * kept), *weights)
        outputs.append(h)
    return torch.stack(outputs, dim=1).flatten(0, 1)


def loop_of_lstms(
    rollout: Rollout, policy: FactoredRecurrentActorCritic, encoded: Tensor
) -> Tensor:
    inputs = encoded.view(NUM_ENVS, NUM_STEPS, -1).transpose(0, 1).split(1)
    keep = (~rollout.begins).to(encoded.dtype).unsqueeze(-1).unbind(1)
    h, c = (state.transpose(0, 1).contiguous() for state in rollout.initial)
    outputs = []
    for step, kept in zip(inputs, keep, strict=True):
        output, (h, c) = policy.core(step, (h * kept, c * kept))
        outputs.append(output)
    return torch.cat(outputs).transpose(0, 1).flatten(0, 1)


def padded_to_longest(
    rollout: Rollout, policy: FactoredRecurrentActorCritic, encoded: Tensor
) -> Tensor:
    layout = rollout.layout
    longest = len(layout.batch_sizes)
    rows, index = (i.to(encoded.device) for i in (layout.rows, layout.padded_index))
    padded = encoded.new_zeros(longest * layout.num_episodes, encoded.shape[1])
    padded = padded.index_copy(0, index, encoded[rows]).view(longest, layout.num_episodes, -1)
    parts = SequenceParts((layout,))
    h, c = (parts.initial(state).transpose(0, 1).contiguous() for state in rollout.initial)
    outputs = policy.core(padded, (h, c))[0].flatten(0, 1)[index]
    return torch.zeros_like(encoded).index_copy(0, rows, outputs)


def measure_act(device: str, budget_s: float) -> None:
    print(f"\nact, microseconds per step\n  {'envs':>20}" + "".join(f"{n:>18}" for n in POLICIES))
    for num_envs in (1, 8, 64, 512):
        ways = {}
        for name, new_policy in POLICIES.items():
            policy = new_policy().to(device)
            masks = ActionMasks.all_legal(policy.action_space, num_envs, device)
            state = policy.initial_state(num_envs)
            inputs = torch.rand(num_envs, policy.feature_size, device=device)
            rng = torch.Generator(device)
            ways[name] = lambda p=policy, i=inputs, m=masks, s=state, g=rng: p.act(
                i, m, s, generator=g
            )
        medians = time_in_turns(ways, device, budget_s / 4)
        print(f"  {num_envs:>20}" + "".join(f"{s * 1e6:18.0f}" for s in medians.values()))


def time_in_turns(
    ways: dict[str, Callable[[], object]], device: str, budget_s: float
) -> dict[str, float]:
    """Median seconds of each way."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for function in ways.values():
        for _ in range(3):
            function()
    deadline = time.perf_counter() + budget_s * len(ways)
    while time.perf_counter() < deadline or len(next(iter(seconds.values()))) < 5:
        for way, function in ways.items():
            synchronize()
            start = time.perf_counter()
            function()
            synchronize()
            seconds[way].append(time.perf_counter() - start)
    return {way: statistics.median(values) for way, values in seconds.items()}


if __name__ == "__main__":
    main()

"""Golden runs: what the public entry points compute today, compared with stored numbers.

One small seeded run each of `esper.PPO`, `esper.grow`, `esper.adapt`, the adaptation controller that
ships, and the training of a growth controller. The numbers are in tests/goldens. If a change of them
is meant, store the new ones, and look at the difference:

    python tests/test_goldens.py --store

The runs hold on any CPU:

- Tensors are too small for torch to split over threads, and everything is on the CPU.
- Exponential numbers are drawn from uniform ones: MKL draws others than torch does without it. No
  model has dropout, for the same reason.
- With every initial weight and every row moved by up to 3e-6 of itself, 25 times the rounding of
  float32, twenty runs of each golden made the same decisions and stayed within the tolerances.
"""

import argparse
import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import gymnasium
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import esper

FOLDER = Path(__file__).parent / "goldens"
SIGNAL_ROWS = FOLDER / "signal_rows.npz"


# -- the only functions that know names which are not public ---------------------------------------


def train_growth_controller(on_round: Callable[[Any], None]) -> None:
    """A round of `esper train`, with a few small networks on MNIST-1D."""
    from dataclasses import replace

    from esper.simic.growth.growth_training import GrowthTraining
    from support.training_configs import NETWORKS

    hosts = replace(NETWORKS.host_batch, minibatches=5, validation_rows=50, episode_steps=10)
    policy = replace(NETWORKS.policy, floor=0.5)  # so that few decisions are to wait
    config = replace(
        NETWORKS,
        rounds=1,
        host_batch=hosts,
        growth=replace(NETWORKS.growth, num_steps=hosts.episode_steps),
        policy=policy,
        host_learning_rate=2e-2,
    )
    GrowthTraining(config).run(on_round)


def random_controller() -> Any:
    """A controller that takes any legal action."""
    from esper.tamiyo.scripted import RandomController

    return RandomController(torch.Generator().manual_seed(0))


def shipped_controller() -> Any:
    from esper.adapting.controller import find_controller

    return copy.deepcopy(find_controller("tamiyo"))  # the original is cached


def known_facts(rows: dict[str, Tensor]) -> Any:
    """The stored rows as the controller reads them."""
    from esper.adapting.controller import NUM_CHOICES, Known, flat_choice
    from esper.adapting.plans import MENU, RATES

    added = torch.full((len(rows["signals"]), NUM_CHOICES), torch.nan)  # NaN: not offered
    for number, plan in enumerate(MENU):
        for rate in RATES:
            added[:, flat_choice(plan, rate)] = rows["added"][:, number]
    return Known(rows["signals"], rows["held_out"], added, rows["usual"])


def draw_signal_rows(num_rows: int = 200) -> dict[str, Tensor]:
    """Signals within the range that the controller saw in training, with costs and results."""
    from esper.adapting.controller import ANCHORS
    from esper.adapting.plans import MENU

    rng = torch.Generator().manual_seed(0)
    controller = shipped_controller()
    low = controller.low
    high = controller.high
    shares = torch.rand(num_rows, len(low), generator=rng)
    added = torch.rand(num_rows, len(MENU), generator=rng)
    added[:, 0] = 0.0  # the plan that changes nothing
    return {
        "signals": low + shares * (high - low),  # [rows, signals]
        "held_out": torch.randint(4, 100, (num_rows,), generator=rng),  # [rows]
        "added": added,  # [rows, plans], relative to the model
        "usual": torch.rand(num_rows, len(ANCHORS), generator=rng),  # [rows, usual rules]
        "results": torch.rand(num_rows, TRIES, generator=rng),  # [rows, tries]
    }


# -- esper.PPO ---------------------------------------------------------------------------------------

# losses are means of numbers near 1 that nearly cancel, so rounding is relative to 1
FIRST_UPDATE = {"rtol": 1e-5, "atol": 1e-6}
LATER_UPDATES = {"rtol": 1e-3, "atol": 1e-4}
PPO_METRICS = (
    "ppo/policy_loss",
    "ppo/value_loss",
    "ppo/entropy/row",
    "ppo/entropy/column",
    "ppo/kl",
    "ppo/clip_fraction",
    "ppo/gradient_norm",
    "ppo/explained_variance",
)


class Board(gymnasium.Env):
    """Take each free cell of a 3 x 4 board once; cells of one colour, shown at first, earn 1."""

    observation_space = gymnasium.spaces.MultiBinary(13)
    action_space = gymnasium.spaces.MultiDiscrete([3, 4])

    def seen(self, colour: int) -> tuple[Any, dict[str, Any]]:
        masks = {"row": self.free.any(axis=1), "column": self.free}
        observation = np.append(self.free.ravel(), colour).astype(np.int8)
        return observation, {"action_mask": masks}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.free = np.ones((3, 4), dtype=bool)
        self.colour = int(self.np_random.integers(2))
        return self.seen(self.colour)

    def step(self, action: Any) -> Any:
        row, column = action
        assert self.free[row, column]
        self.free[row, column] = False
        observation, info = self.seen(0)
        is_right = (row + column) % 2 == self.colour
        return observation, float(is_right), self.free.sum() == 6, False, info


def boards(num_envs: int = 4) -> gymnasium.vector.SyncVectorEnv:
    return gymnasium.vector.SyncVectorEnv([Board] * num_envs)


def run_ppo() -> dict[str, Any]:
    """Three rounds on an environment where the legal columns depend on the row."""
    config = esper.GymConfig(
        horizon=28,
        policy=esper.PolicyConfig(lstm_hidden_dim=16),
        ppo=esper.PPOConfig(
            learning_rate=1e-2,
            clip=0.1,
            ppo_epochs=3,
            num_minibatches=2,
            entropy_coefficient=0.01,
        ),
    )
    heads = (esper.Head("row", 3), esper.Head("column", 4, given=("row",)))
    updates = []
    model = esper.PPO(boards(), heads=heads, config=config)
    model.learn(3 * 4 * 24, callback=lambda _, metrics: updates.append(dict(metrics)))
    played = esper.evaluate(model, boards(), episodes=20, deterministic=False)
    return {
        "updates": [{name: update[name] for name in PPO_METRICS} for update in updates],
        "steps": model.num_steps,
        "mean_return": float(played.returns.mean()),
    }


def test_ppo_with_conditional_masks_and_memory():
    stored = load("ppo")
    with portable_draws():
        found = run_ppo()
    assert_close(found["updates"][0], stored["updates"][0], **FIRST_UPDATE)
    assert_close(found, stored, **LATER_UPDATES)


# -- esper.grow --------------------------------------------------------------------------------------

# Metrics are shares of 2,000 rows. At the end of training, three of them changed sides when weights
# moved by 3e-6: five may.
GROWTH = {"rtol": 0.0, "atol": 2.5e-3}


def four_quadrants(num_rows: int, rng_seed: int) -> tuple[Tensor, Tensor]:
    """Rows of six numbers; two products of them give the class, so a narrow model needs more."""
    rng = torch.Generator().manual_seed(rng_seed)
    x = 2.0 * torch.rand(num_rows, 6, generator=rng) - 1.0
    first = x[:, 0] * x[:, 1] > 0.0
    second = x[:, 2] * x[:, 3] > 0.0
    return x, first.long() + 2 * second.long()


def batches(x: Tensor, y: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


def run_grow(**options: Any) -> dict[str, Any]:
    """A narrow MLP that grows, and its twin that does not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 4))
    result = esper.grow(
        model,
        batches(*four_quadrants(512, rng_seed=1), size=32),
        batches(*four_quadrants(2_000, rng_seed=2), size=500),
        loss=F.cross_entropy,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        steps=400,
        decisions=20,
        budget=esper.Budget(params=400),
        progress=False,
        **options,
    )
    ledger = result.ledger
    return {
        "decisions": [[d.step, d.op, d.site, d.seed] for d in ledger.decisions],
        "seeds": [[s.seed, s.site, s.blueprint, s.params, s.born] for s in ledger.seeds],
        "fates": [[f.seed, f.step, f.fate] for f in ledger.fates],
        "params": sum(parameter.numel() for parameter in result.model.parameters()),
        "returned": result.verdict.returned,
        "metrics": [step.metric for step in ledger.steps],
        "grown": result.verdict.grown,
        "ungrown": result.verdict.ungrown,
    }


def run_both_growths() -> dict[str, Any]:
    """The heuristic with all blueprints; random actions with blocks, trained behind the host."""
    blocks = run_grow(
        controller=random_controller(),
        blueprints=("dense", "dense_bottleneck", "dense_dense"),
        shadow_training=True,
    )
    return {"all": run_grow(), "blocks": blocks}


def test_grow_on_a_small_table():
    with portable_draws():
        found = run_both_growths()
    assert_close(found, load("grow"), **GROWTH)


# -- esper.adapt -------------------------------------------------------------------------------------

SIGNALS = {"rtol": 1e-3, "atol": 1e-4}
# accuracies are shares of 60 held-out rows: one may change sides
HELD_OUT = {"rtol": 0.0, "atol": 1.01 / 60}


def trained_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 4)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(20):
        for x, y in batches(*four_quadrants(512, rng_seed=1), size=64):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.eval()


def run_adapt() -> dict[str, Any]:
    """A trained MLP on rows whose columns have changed places and signs."""
    x, y = four_quadrants(240, rng_seed=3)
    shifted = 0.3 - 0.5 * x
    result = esper.adapt(trained_model(), shifted, y, steps=80, tries=3, progress=False)
    trials = result.ledger.trials
    return {
        "plan": str(result.plan),
        "rate": result.rate,
        "params": result.params,
        "tried": [[trial.plan, trial.rate, trial.params, trial.kept] for trial in trials],
        "accuracies": [trial.metric for trial in trials],
        "accuracy": result.accuracy,
        "signals": result.signals,
    }


def test_adapt_on_shifted_rows():
    found = run_adapt()
    stored = load("adapt")
    assert_close(found, stored, **HELD_OUT)
    assert_close(found["signals"], stored["signals"], **SIGNALS)


# -- the adaptation controller that ships ------------------------------------------------------------

TRIES = 3
SCORES = {"rtol": 1e-4, "atol": 1e-4}


def run_controller(rows: dict[str, Tensor]) -> dict[str, Any]:
    """What the controller proposes for each row, and at last keeps, with its scores."""
    controller = shipped_controller()
    decisions = []
    act = controller.policy.act

    def recorded_act(*args: Any, **kwargs: Any) -> Any:
        decisions.append(act(*args, **kwargs))
        return decisions[-1]

    results = iter(rows["results"].T)
    with mock.patch.object(controller.policy, "act", recorded_act):
        controller.choose_many(known_facts(rows), lambda _: next(results), budget=0.5, tries=TRIES)
    return {
        "choices": torch.stack([d.actions for d in decisions], dim=1),  # [rows, tries + 1, heads]
        "log_probs": torch.stack([d.log_probs for d in decisions], dim=1),
        "values": torch.stack([d.values for d in decisions], dim=1),  # [rows, tries + 1]
    }


def unclear_rows(rows: dict[str, Tensor]) -> list[int]:
    """Rows where the two best choices are so close that rounding could decide."""
    expected = run_controller(rows)["choices"]
    is_unclear = torch.zeros(len(expected), dtype=torch.bool)
    for rng_seed in range(20):
        rng = torch.Generator().manual_seed(rng_seed)
        moved = 1.0 + 1e-4 * (2.0 * torch.rand(rows["signals"].shape, generator=rng) - 1.0)
        nearby = run_controller(rows | {"signals": rows["signals"] * moved})["choices"]
        is_unclear |= (nearby != expected).flatten(1).any(dim=1)
    return is_unclear.nonzero().flatten().tolist()


def test_the_shipped_controller_on_stored_signals():
    stored = load("controller")
    found = run_controller(load_rows())
    is_clear = torch.ones(len(found["choices"]), dtype=torch.bool)
    is_clear[stored["unclear_rows"]] = False
    assert torch.equal(found["choices"][is_clear], torch.tensor(stored["choices"])[is_clear])
    for name in ("log_probs", "values"):
        expected = torch.tensor(stored[name])
        torch.testing.assert_close(found[name][is_clear], expected[is_clear], **SCORES)


# -- esper train -------------------------------------------------------------------------------------

# Networks train in float32 first, with compiled kernels that sum in another order on each CPU. So
# losses allow 1e-3. A score is a share of 50 validation rows less the rent: no row may change sides.
# That needs few and small training steps: with twice as many, rows did.
TRAINING = {"rtol": 1e-3, "atol": 1e-5}
TRAIN_METRICS = (
    "episode/score",
    "ppo/policy_loss",
    "ppo/value_loss",
    "ppo/kl",
    "ppo/entropy/op",
    "ppo/entropy/blueprint",
    "ppo/gradient_norm",
)


def run_train() -> dict[str, Any]:
    """A round of `esper train`: what was decided for each network, its score, and the update."""
    rounds = []
    train_growth_controller(rounds.append)
    (record,) = rounds
    return {
        "hosts": list(record.hosts),
        "variants": list(record.variants),
        "actions": record.actions.tolist(),  # [networks, steps, heads]
        "scores": record.episodes.scores.tolist(),
        "accuracy": record.episodes.accuracy.tolist(),
        "metrics": {name: record.metrics[name] for name in TRAIN_METRICS},
    }


def test_a_round_of_controller_training_with_networks():
    with portable_draws():
        found = run_train()
    assert_close(found, load("train"), **TRAINING)


# -- stored numbers ----------------------------------------------------------------------------------


def draw_exponential(self: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    return self.uniform_(generator=generator).neg_().log1p_().neg_()


@contextmanager
def portable_draws() -> Iterator[None]:
    """Draw exponential numbers from uniform ones, which are the same on every machine."""
    with mock.patch.object(torch.Tensor, "exponential_", draw_exponential):
        yield


def assert_close(
    found: Any, stored: Any, *, rtol: float, atol: float, path: str = "golden"
) -> None:
    """Numbers with a fraction are close; everything else is equal."""
    if isinstance(stored, dict):
        assert list(found) == list(stored), path
        for name in stored:
            assert_close(found[name], stored[name], rtol=rtol, atol=atol, path=f"{path}.{name}")
    elif isinstance(stored, list):
        assert len(found) == len(stored), f"{path}: {found}, stored: {stored}"
        for i, value in enumerate(stored):
            assert_close(found[i], value, rtol=rtol, atol=atol, path=f"{path}[{i}]")
    elif isinstance(stored, float):
        expected = pytest.approx(stored, rel=rtol, abs=atol)
        assert found == expected, path
    else:
        assert found == stored, path


def rounded(value: Any) -> Any:
    """The same with seven digits: more would change with the machine that stores them."""
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(part) for part in value]
    if isinstance(value, Tensor):
        return rounded(value.tolist())
    return float(f"{value:.7g}") if isinstance(value, float) else value


def load(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text())


def load_rows() -> dict[str, Tensor]:
    with np.load(SIGNAL_ROWS) as rows:
        return {name: torch.from_numpy(rows[name]) for name in rows.files}


def store(name: str, found: dict[str, Any]) -> None:
    """Write a golden, one line for each of its entries, and print it."""
    entries = [f"{json.dumps(key)}: {json.dumps(part)}" for key, part in rounded(found).items()]
    text = "{\n" + ",\n".join(entries) + "\n}\n"
    (FOLDER / f"{name}.json").write_text(text)
    shown = "\n".join(f"  {entry[:300]}" for entry in entries)
    print(f"{name}: {len(text):,} bytes\n{shown}")


def store_all() -> None:
    torch.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    rows = draw_signal_rows()
    np.savez_compressed(SIGNAL_ROWS, **{name: part.numpy() for name, part in rows.items()})
    store("controller", run_controller(rows) | {"unclear_rows": unclear_rows(rows)})
    with portable_draws():
        store("ppo", run_ppo())
        store("train", run_train())
        store("grow", run_both_growths())
    store("adapt", run_adapt())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--store", action="store_true", required=True, help="write tests/goldens")
    parser.parse_args()
    store_all()

"""A short run reproduces a stored curve: a change of what training computes cannot go unnoticed.

The curve holds on any CPU, because nothing in this run depends on the machine but rounding:

- `known_gains` trains no networks, so no host kernels are chosen, and the device is the CPU.
- The tensors are too small for torch to split over threads.
- Uniform numbers are drawn one after the other by the same generator everywhere. Exponential
  numbers are not (MKL draws them where torch has it), so the test draws them from uniform ones.

The tolerance: with the instruction set capped at SSE4.1, at AVX2, and not capped, values differ by
at most 3e-7 of themselves. With every initial weight moved by up to 3e-6 of itself, 25 times the
rounding of float32, they differ by at most 3e-6, or 1e-6 where they are near 0, and every action is
the same. The test allows 1e-4 and 1e-6. Values below are stored in six digits.
"""

from dataclasses import asdict, dataclass

import torch

from esper.simic.growth.growth_training import GrowthTraining
from esper.simic.growth.train_config import TrainConfig
from esper.tamiyo.policy.network import PolicyConfig
from esper.tolaria.environment import GrowthConfig
from esper.tolaria.host_batch import HostBatchConfig

CONFIG = TrainConfig(
    task="known_gains",
    imports=("support.synthetic_hosts",),
    host_batch=HostBatchConfig(num_types=2, envs_per_type=4, episode_steps=12),
    growth=GrowthConfig(num_steps=12),
    policy=PolicyConfig(lstm_hidden_dim=8, slot_dim=8, blueprint_dim=8),
    rounds=4,
    device="cpu",
)
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}


@dataclass
class Round:
    scores: list[float]  # of every env
    policy_loss: float
    value_loss: float
    kl: float
    op_entropy: float
    gradient_norm: float


CURVE = [
    Round(
        scores=[0.732894, 0.717803, 0.77, 0.77, 0.77, 0.754165, 0.77, 0.705044],
        policy_loss=-0.0284466,
        value_loss=0.497569,
        kl=0.00459318,
        op_entropy=0.296621,
        gradient_norm=0.473487,
    ),
    Round(
        scores=[0.77, 0.765026, 0.77, 0.77, 0.77, 0.77326, 0.77, 0.77],
        policy_loss=-0.00483848,
        value_loss=0.221616,
        kl=0.000303354,
        op_entropy=0.286983,
        gradient_norm=0.663182,
    ),
    Round(
        scores=[0.735331, 0.77, 0.77, 0.785377, 0.77, 0.758846, 0.77, 0.755294],
        policy_loss=-0.0050532,
        value_loss=1.05125,
        kl=0.00028273,
        op_entropy=0.272114,
        gradient_norm=0.931502,
    ),
    Round(
        scores=[0.753428, 0.77, 0.77, 0.772613, 0.77, 0.768053, 0.78857, 0.77],
        policy_loss=-0.00406007,
        value_loss=0.165612,
        kl=0.000182264,
        op_entropy=0.296689,
        gradient_norm=0.629394,
    ),
]  # fmt: skip


def run_training() -> list[Round]:
    """The only place that knows how training is run and what it reports."""
    curve = []

    def on_round(record):
        metrics = record.metrics
        curve.append(
            Round(
                scores=record.episodes.scores.tolist(),
                policy_loss=metrics["ppo/policy_loss"],
                value_loss=metrics["ppo/value_loss"],
                kl=metrics["ppo/kl"],
                op_entropy=metrics["ppo/entropy/op"],
                gradient_norm=metrics["ppo/gradient_norm"],
            )
        )

    GrowthTraining(CONFIG).run(on_round)
    return curve


def draw_exponential(self: torch.Tensor, *, generator: torch.Generator) -> torch.Tensor:
    return self.uniform_(generator=generator).neg_().log1p_().neg_()


def test_a_short_run_reproduces_its_stored_curve(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "exponential_", draw_exponential)
    curve = run_training()
    found, stored = ([asdict(r) for r in rounds] for rounds in (curve, CURVE))
    torch.testing.assert_close(
        found,
        stored,
        **TOLERANCE,
        msg=lambda error: f"{error}\n\nIf this change is meant, store the new curve:\n{curve}",
    )

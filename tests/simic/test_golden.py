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
        scores=[0.77, 0.750341, 0.777173, 0.799008, 0.77, 0.77, 0.772975, 0.77],
        policy_loss=-0.00921135,
        value_loss=0.497504,
        kl=0.000599523,
        op_entropy=0.341108,
        gradient_norm=0.53685,
    ),
    Round(
        scores=[0.77, 0.77, 0.798265, 0.77, 0.77, 0.77, 0.77, 0.784141],
        policy_loss=-0.00771608,
        value_loss=0.807044,
        kl=0.000765053,
        op_entropy=0.334896,
        gradient_norm=0.766249,
    ),
    Round(
        scores=[0.77, 0.77, 0.780272, 0.77, 0.77, 0.764846, 0.77, 0.77],
        policy_loss=-0.000472122,
        value_loss=0.597199,
        kl=9.7224e-06,
        op_entropy=0.30062,
        gradient_norm=0.516078,
    ),
    Round(
        scores=[0.77, 0.77, 0.688154, 0.77, 0.813896, 0.77, 0.764144, 0.77],
        policy_loss=-0.00280592,
        value_loss=0.898116,
        kl=2.92466e-05,
        op_entropy=0.31114,
        gradient_norm=0.718925,
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

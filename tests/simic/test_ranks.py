"""The same run whatever the number of ranks, up to the order of summation.

The tolerance: ranks add up gradients and statistics in another order, so weights differ by the
rounding of float32, which the update amplifies. After three rounds the policies below differ by
less than 1e-5; 1e-4 is allowed. Actions and scores are equal.
"""

from dataclasses import replace

import pytest
import torch
from support.ranks import on_ranks
from support.training_configs import NETWORKS, ORACLE

from esper.leyline.ranks import ALONE, Ranks, join_ranks
from esper.simic.training.growth_training import GrowthTraining

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
CONFIGS = {"oracle": ORACLE, "networks": NETWORKS}


def trained(config, ranks: Ranks = ALONE, rounds: int = 3):
    """Records of all rounds (on rank 0) and the state of the run after them."""
    records = []
    training = GrowthTraining(replace(config, rounds=rounds), ranks)
    training.run(records.append)
    return records, training.trainer.state_dict()


def require_same_runs(one, other):
    for a, b in zip(one[0], other[0], strict=True):
        assert (a.hosts, a.variants, a.rollback_reasons) == (b.hosts, b.variants, b.rollback_reasons)
        assert torch.equal(a.actions, b.actions)
        assert torch.equal(a.legal, b.legal)
        assert torch.equal(a.observed_envs, b.observed_envs)
        torch.testing.assert_close(a.observations, b.observations, **TOLERANCE)
        torch.testing.assert_close(a.episodes, b.episodes, equal_nan=True, **TOLERANCE)
        names = [name for name in a.metrics if not name.startswith("time")]
        torch.testing.assert_close(
            *({name: record.metrics[name] for name in names} for record in (a, b)),
            equal_nan=True,
            **TOLERANCE,
        )
    require_same_state(one[1], other[1])


def require_same_state(one, other):
    for name in ("progress", "num_envs", "action_rng", "shuffle_rng", "envs"):
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=0)
    for name in ("policy", "value_normalizer"):
        torch.testing.assert_close(one["agent"][name], other["agent"][name], **TOLERANCE)


@pytest.mark.parametrize(
    ("name", "size"),
    [("oracle", 2), ("networks", 2), pytest.param("oracle", 4, marks=pytest.mark.slow),
     pytest.param("networks", 3, marks=pytest.mark.slow)],
)  # fmt: skip
def test_ranks_run_as_one_process_does(name, size):
    config = CONFIGS[name]
    runs = on_ranks(size, lambda: trained(config, join_ranks()))
    require_same_runs(trained(config), runs[0])
    for records, state in runs[1:]:
        assert records == []  # rank 0 writes
        torch.testing.assert_close(state["agent"], runs[0][1]["agent"], rtol=0, atol=0)

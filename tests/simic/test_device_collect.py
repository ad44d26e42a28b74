"""Collecting by graphs stores what collecting step by step stores.

A CUDA graph is replaced by its work, run on the CPU with the same warm-ups: so the rules about what a
warm-up may change, and about the ends of rounds, are tested without a GPU.
"""

import pytest
import torch

from esper.simic.agent import cuda_graphs
from esper.simic.device_collect import DeviceCollect
from esper.simic.gym.gym_envs import GymEnvs
from support.rollouts import stored_fields
from support.torch_models import KINDS, NEXT_STEP, SAME_STEP, counters, model_of


@pytest.fixture
def captured_on_the_cpu(monkeypatch):
    """Work takes the place of graphs, and a step gives the same record every time."""

    def capture(graph):
        before = [(tensor, tensor.clone()) for tensor in graph._changes()]
        for _ in range(3):
            graph._work()
            cuda_graphs._restore(before)

    step = GymEnvs.step

    def step_with_fixed_tensors(envs, row):
        stepped = step(envs, row)
        fixed = vars(envs).setdefault("fixed_for_tests", {})
        key = tuple(part is None for part in stepped)
        if key not in fixed:
            fixed[key] = stepped._replace(is_fixed=True)
        for target, source in zip(fixed[key], stepped, strict=True):
            if isinstance(target, torch.Tensor):
                target.copy_(source)
        return fixed[key]

    monkeypatch.setattr(cuda_graphs.Captured, "_capture", capture)
    monkeypatch.setattr(cuda_graphs.Captured, "run_again", lambda graph: graph._work())
    monkeypatch.setattr(GymEnvs, "step", step_with_fixed_tensors)


def by_graphs(model):
    """The model's trainer collects as on a GPU."""
    trainer = model.trainer
    collect = DeviceCollect(trainer.envs, model.agent, trainer.buffer, trainer.clock)
    trainer._device_collect = collect
    return model


def collected(model, num_rounds):
    rounds = []
    for _ in range(num_rounds):
        model.agent.graphs = None  # learn on the CPU
        if model.trainer._device_collect is not None:
            model.agent.graphs = cuda_graphs.AgentGraphs(model.agent)
        model.trainer.collect()
        model.agent.graphs = None
        fields = stored_fields(model.trainer.buffer)
        valid = model.trainer.buffer.valid_mask
        rounds.append({name: field[valid].clone() for name, field in fields.items()})
        rounds[-1]["initial_h"] = model.trainer.buffer.initial_hidden_h.clone()
        model.trainer.learn()
    return rounds


@pytest.mark.parametrize("mode", [SAME_STEP, NEXT_STEP])
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_store_the_rows_that_single_steps_store(kind, mode, request):
    expected = collected(model_of(counters(mode, kind), kind), 3)
    request.getfixturevalue("captured_on_the_cpu")
    found = collected(by_graphs(model_of(counters(mode, kind), kind)), 3)
    assert expected[0]["truncated"].sum() > 4
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


class Lengths:
    """Counters of these lengths, all cut off; final observations only where an episode ends."""

    def __new__(cls, lengths, has_final=True):
        envs = counters(SAME_STEP)
        envs.limits = torch.tensor(lengths)
        envs.ends_itself = torch.zeros(len(lengths), dtype=torch.bool)
        step = envs.step

        def step_with_some(actions):
            *outcome, infos = step(actions)
            if not has_final or not (outcome[2] | outcome[3]).any():
                infos.pop("final_obs", None)
            return *outcome, infos

        envs.step = step_with_some
        return envs


@pytest.mark.parametrize("has_final", [True, False])
@pytest.mark.parametrize("lengths", [(16, 16, 16, 16), (1, 40, 40, 40), (16, 15, 1, 2)])
def test_a_first_end_anywhere_in_a_round_is_valued(lengths, has_final, request):
    expected = collected(model_of(Lengths(lengths, has_final)), 2)
    request.getfixturevalue("captured_on_the_cpu")
    found = collected(by_graphs(model_of(Lengths(lengths, has_final))), 2)
    assert expected[0]["truncated"].any()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True)

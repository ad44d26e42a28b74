"""What a GPU cannot hold is refused before anything is allocated, with what to lower."""

import pytest
import torch

from esper.leyline.factored_actions import FactoredActionSpace, Head
from esper.runtime import devices
from esper.simic.device_collect import device_bytes
from esper.simic.trainer import EnvSpec
from esper.tamiyo.policy.network import PolicyConfig

GPU = torch.device("cuda", 0)


def test_what_does_not_fit_is_named_with_its_parts(monkeypatch):
    monkeypatch.setattr(devices, "free_memory", lambda device: 3 * 2**30)
    needed = {"rollout": 2 * 2**30, "learning": 2**30}
    devices.require_memory(needed, GPU, "use fewer envs")
    needed["learning"] += 2**30
    message = r"cuda:0 has 3.0 GiB free, .* needs 4.0 \(rollout 2.0, learning 2.0\); use fewer envs"
    with pytest.raises(ValueError, match=message):
        devices.require_memory(needed, GPU, "use fewer envs")


def test_every_step_and_env_counts_and_more_minibatches_need_less():
    spec = EnvSpec(4096, 17, FactoredActionSpace((Head("symbol", 8),)))
    whole = device_bytes(spec, 64, PolicyConfig(), 4)
    longer = device_bytes(spec, 128, PolicyConfig(), 4)
    assert longer == {name: 2 * size for name, size in whole.items()}
    # features, head, choices, the rest; then features and the state, h and c of 128 units
    assert whole["rollout"] == 64 * 4096 * (4 * 17 + 12 + 9 * 8 + 29)
    assert whole["final observations and states"] == 64 * 4096 * (4 * 17 + 8 * 128)
    split = device_bytes(spec, 64, PolicyConfig(), 8)
    assert split["learning"] == whole["learning"] // 2


@pytest.mark.gpu
def test_a_rollout_that_no_gpu_holds_is_refused_when_the_model_is_made():
    from esper import PPO, GymConfig
    from support.batched_environments import SAME_STEP, Counters

    envs = Counters(SAME_STEP, xp=torch, device="cuda")
    with pytest.raises(ValueError, match="GiB free, but this needs .* use fewer envs"):
        PPO(envs, config=GymConfig(horizon=2**34))

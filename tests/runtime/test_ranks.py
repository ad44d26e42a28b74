"""Processes that are connected: by torchrun's variables or by the user's script, and lost ones."""

import os
import re
import signal
import time

import pytest
import torch

from esper.runtime.ranks import RankLost, _backend, join_ranks
from support.ranks import on_ranks


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR expected, but not set; torchrun sets"),
        ({"WORLD_SIZE": "2", "RANK": "x"}, "'x'; torchrun sets WORLD_SIZE, RANK"),
        ({"WORLD_SIZE": ""}, "RANK expected, but not set"),
        ({"RANK": "1"}, "WORLD_SIZE expected, but not set"),
        ({"WORLD_SIZE": "2", "ESPER_TIMEOUT_S": "soon"}, "ESPER_TIMEOUT_S='soon'; use a number"),
    ],
)
def test_bad_variables_are_named(variables, message, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)  # a GPU asks for LOCAL_RANK first
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    join_ranks.cache_clear()
    with pytest.raises((ValueError, ConnectionError), match=message):
        join_ranks()


def test_a_group_of_the_users_script_is_joined():
    """With NCCL alone it cannot send CPU tensors, so a gloo group is added; here it is its double."""

    def work():
        torch.distributed.init_process_group("gloo")
        ranks = join_ranks()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.distributed, "get_backend_config", lambda: "cuda:nccl")
            join_ranks.cache_clear()
            added = join_ranks()
        found = [each.sum(torch.tensor(each.rank + 1)).item() for each in (ranks, added)]
        return (
            found,
            added.cpu_group is not None,
            added.gather(added.rank),
            added.broadcast(added.rank),
        )

    assert on_ranks(2, work) == [([3, 3], True, [0, 1], 0)] * 2


def test_ranks_that_share_a_gpu_use_gloo(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setenv("LOCAL_RANK", "0")
    for ranks, backend in ((2, "cpu:gloo,cuda:nccl"), (4, "gloo")):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert _backend() == backend


def test_a_rank_with_other_settings_stops_all():
    def work() -> None:
        ranks = join_ranks()
        ranks.require_same({"rounds": 3 + ranks.rank})

    for error in on_ranks(2, work):
        assert isinstance(error, ValueError)
        assert "rank 1 has other settings than rank 0: rounds is 4, not 3. " in str(error)


def test_a_killed_rank_is_named_by_the_others():
    def work() -> None:
        ranks = join_ranks()
        ranks.broadcast(None)
        if ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        try:
            ranks.any(False)
        finally:
            assert time.monotonic() - started < 30

    first, killed = on_ranks(2, work)
    assert killed is None
    assert isinstance(first, RankLost)
    assert re.match(r"rank 1 \(process \d+ on .*\) has ended, so rank 0 stops", str(first))

"""Growth on two ranks: seeds equal on both, and the model that one process grows.

The tolerance: two means of half a batch are added where one process takes the mean of the whole, so
weights differ by rounding, which AdamW amplifies. They stay within 1e-5 here; 1e-3 is allowed.
"""

import os
import pickle
import signal
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import esper
from esper.growing.ddp import ALONE, Ranks, connected_ranks, rows_of
from esper.leyline.stages import LifecycleOp
from esper.tamiyo.growth_rules import EvidenceController
from esper.tamiyo.scripted import ConstantPlan, FixedSchedule
from support.grow_calls import run
from support.models import WAIT, Script, act, blobs, germinate, mlp
from support.processes import DEADLINE_S, fork

TOLERANCE = {"rtol": 1e-3, "atol": 1e-3}
COMMIT = act(LifecycleOp.FOSSILIZE)
MOVES = (germinate(), WAIT, WAIT, COMMIT, WAIT, germinate(1), WAIT, WAIT)
SHADOW_MOVES = (germinate(), WAIT, act(LifecycleOp.ADVANCE), WAIT, WAIT, germinate(1), WAIT, WAIT)
X, Y = blobs()


def on_two_ranks(work: Callable[[], Any]) -> list[Any]:
    """What `work` returns on each rank of a process group, forked from the test.

    An error on a rank is the result of that rank; a rank that has ended has none.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = [_start_rank(work, rank, folder) for rank in range(2)]
        for process in processes:
            os.waitpid(process, 0)
        results = (folder / str(rank) for rank in range(2))
        return [pickle.loads(path.read_bytes()) if path.exists() else None for path in results]


def _start_rank(work: Callable[[], Any], rank: int, folder: Path) -> int:
    process = fork()
    if process:
        return process
    try:
        signal.alarm(int(DEADLINE_S))
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=60),
        )
        try:
            value = work()
        except Exception as error:
            traceback.print_exc()
            value = error
        (folder / str(rank)).write_bytes(pickle.dumps(value))
    finally:
        os._exit(0)


def steady() -> nn.Module:
    """A model without dropout, whose masks depend on how rows are split."""
    model = mlp()
    model[2].p = 0.0
    return model


def own_loop(
    shadow_training=False, clip=False, breaks_at=-1, controller=None, decisions=9, batch=16
):
    """A loop under DDP, or on one process with the same global batches.

    Returns the seeds' weights after every decision, and the model's and the ledger at the end.
    """
    torch.manual_seed(0)
    ranks = connected_ranks()
    net = steady()
    model = DistributedDataParallel(net) if ranks.size > 1 else net
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    growth = esper.Growth(
        model, optimizer, example=X[:8], decisions=decisions,
        controller=controller or Script(*(SHADOW_MOVES if shadow_training else MOVES)),
        shadow_training=shadow_training,
    )  # fmt: skip
    seeds = []
    for decision in range(decisions):
        for step in range(3):
            rows = torch.arange(batch * step, batch * (step + 1))[ranks.rank :: ranks.size]
            x, y = X[rows], Y[rows]
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            growth.shadow_loss(lambda x=x, y=y: F.cross_entropy(model(x), y))
            if clip:
                nn.utils.clip_grad_norm_(growth.parameters(), 0.1)
            optimizer.step()
            growth.after_step(loss)
        if decision == breaks_at and ranks.rank == ranks.size - 1:
            next(net.buffers(), next(net.parameters())).data.fill_(torch.nan)
        # each rank gives the metric of its own rows
        right = (net(X[ranks.rank :: ranks.size]).argmax(1) == Y[ranks.rank :: ranks.size]).float()
        growth.decide(float(right.mean()))
        seeds.append([p.detach().clone() for slot in growth._network.slots if slot.seed is not None
                      for p in slot.seed.parameters()])  # fmt: skip
    return seeds, net.state_dict(), growth.ledger


@pytest.mark.parametrize("options", [{}, {"clip": True}, {"shadow_training": True}])
def test_under_ddp_ranks_grow_the_model_of_one_process(options):
    one, (two, other) = own_loop(**options), on_two_ranks(lambda: own_loop(**options))
    assert sum(map(len, one[0])) > 0
    torch.testing.assert_close(two[:2], other[:2], rtol=0, atol=0)
    torch.testing.assert_close(one[:2], two[:2], **TOLERANCE)
    assert two[2].to_json() == other[2].to_json()
    assert [d.op for d in one[2].decisions] == [d.op for d in two[2].decisions]


def test_under_ddp_a_wider_model_trains_on_after_growth_has_closed():
    def work():
        torch.manual_seed(0)
        ranks, net = connected_ranks(), nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
        model = DistributedDataParallel(net)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        growth = esper.Growth(
            model, optimizer, example=X[:8], decisions=8, sites=["0->2"], blueprints=["widen_full"],
            controller=ConstantPlan(torch.tensor([[0]])),
        )  # fmt: skip
        for step in range(12):
            rows = torch.arange(ranks.rank, 32, ranks.size)
            optimizer.zero_grad()
            F.cross_entropy(model(X[rows]), Y[rows]).backward()
            optimizer.step()
            growth.after_step()
            if step < 8:
                growth.decide(0.1 * step)
                closed = growth.plain_model().state_dict() if growth.is_closed else {}
        return closed, growth.plain_model().state_dict()

    (closed, two), (_, other) = on_two_ranks(work)
    assert two["0.weight"].shape == (12, 5)
    assert all(not torch.equal(two[name], closed[name]) for name in two)
    torch.testing.assert_close(two, other, rtol=0, atol=0)


class Skipping(nn.Module):
    """A rank leaves out the layer before the seed, as training with random depth does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.skips = False

    def forward(self, x):
        h = self.a(x).relu()
        return self.c(h if self.skips else self.b(h).relu())


def test_a_rank_may_skip_a_site_and_load_what_was_just_saved(tmp_path):
    def start():
        torch.manual_seed(0)
        model = DistributedDataParallel(Skipping(), find_unused_parameters=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return esper.Growth(
            model, optimizer, example=X[:8], decisions=9, sites=["b"], controller=Script(*MOVES)
        ), model

    def work():
        rank = connected_ranks().rank
        growth, model = start()
        for step in range(5):
            model.module.skips = step % 3 == rank
            growth.optimizer.zero_grad()
            F.cross_entropy(model(X[rank::2]), Y[rank::2]).backward()
            growth.optimizer.step()
            growth.after_step()
            model.module.skips = False
            growth.decide(0.1 * step)
        growth.save(tmp_path / "run.pt")
        again, _ = start()
        again.load(tmp_path / "run.pt")
        return growth.plain_model().state_dict(), again.plain_model().state_dict()

    (one, loaded), (other, _) = on_two_ranks(work)
    assert len(one) > len(Skipping().state_dict())
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    torch.testing.assert_close(one, loaded, rtol=0, atol=0)


def test_evidence_is_that_of_all_ranks():
    """Of batches larger than the rows that the evidence uses."""

    def work():
        controller, gains = EvidenceController(), []
        see = controller.see
        controller.see = lambda gain: (gains.append(gain.clone()), see(gain))
        _, _, ledger = own_loop(controller=controller, decisions=16, batch=32)
        return gains, ledger

    (one, alone), ((two, ledger), (other, other_ledger)) = work(), on_two_ranks(work)
    assert any(gain.any() for gain in two)
    torch.testing.assert_close(two, other, rtol=0, atol=0)
    torch.testing.assert_close(one, two, **TOLERANCE)
    assert ledger.to_json() == other_ledger.to_json()
    assert "GERMINATE" in [d.op for d in ledger.decisions]
    assert [d.site for d in alone.decisions] == [d.site for d in ledger.decisions]


def test_a_break_on_one_rank_rolls_all_back():
    two, other = on_two_ranks(lambda: own_loop(breaks_at=3))
    assert two[2].rollbacks
    torch.testing.assert_close(two[:2], other[:2], rtol=0, atol=0)


def test_grow_on_two_ranks_is_grow_on_one():
    def work():
        torch.manual_seed(connected_ranks().rank)  # the weights of rank 0 count
        result = run(FixedSchedule(every=1), model=steady(), steps=48, decisions=12)
        return result.model.state_dict(), result.ledger, result.verdict

    one, (two, other) = work(), on_two_ranks(work)
    torch.testing.assert_close(two[0], other[0], rtol=0, atol=0)
    torch.testing.assert_close(one[0], two[0], **TOLERANCE)
    assert two[1].to_json() == other[1].to_json()
    assert [s.metric for s in one[1].steps] == pytest.approx([s.metric for s in two[1].steps])
    assert one[2].returned == two[2].returned == other[2].returned


def test_loaders_with_a_distributed_sampler_are_already_split():
    def work():
        ranks = connected_ranks()
        train, val = (
            DataLoader(data, 8, sampler=DistributedSampler(data, shuffle=False))
            for data in (TensorDataset(*blobs()), TensorDataset(*blobs(64, rng_seed=1)))
        )
        torch.manual_seed(0)
        model = mlp()
        result = esper.grow(
            DistributedDataParallel(model), train, val, loss=F.cross_entropy, steps=24, decisions=8,
            optimizer=torch.optim.AdamW(model.parameters(), lr=3e-2), progress=False,
            controller=FixedSchedule(every=1),
        )  # fmt: skip
        assert ranks.size == 2
        with torch.no_grad():
            x, y = blobs(64, rng_seed=1)
            accuracy = float((result.model.eval()(x).argmax(1) == y).double().mean())
        return accuracy, max(result.verdict.grown, result.verdict.ungrown)

    for accuracy, reported in on_two_ranks(work):
        assert accuracy == pytest.approx(reported)  # of the rows of both ranks


def test_rows_of_a_batch_are_split_and_weighted():
    batch = ({"x": torch.arange(5), "scale": torch.tensor(2.0)}, torch.arange(5))
    parts = [rows_of(batch, Ranks(rank, 2)) for rank in range(2)]
    assert [part[0]["x"].tolist() for part, _ in parts] == [[0, 2, 4], [1, 3]]
    assert [weight for _, weight in parts] == [6 / 5, 4 / 5]
    assert rows_of(batch, ALONE) == (batch, 1.0)
    with pytest.raises(ValueError, match="a batch of 5 rows for 6 ranks"):
        rows_of(batch, Ranks(0, 6))


def test_a_sharded_model_is_refused():
    def work() -> None:
        model = mlp()
        fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.AdamW(model.parameters())
        esper.Growth(model, optimizer, example=X[:8], decisions=9)

    for error in on_two_ranks(work):
        assert "the model is sharded" in str(error)
        assert "DistributedDataParallel" in str(error)


@pytest.mark.parametrize("wraps_later", [False, True])
def test_a_model_without_its_wrapper_is_refused(wraps_later):
    def work() -> None:
        model = mlp() if wraps_later else DistributedDataParallel(mlp()).module
        optimizer = torch.optim.AdamW(model.parameters())
        esper.Growth(model, optimizer, example=X[:8], decisions=9)

    for error in on_two_ranks(work):
        assert isinstance(error, ValueError)
        assert "2 ranks are connected" in str(error)
        assert "give Growth the DistributedDataParallel model" in str(error)


def test_ctrl_c_on_one_rank_stops_all(default_signals):
    def work():
        steps = []

        def loss(output, target):
            steps.append(1)
            if len(steps) == 9 and connected_ranks().rank == 1:
                os.kill(os.getpid(), signal.SIGINT)
            return F.cross_entropy(output, target)

        with pytest.warns(UserWarning, match="stopped after"):
            return run(
                FixedSchedule(every=1), steps=48, decisions=12, loss=loss
            ).growth.optimizer_steps

    first, second = on_two_ranks(work)
    assert first == second < 48


def test_a_lost_rank_ends_the_others_with_an_error():
    def work():
        steps = []

        def loss(output, target):
            steps.append(1)
            if len(steps) == 9 and connected_ranks().rank == 1:
                os._exit(1)
            return F.cross_entropy(output, target)

        return run(FixedSchedule(every=1), steps=48, decisions=12, loss=loss)

    first, second = on_two_ranks(work)
    assert isinstance(first, RuntimeError)
    assert second is None

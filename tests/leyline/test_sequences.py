"""SequenceLayout: every stored step exactly once, in the order of torch's PackedSequence."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence
from torch.utils._python_dispatch import TorchDispatchMode

from esper.leyline.sequences import SequenceLayout, SequenceParts


@st.composite
def rollouts(draw):
    num_envs = draw(st.integers(1, 5))
    max_steps = draw(st.integers(1, 9))
    counts = torch.tensor(
        draw(st.lists(st.integers(0, max_steps), min_size=num_envs, max_size=num_envs))
    )
    bits = draw(
        st.lists(st.booleans(), min_size=num_envs * max_steps, max_size=num_envs * max_steps)
    )
    return torch.tensor(bits).view(num_envs, max_steps), counts


def episodes_by_loop(ended, counts):
    """(env, start, length) of every episode, read step by step."""
    found = []
    for env, count in enumerate(counts.tolist()):
        start = 0
        for step in range(count):
            if ended[env, step] or step == count - 1:
                found.append((env, start, step + 1 - start))
                start = step + 1
    return found


@given(rollouts())
def test_episodes_are_those_of_a_plain_loop(rollout):
    ended, counts = rollout
    layout = SequenceLayout.from_flags(ended, counts)
    found = list(
        zip(layout.env_ids.tolist(), layout.starts.tolist(), layout.lengths.tolist(), strict=True)
    )
    assert found == episodes_by_loop(ended, counts)
    assert layout.num_rows == counts.sum()


@given(rollouts())
def test_rows_are_in_the_order_of_a_packed_sequence(rollout):
    ended, counts = rollout
    layout = SequenceLayout.from_flags(ended, counts)
    episodes = episodes_by_loop(ended, counts)
    if not episodes:
        assert layout.rows.numel() == 0
        return
    field = torch.arange(ended.numel()).view(ended.shape)
    pieces = [field[env, start : start + length] for env, start, length in episodes]
    packed = pack_sequence(pieces, enforce_sorted=False)
    # episodes of equal length may stand in any order: compare what each one holds, step by step
    assert packed.batch_sizes.tolist() == layout.batch_sizes.tolist()
    mine = layout.gather(field)
    at = 0
    for start, size in zip(layout.step_starts, layout.batch_sizes.tolist(), strict=True):
        assert start == at
        assert sorted(mine[at : at + size].tolist()) == sorted(packed.data[at : at + size].tolist())
        at += size
    firsts = mine[: layout.num_episodes]
    at, running = 0, firsts - 1
    for size in layout.batch_sizes.tolist():
        running = running[:size] + 1
        assert torch.equal(mine[at : at + size], running)
        at += size


@given(rollouts())
def test_an_episode_continues_only_from_the_start_of_a_row(rollout):
    ended, counts = rollout
    layout = SequenceLayout.from_flags(ended, counts)
    first_steps = layout.rows[: layout.num_episodes] % layout.max_steps
    assert torch.equal(layout.has_prior_state, first_steps == 0)


@given(rollouts(), st.data())
def test_selecting_envs_keeps_their_rows_and_no_others(rollout, data):
    ended, counts = rollout
    chosen = data.draw(st.sets(st.integers(0, len(counts) - 1)))
    layout = SequenceLayout.from_flags(ended, counts).select(
        torch.tensor(sorted(chosen), dtype=torch.long)
    )
    expected = {e * layout.max_steps + t for e in chosen for t in range(int(counts[e]))}
    assert set(layout.rows.tolist()) == expected
    assert len(layout.rows) == len(expected)


@given(rollouts(), st.integers(1, 3))
def test_parts_gathered_together_are_those_gathered_one_by_one(rollout, num_parts):
    ended, counts = rollout
    layout = SequenceLayout.from_flags(ended, counts)
    pieces = [layout.select(ids) for ids in torch.randperm(len(counts)).chunk(num_parts)]
    parts = SequenceParts(tuple(pieces))
    field = torch.arange(ended.numel()).view(ended.shape)
    states = 1.0 + torch.arange(2 * len(counts)).view(-1, 2)
    together = parts.split_rows(parts.gather(field)), parts.split_episodes(parts.initial(states))
    for piece, rows, initial in zip(pieces, *together, strict=True):
        alone = layout.select(piece.env_ids)
        assert torch.equal(rows, field.flatten()[alone.rows])
        begins = rows[: alone.num_episodes]
        expected = torch.where((begins % layout.max_steps == 0)[:, None], states[begins // layout.max_steps], 0.0)  # fmt: skip
        assert torch.equal(initial, expected)


def test_tables_go_to_a_device_in_one_copy_and_begin_where_kernels_expect_them():
    layout = SequenceLayout.from_flags(torch.zeros(6, 5, dtype=torch.bool), torch.arange(6))
    parts = SequenceParts(tuple(layout.select(torch.tensor(ids)) for ids in ([1, 2, 3], [4, 5])))
    device = torch.device("meta")  # stands for a GPU: same path, no data
    with CountOps() as ops:
        parts.gather(torch.empty(6, 5, device=device))
        steps = [piece.steps_on(device) for piece in parts.layouts]
    assert ops.copies == 1
    for piece, (starts, lengths) in zip(parts.layouts, steps, strict=True):
        assert starts.shape == piece.step_starts.shape
        assert lengths.shape == piece.lengths.shape
        assert starts.storage_offset() * starts.itemsize % 16 == 0
        assert lengths.storage_offset() * lengths.itemsize % 16 == 0


class CountOps(TorchDispatchMode):
    copies = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.copies += func.overloadpacket == torch.ops.aten._to_copy and "device" in kwargs
        return func(*args, **(kwargs or {}))

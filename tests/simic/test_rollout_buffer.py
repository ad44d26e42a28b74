"""TamiyoRolloutBuffer: what goes in comes out, bad input is refused whole, episodes stay apart."""

import operator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from esper.leyline.constants import DEFAULT_GAE_LAMBDA, DEFAULT_GAMMA
from esper.leyline.factored_actions import (
    FactoredActionSpace,
    Head,
    audit_action_space,
    tamiyo_action_space,
)
from esper.simic.agent.ppo import PPOConfig
from esper.simic.agent.rollout import LEARNED_FROM, RolloutRow
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer, TamiyoRolloutStep

STATE_DIM, LAYERS, HIDDEN, FRAME = 6, 2, 4, 12
SPACE = audit_action_space()
SPACES = {
    "audit": SPACE,
    "tamiyo": tamiyo_action_space(3, 5),
    "with a number": FactoredActionSpace((Head("gear", 3), Head("torque", continuous=True))),
}
ARGUMENTS = {  # of a step, by the buffer's field
    "states": "state", "actions": "actions", "log_probs": "log_probs", "masks": "masks",
    "values": "value", "rewards": "reward", "terminated": "terminated", "truncated": "truncated",
    "bootstrap_values": "bootstrap_value", "frames": "frames",
}  # fmt: skip


def make_buffer(num_envs=3, max_steps=5, space=SPACE, device="cpu"):
    sizes = (STATE_DIM, space, HIDDEN, LAYERS, device, FRAME)
    return TamiyoRolloutBuffer(num_envs, max_steps, *sizes)


def random_step(num_envs, space=SPACE, **given_fields):
    """A step of random content for a batch, with masks that differ per row; no episode ends."""
    masks = torch.rand(num_envs, space.num_choices) < 0.5
    for head in space.unconditional:  # at least one legal choice, in a place that differs
        start = space.slices[head].start
        masks[torch.arange(num_envs), start + torch.randint(space.sizes[head], (num_envs,))] = True
    actions = torch.stack([torch.randint(size, (num_envs,)) for size in space.sizes], dim=1)
    none = torch.zeros(num_envs, dtype=torch.bool)
    values = dict(
        state=torch.randn(num_envs, STATE_DIM),
        actions=actions.to(space.action_dtype),
        log_probs=-torch.rand(num_envs, space.num_heads),
        masks=masks,
        value=torch.randn(num_envs),
        reward=torch.randn(num_envs),
        terminated=none,
        truncated=none,
        bootstrap_value=torch.randn(num_envs),
        hidden_h=torch.randn(num_envs, LAYERS, HIDDEN),
        hidden_c=torch.randn(num_envs, LAYERS, HIDDEN),
        frames=torch.randint(256, (num_envs, FRAME), dtype=torch.uint8),
    )
    for name, value in given_fields.items():
        values[name] = torch.tensor(value) if isinstance(value, list) else value
    return TamiyoRolloutStep(**values)


def steps_of(step, envs):
    """The step of some envs, or of one."""
    return TamiyoRolloutStep(*(None if x is None else x[envs] for x in step))


NO_STATE = {part: torch.zeros(1, LAYERS, HIDDEN) for part in ("hidden_h", "hidden_c")}


def filled(counts, terminated=None, truncated=None, max_steps=None):
    """A buffer whose envs hold `counts` random steps, with flags `[N, T]`."""
    flags = [x for x in (terminated, truncated) if x is not None]
    max_steps = max_steps or (flags[0].shape[1] if flags else max(1, *counts))
    none = torch.zeros(len(counts), max_steps, dtype=torch.bool)
    terminated = none if terminated is None else terminated
    truncated = none if truncated is None else truncated
    buffer = make_buffer(len(counts), max_steps)
    for env, count in enumerate(counts):
        for t in range(count):
            ends = dict(terminated=terminated[env, t, None], truncated=truncated[env, t, None])
            buffer.add_batch(random_step(1, **ends, **NO_STATE), [env])
    return buffer


def stored(buffer):
    """A copy of everything that adding steps changes."""
    names = (*ARGUMENTS, "initial_hidden_h", "initial_hidden_c", "step_counts")
    return {name: getattr(buffer, name).clone() for name in names}


def assert_same(a, b):
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=0, equal_nan=True, msg=name)


@st.composite
def ragged_flags(draw):
    """Counts of some envs, and flags `[N, T]` that are set past the counts as well."""
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    max_steps = draw(st.integers(1, 6))
    counts = draw(st.lists(st.integers(0, max_steps), min_size=1, max_size=4))
    rate = draw(st.sampled_from([0.0, 0.2, 0.6]))
    size = (len(counts), max_steps)
    terminated, truncated = (torch.rand(size, generator=rng) < rate for _ in range(2))
    return counts, terminated, truncated


# -- storing ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_every_way_to_write_stores_each_step_in_its_envs_next_row(space, ragged):
    torch.manual_seed(0)
    num_envs, num_turns = 4, 6
    is_real = torch.rand(num_turns, num_envs) < (0.6 if ragged else 1.1)
    turns = [random_step(num_envs, space) for _ in range(num_turns)]
    rows = [
        [steps_of(turn, env) for turn, real in zip(turns, is_real, strict=True) if real[env]]
        for env in range(num_envs)
    ]
    buffers = {way: make_buffer(num_envs, num_turns, space) for way in ("add", "batch", "row")}
    first_rows = [env_rows[0] for env_rows in rows]
    initial = [torch.stack([getattr(r, f"hidden_{part}") for r in first_rows]) for part in "hc"]
    buffers["row"].set_initial_state(*initial)

    for turn, real in zip(turns, is_real, strict=True):
        envs = real.nonzero().squeeze(1)
        for env in reversed(envs.tolist()):
            buffers["add"].add(env, steps_of(turn, env))
        buffers["batch"].add_batch(steps_of(turn, envs), None if real.all() else envs)
        row = buffers["row"].row()
        for name, view in row._asdict().items():
            view.copy_(getattr(turn, ARGUMENTS[name]))
        buffers["row"].commit(row, real)

    for way, buffer in buffers.items():
        assert buffer.step_counts.tolist() == is_real.sum(dim=0).tolist(), way
        assert len(buffer) == is_real.sum()
        for env, env_rows in enumerate(rows):
            assert buffer.valid_mask[env].sum() == len(env_rows)
            assert buffer.valid_mask[env, : len(env_rows)].all()
            for name, argument in ARGUMENTS.items():
                expected = torch.stack([getattr(r, argument) for r in env_rows])
                assert torch.equal(getattr(buffer, name)[env, : len(env_rows)], expected), name
        assert torch.equal(buffer.initial_hidden_h, initial[0]), way
        assert torch.equal(buffer.initial_hidden_c, initial[1]), way
        buffer.compute_advantages_and_returns()  # conditional heads may have nothing to choose


def test_rows_and_fields_are_views_of_one_time_major_arena():
    buffer = make_buffer(num_envs=3, max_steps=5)
    storage = buffer.states.untyped_storage().data_ptr()
    row = buffer.row()
    for name in RolloutRow._fields:
        field = getattr(buffer, name)
        assert field.shape[:2] == (3, 5), name
        assert field.transpose(0, 1).is_contiguous(), name
        assert field.untyped_storage().data_ptr() == storage, name
        getattr(row, name).fill_(1)
        assert (field[:, 0] == 1).all(), name
        assert not (field[:, 1] == 1).any(), name
    buffer.commit(row)
    assert buffer.row().states.data_ptr() == buffer.states[:, 1].data_ptr()


def test_a_bootstrap_of_an_earlier_round_is_never_used():
    buffer = make_buffer(num_envs=1)
    buffer.add_batch(random_step(1, truncated=[True]))
    buffer.reset()
    row = buffer.row()
    row.masks.fill_(True)
    row.truncated.fill_(True)
    buffer.commit(row)
    with pytest.raises(ValueError, match="env 0, step 0: a bootstrap value is needed"):
        buffer.compute_advantages_and_returns()


def test_step_counts_is_one_cpu_tensor_updated_in_place():
    buffer = make_buffer()
    counts = buffer.step_counts
    address = counts.data_ptr()
    buffer.add_batch(random_step(3))
    buffer.add_batch(random_step(2), env_ids=[2, 0])
    buffer.commit(buffer.row())
    assert counts.tolist() == [3, 2, 3]
    buffer.reset()
    assert buffer.step_counts is counts
    assert counts.data_ptr() == address
    assert counts.device.type == "cpu"
    assert counts.tolist() == [0, 0, 0]


def test_stored_tensors_carry_no_graph():
    buffer = make_buffer()
    step = random_step(3)
    weight = torch.ones(1, requires_grad=True)
    live = {name: x * weight for name, x in step._asdict().items() if x.is_floating_point()}
    buffer.add_batch(step._replace(**live))
    buffer.compute_advantages_and_returns(last_values=torch.ones(3) * weight)
    buffer.normalize_advantages()
    for name, tensor in buffer.get_batched_sequences().items():
        assert not tensor.requires_grad, name


@pytest.mark.parametrize(
    ("argument", "given", "expected"),
    [
        ("reward", 1, 1.0),
        ("reward", 0.5, 0.5),
        ("reward", torch.tensor(2, dtype=torch.int32), 2.0),
        ("value", torch.tensor(1.5, dtype=torch.bfloat16), 1.5),
        ("value", torch.tensor(1.5, dtype=torch.float64), 1.5),
        ("terminated", True, True),
        ("actions", [2, 1, 0, 3], [2, 1, 0, 3]),
        ("actions", torch.tensor([2, 1, 0, 3], dtype=torch.uint8), [2, 1, 0, 3]),
    ],
)
def test_python_numbers_and_other_precisions_are_accepted(argument, given, expected):
    buffer = make_buffer()
    dtypes = {name: getattr(buffer, name).dtype for name in ARGUMENTS}
    buffer.add(1, steps_of(random_step(3), 1)._replace(**{argument: given}))
    field = next(name for name, value in ARGUMENTS.items() if value == argument)
    assert getattr(buffer, field)[1, 0].tolist() == expected
    assert {name: getattr(buffer, name).dtype for name in ARGUMENTS} == dtypes


class CountOps(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append(func.overloadpacket)
        return func(*args, **(kwargs or {}))


def test_the_number_of_operations_does_not_depend_on_the_number_of_envs():
    counts = []
    for num_envs in (3, 64):
        buffer = make_buffer(num_envs)
        step = random_step(num_envs)
        with CountOps() as ops:
            buffer.add_batch(step)
            buffer.add_batch(steps_of(step, slice(1, None)), range(1, num_envs))
            buffer.commit(buffer.row())  # of a spare row: the next rows differ
        counts.append(len(ops.calls))
    assert counts[0] == counts[1]
    assert counts[0] < 250


# -- bad input: refused, and nothing written --------------------------------------------------

STEP = random_step(2)
BAD_STEPS = {
    "short state": (dict(state=torch.zeros(2, STATE_DIM - 1)), r"state: got shape \(2, 5\), expected \(2, 6\)"),
    "actions of one head missing": (dict(actions=STEP.actions[:, :-1]), r"actions.*heads slot, blueprint, blend, op"),
    "mask too narrow": (dict(masks=STEP.masks[:, 1:]), r"masks: got shape \(2, 14\).*slot: 3, blueprint: 5"),
    "mask of integers": (dict(masks=STEP.masks.long()), "masks: got torch.int64, expected bool"),
    "float actions": (dict(actions=STEP.actions.float()), "actions: got torch.float32, expected integers"),
    "reward of flags": (dict(reward=STEP.terminated), "reward: got torch.bool, expected numbers"),
    "integer flag": (dict(truncated=torch.zeros(2, dtype=torch.long)), "truncated.*bool"),
    "value with an extra axis": (dict(value=torch.zeros(2, 1)), r"value: got shape \(2, 1\)"),
    "another device kind": (dict(state=STEP.state.to("meta")), "state is on meta, the buffer on cpu"),
    "hidden state of one layer": (dict(hidden_c=torch.zeros(2, 1, HIDDEN)), "hidden_c"),
    "pictures as floats": (dict(frames=torch.zeros(2, FRAME)), "frames: got torch.float32, expected torch.uint8, 0 to 255"),
    "pictures of another size": (dict(frames=STEP.frames[:, 1:]), r"frames: got shape \(2, 11\), expected \(2, 12\) = \[envs, P\], bytes"),
    "no pictures": (dict(frames=None), "frames: got NoneType"),
    "state of three envs, layers first": (dict(hidden_h=torch.zeros(LAYERS, 3, HIDDEN)), r"hidden_h: got shape \(2, 3, 4\), expected \(2, 2, 4\)"),
    "no bootstrap shape": (dict(bootstrap_value=torch.zeros(3)), "bootstrap_value"),
    "no reward": (dict(reward=None), "reward: got NoneType, expected a tensor or numbers"),
    "text for actions": (dict(actions="wait"), "actions: got str"),
    "ragged state": (dict(state=[[1.0], [1.0, 2.0]]), "state: got list"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD_STEPS.values(), ids=BAD_STEPS)
def test_a_bad_step_is_refused_and_nothing_is_written(change, message):
    buffer = make_buffer()
    buffer.add_batch(random_step(3))
    before = stored(buffer)
    with pytest.raises(ValueError, match=message):
        buffer.add_batch(STEP._replace(**change), env_ids=[0, 1])
    assert_same(before, stored(buffer))


@pytest.mark.parametrize(
    ("env_ids", "message"),
    [
        ([0, 3], r"env_ids \[3\] are out of range for num_envs=3"),
        ([-1, 0], r"env_ids \[-1\]"),
        ([1, 1], r"env_ids \[1\] appear more than once"),
        ([0.0, 1.0], "integers"),
        (torch.zeros(2, 1, dtype=torch.long), r"\(2, 1\)"),
        ([0, 1, 2], r"state: got shape \(2, 6\), expected \(3, 6\)"),
        ({0, 1}, "env_ids: got set, expected a tensor or numbers"),
        ("01", "env_ids: got str"),
    ],
)
def test_bad_env_ids_are_refused_and_nothing_is_written(env_ids, message):
    buffer = make_buffer()
    before = stored(buffer)
    with pytest.raises(ValueError, match=message):
        buffer.add_batch(STEP, env_ids=env_ids)
    assert_same(before, stored(buffer))


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("part", ["hidden_h", "hidden_c"])
def test_a_recurrent_state_of_one_env_has_no_axis_for_envs(layers, part):
    """torch returns [layers, envs, hidden]: with one env, or as many envs as layers, it may fit."""
    buffer = TamiyoRolloutBuffer(layers, 2, STATE_DIM, SPACE, HIDDEN, layers)
    state = torch.zeros(layers, HIDDEN)
    step = steps_of(random_step(1), 0)._replace(hidden_h=state, hidden_c=state, frames=None)
    for wrong in (state[:, None], state[None], state[:, None].expand(layers, layers, HIDDEN)):
        with pytest.raises(ValueError, match=rf"{part}: got shape .*\[envs, L, h\]"):
            buffer.add(0, step._replace(**{part: wrong}))
    buffer.add(0, step)
    assert len(buffer) == 1


def test_a_full_env_is_refused_for_the_whole_batch():
    buffer = make_buffer(max_steps=1)
    buffer.add(2, steps_of(STEP, 0))
    before = stored(buffer)
    for write in (
        lambda: buffer.add_batch(random_step(3)),
        lambda: buffer.commit(buffer.row()),
    ):
        with pytest.raises(ValueError, match=r"envs \[2\] already hold max_steps_per_env=1"):
            write()
        assert_same(before, stored(buffer))
    buffer.commit(buffer.row(), torch.tensor([True, True, False]))
    with pytest.raises(ValueError, match=r"envs \[0, 1, 2\] already hold.*reset"):
        buffer.row()


@pytest.mark.parametrize("frame_size", [0, FRAME])
def test_without_pictures_or_numbers_a_rollout_has_a_field_of_width_0(frame_size):
    state_dim = 0 if frame_size else STATE_DIM
    sizes = dict(lstm_hidden_dim=HIDDEN, lstm_layers=LAYERS, frame_size=frame_size)
    buffer = TamiyoRolloutBuffer(2, 3, state_dim, SPACE, **sizes)
    given = {} if frame_size else {"frames": None}
    steps = [random_step(2, state=torch.randn(2, state_dim), **given) for _ in range(3)]
    for step in steps[:2]:
        buffer.add_batch(step)
    buffer.add(1, steps_of(steps[2], 1))
    row = buffer.row()  # a spare row: the next rows differ
    row.masks.fill_(True)
    row.frames.fill_(7)
    buffer.commit(row, torch.tensor([True, False]))
    buffer.compute_advantages_and_returns(torch.zeros(2))
    rollout = buffer.rollout()
    assert rollout.states.shape == (3, 2, state_dim)
    assert rollout.frames.shape == (3, 2, frame_size)
    assert rollout.frames.dtype == torch.uint8
    if frame_size:
        assert torch.equal(rollout.frames[1], steps[1].frames)
        assert torch.equal(rollout.frames[2, 1], steps[2].frames[1])
        assert (rollout.frames[2, 0] == 7).all()
    buffer.reset()
    with pytest.raises(ValueError, match="frames: got shape"):
        buffer.add_batch(steps[0]._replace(frames=torch.zeros(2, 5, dtype=torch.uint8)))


def test_pictures_take_a_quarter_of_the_memory_of_floats():
    pixels = 84 * 84 * 4
    sizes = [dict(state_dim=pixels), dict(state_dim=0, frame_size=pixels)]
    as_floats, as_bytes = (
        TamiyoRolloutBuffer(4, 8, action_space=SPACE, **size).states.untyped_storage().nbytes()
        for size in sizes
    )
    assert as_bytes == pytest.approx(as_floats / 4, rel=0.01)


@pytest.mark.parametrize("size", ["num_envs", "max_steps_per_env", "state_dim", "lstm_hidden_dim", "lstm_layers"])  # fmt: skip
def test_sizes_below_one_are_refused(size):
    sizes = dict(num_envs=1, max_steps_per_env=1, state_dim=1, lstm_hidden_dim=1, lstm_layers=1)
    with pytest.raises(ValueError, match=f"{size}=0"):
        TamiyoRolloutBuffer(**(sizes | {size: 0}), action_space=SPACE)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (torch.tensor([1, 99, 1]), r"step_counts\[1\] is 99; expected 0 to 5"),
        (torch.tensor([-1, 1, 1]), r"step_counts\[0\] is -1; expected 0 to 5"),
        (torch.ones(4, dtype=torch.int64), r"torch.int64 \(4,\) on cpu; expected .* \(3,\)"),
        (torch.ones(3, dtype=torch.int32), "torch.int32"),
        ([1, 1, 1], "step_counts is a list"),
    ],
)
def test_step_counts_that_were_tampered_with_are_reported(counts, message):
    for read in (
        lambda b: b.compute_advantages_and_returns(),
        lambda b: b.mark_terminal_with_penalty(1, -1.0),
        lambda b: b.rollout(),
    ):
        buffer = make_buffer()
        buffer.add_batch(random_step(3))
        buffer.compute_advantages_and_returns()
        buffer.step_counts = counts
        with pytest.raises(ValueError, match=f"{message}.*only through add and reset"):
            read(buffer)


# -- bad values: found before learning, in one pass -------------------------------------------


BAD_VALUES = [  # of a step: the argument, the part of it, the value
    *(("reward", ..., x, "the reward is not finite") for x in (torch.nan, torch.inf)),
    *(("value", ..., x, "the value is not finite") for x in (torch.nan, torch.inf)),
    ("state", -1, torch.nan, "the state is not finite"),
    ("log_probs", -1, torch.nan, "head .*: the log-prob is not finite, .*"),
    *(
        ("masks", part, False, f"head '{name}' has no legal choice")
        for name, part in zip(SPACE.names, SPACE.slices, strict=True)
    ),
]


@pytest.mark.parametrize(("argument", "part", "bad", "reason"), BAD_VALUES)
def test_a_bad_value_is_reported_with_env_and_step(argument, part, bad, reason):
    buffer = make_buffer()
    for t in range(3):
        step = random_step(3)
        if t == 1:
            getattr(step, argument)[2][part] = bad
        buffer.add_batch(step)
    with pytest.raises(ValueError, match=f"rollout: env 2, step 1: {reason}$"):
        buffer.compute_advantages_and_returns()


@pytest.mark.parametrize("part", ["hidden_h", "hidden_c"])
@pytest.mark.parametrize(
    ("end", "value", "is_right"),
    [
        ("terminated", 0.0, True),
        ("terminated", 0.1, False),
        ("truncated", 0.1, False),
        (None, 0.1, True),
        (None, torch.nan, False),
    ],
)
def test_a_recurrent_state_is_finite_and_zero_after_an_episodes_end(part, end, value, is_right):
    buffer = make_buffer(num_envs=2)
    buffer.add_batch(random_step(2, **({end: [False, True]} if end else {})))
    state = {name: torch.zeros(2, LAYERS, HIDDEN) for name in ("hidden_h", "hidden_c")}
    state[part][1, -1, -1] = value
    buffer.add_batch(random_step(2, **state))
    buffer.add_batch(random_step(2))
    if is_right:
        buffer.compute_advantages_and_returns()
        return
    with pytest.raises(ValueError, match="env 1, step 1: the recurrent.*not reset.*zero"):
        buffer.compute_advantages_and_returns()
    buffer.reset()
    for _ in range(2):
        row = buffer.row()
        row.masks.fill_(True)
        row.bootstrap_values.fill_(0.0)
        buffer.commit(row)
    buffer.compute_advantages_and_returns()


def test_layers_and_envs_swapped_are_found_at_an_episodes_end():
    """[L, N, hidden], as torch returns it, has the shape of [N, L, hidden] if N equals L."""
    buffer = make_buffer(num_envs=LAYERS)
    buffer.add_batch(random_step(LAYERS, terminated=[True] + [False] * (LAYERS - 1)))
    state = torch.rand(LAYERS, LAYERS, HIDDEN)
    state[0] = 0.0  # env 0 starts an episode
    swapped = state.transpose(0, 1)
    buffer.add_batch(random_step(LAYERS, hidden_h=swapped, hidden_c=swapped))
    with pytest.raises(ValueError, match=r"env 0, step 1: the recurrent state.*\[envs, layers"):
        buffer.compute_advantages_and_returns()


# -- advantages -------------------------------------------------------------------------------


def fill_worked_case(buffer, env):
    """Episode A is truncated after three rows with V(final) = 7; B, three rows, still runs."""
    rewards = (1.0, 2.0, 3.0, 10.0, 20.0, 30.0)
    values = (1.0, 1.5, 2.0, 40.0, 41.0, 42.0)
    for t, (reward, value) in enumerate(zip(rewards, values, strict=True)):
        ends = t == 2
        step = random_step(1, reward=[reward], value=[value], truncated=[ends], **NO_STATE)
        step = step._replace(bootstrap_value=torch.tensor([7.0]) if ends else None)
        buffer.add_batch(step, [env])


def test_a_truncated_episode_is_worked_out_by_hand():
    buffer = make_buffer(num_envs=2, max_steps=8)
    fill_worked_case(buffer, env=1)
    buffer.compute_advantages_and_returns(torch.tensor([torch.nan, 50.0]), 0.9, 0.8)
    expected = torch.tensor([6.790, 7.556, 7.300, 36.103, 40.560, 33.000, 0, 0])
    torch.testing.assert_close(buffer.advantages[1], expected, rtol=0, atol=1e-3)
    assert torch.equal(buffer.returns[1, :6], (buffer.advantages + buffer.values)[1, :6])
    assert not buffer.advantages[0].any()


@pytest.mark.parametrize(
    ("terminated", "truncated", "expected"),
    [
        (False, True, 1 + 0.5 * 10),  # a limit: V of the final observation follows
        (True, False, 1),  # the task ended: nothing follows
        (True, True, 1),  # terminated wins
        (False, False, 1 + 0.5 * 99),  # still running: what followed the rollout
    ],
)
def test_termination_drops_the_bootstrap_and_truncation_uses_it(terminated, truncated, expected):
    buffer = make_buffer(num_envs=1)
    step = random_step(1, value=[0.0], reward=[1.0], bootstrap_value=[10.0],
                       terminated=[terminated], truncated=[truncated])  # fmt: skip
    buffer.add_batch(step)
    buffer.compute_advantages_and_returns(torch.tensor([99.0]), gamma=0.5)
    assert buffer.returns[0, 0] == expected
    kept = 99.0 if expected == 1 + 0.5 * 99 else 10.0
    assert buffer.bootstrap_values[0, 0] == kept


def test_defaults_are_the_constants():
    assert (DEFAULT_GAMMA, DEFAULT_GAE_LAMBDA) == (0.995, 0.97)
    assert (PPOConfig().gamma, PPOConfig().gae_lambda) == (0.995, 0.97)
    buffer = make_buffer(num_envs=1, max_steps=6)
    fill_worked_case(buffer, env=0)
    buffer.compute_advantages_and_returns(torch.tensor([50.0]))
    by_default = buffer.advantages.clone()
    buffer.compute_advantages_and_returns(torch.tensor([50.0]), gamma=0.995, gae_lambda=0.97)
    assert torch.equal(by_default, buffer.advantages)
    buffer.compute_advantages_and_returns(torch.tensor([50.0]), gamma=0.995, gae_lambda=0.95)
    assert not torch.equal(by_default, buffer.advantages)


def test_a_needed_bootstrap_that_was_never_given_is_an_error():
    buffer = make_buffer(num_envs=2)
    buffer.add_batch(random_step(2, bootstrap_value=None, truncated=[False, True]))
    buffer.add_batch(random_step(1, bootstrap_value=None, **NO_STATE), [1])
    needed = "a bootstrap value is needed"
    with pytest.raises(ValueError, match=f"env 0, step 0: {needed}.*env 1, step 0.*env 1, step 1"):
        buffer.compute_advantages_and_returns()
    with pytest.raises(ValueError, match=f"rollout: env 1, step 0: {needed}[^;]*$"):
        buffer.compute_advantages_and_returns(last_values=torch.zeros(2))  # of rows that still run


@pytest.mark.parametrize("shape", [(3,), (2, 1), ()])
def test_last_values_of_the_wrong_shape_are_refused(shape):
    buffer = make_buffer(num_envs=2)
    buffer.add_batch(random_step(2))
    with pytest.raises(ValueError, match="last_values: got shape"):
        buffer.compute_advantages_and_returns(last_values=torch.zeros(shape))


@given(st.lists(st.integers(0, 4), min_size=3, max_size=3))
def test_normalisation_is_over_stored_rows_only_and_idempotent(counts):
    buffer = filled(counts)
    buffer.compute_advantages_and_returns()
    raw = [buffer.advantages[env, :count].double() for env, count in enumerate(counts)]
    statistics = buffer.normalize_advantages()
    once = buffer.advantages.clone()
    if sum(counts) > 1:
        rows = torch.cat(raw)
        mean, std = rows.mean(), rows.std(correction=0)
        torch.testing.assert_close(statistics.mean.double(), mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(statistics.std.double(), std, rtol=1e-4, atol=1e-5)
        for env, count in enumerate(counts):
            expected = ((raw[env] - mean) / std).float()
            torch.testing.assert_close(once[env, :count], expected, rtol=1e-3, atol=1e-4)
    assert not once[~buffer.valid_mask].any()
    assert buffer.normalize_advantages() is statistics
    assert torch.equal(buffer.advantages, once)
    buffer.compute_advantages_and_returns()
    buffer.normalize_advantages()
    assert torch.equal(buffer.advantages, once)


@pytest.mark.parametrize("reward", [1.0, 3.3333, 1000.1])
def test_equal_advantages_normalise_to_zero(reward):
    buffer = make_buffer()
    rewards = torch.full((3,), reward)
    buffer.add_batch(
        random_step(3, reward=rewards, value=torch.zeros(3), terminated=[True, True, True])
    )
    buffer.compute_advantages_and_returns()
    assert buffer.normalize_advantages().std > 0
    assert buffer.advantages.abs().max() < 1e-4


READERS = {
    "advantages": lambda b: b.advantages,
    "returns": lambda b: b.returns,
    "normalize_advantages": lambda b: b.normalize_advantages(),
    "get_batched_sequences": lambda b: b.get_batched_sequences(),
    "rollout": lambda b: b.rollout(),
}
CHANGES = {
    "add_batch": lambda b: b.add_batch(random_step(3)),
    "commit": lambda b: b.commit(b.row()),
    "penalty": lambda b: b.mark_terminal_with_penalty(0, -1.0),
    "reset": lambda b: b.reset(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_advantages_of_an_older_rollout_are_never_handed_out(read, change):
    buffer = make_buffer()
    with pytest.raises(ValueError, match="call compute_advantages_and_returns"):
        read(buffer)
    buffer.add_batch(random_step(3))
    buffer.compute_advantages_and_returns()
    read(buffer)
    change(buffer)
    with pytest.raises(ValueError, match="call compute_advantages_and_returns"):
        read(buffer)


# -- episodes ---------------------------------------------------------------------------------


@given(ragged_flags())
def test_boundaries_are_those_of_a_loop_over_the_flags(rollout):
    counts, terminated, truncated = rollout
    expected = []
    for env, count in enumerate(counts):
        first = 0
        for t in range(count):
            if terminated[env, t] or truncated[env, t]:
                expected.append([env, first, t + 1])
                first = t + 1
    buffer = filled(counts, terminated, truncated)
    assert buffer.episode_boundaries.tolist() == expected
    assert buffer.episode_boundaries.shape == (len(expected), 3)


def test_a_penalty_terminates_the_episode_and_replaces_the_reward():
    buffer = make_buffer(num_envs=3)
    for t in range(3):  # env 2 is truncated: the penalty wins
        ended = [False, False, t == 2]
        buffer.add_batch(random_step(3, truncated=ended, bootstrap_value=torch.full((3,), 9.0)))
    others = buffer.rewards.clone()
    for env in (0, 2):
        buffer.mark_terminal_with_penalty(env, -0.5)
    buffer.compute_advantages_and_returns(last_values=torch.tensor([torch.nan, 1.0, torch.nan]))
    assert buffer.rewards[[0, 2], 2].tolist() == [-0.5, -0.5]
    torch.testing.assert_close(buffer.returns[[0, 2], 2], torch.tensor([-0.5, -0.5]))
    assert buffer.terminated[[0, 2], 2].all()
    assert not buffer.truncated.any()
    assert buffer.episode_boundaries.tolist() == [[0, 0, 3], [2, 0, 3]]
    buffer.rewards[[0, 2], 2] = others[[0, 2], 2]
    assert torch.equal(buffer.rewards, others)


@pytest.mark.parametrize(
    ("env", "penalty", "message"),
    [
        (1, -0.5, "env 1 has no stored step"),
        (3, -0.5, r"env_ids \[3\] are out of range"),
        (0, float("nan"), "penalty=nan for env 0; use a finite number"),
        (0, float("inf"), "penalty=inf for env 0"),
    ],
)
def test_a_penalty_needs_a_step_and_a_finite_number(env, penalty, message):
    buffer = filled([1, 0, 0])
    before = stored(buffer)
    with pytest.raises(ValueError, match=message):
        buffer.mark_terminal_with_penalty(env, penalty)
    assert_same(before, stored(buffer))


def test_reset_keeps_the_storage_and_forgets_the_rollout():
    buffer = filled([2, 2], terminated=torch.ones(2, 2, dtype=torch.bool))
    states = buffer.states.clone()
    address = buffer.states.data_ptr()
    buffer.reset()
    assert len(buffer) == len(buffer.episode_boundaries) == buffer.valid_mask.sum() == 0
    assert torch.equal(buffer.states, states)  # nothing was zeroed
    assert buffer.states.data_ptr() == address
    step = random_step(2)  # the flags of the row before are those of an earlier round
    buffer.add_batch(step)
    buffer.compute_advantages_and_returns()
    assert torch.equal(buffer.initial_hidden_h, step.hidden_h)


# -- what learning reads ----------------------------------------------------------------------


def test_batched_sequences_are_views_of_the_storage():
    buffer = filled([3, 2, 2], max_steps=5)
    buffer.compute_advantages_and_returns()
    batch = buffer.get_batched_sequences()
    by_step = dict.fromkeys([*ARGUMENTS, "advantages", "returns"], (3, 5))
    by_step["states"] += (STATE_DIM,)
    by_step["frames"] += (FRAME,)
    by_step["masks"] += (SPACE.num_choices,)
    for name in ("actions", "log_probs"):
        by_step[name] += (SPACE.num_heads,)
    initial = dict.fromkeys(["initial_hidden_h", "initial_hidden_c"], (3, LAYERS, HIDDEN))
    for name, shape in (by_step | initial).items():
        field = getattr(buffer, name)
        assert batch[name].shape == shape, name
        assert batch[name].dtype == field.dtype, name
        assert batch[name].data_ptr() == field.data_ptr(), name
        assert batch[name].stride() == field.stride(), name
    assert batch["valid_mask"].tolist() == [[t < count for t in range(5)] for count in (3, 2, 2)]
    assert batch.keys() == {*by_step, *initial, "valid_mask"}


def tensors_of(moved):
    """The tensors of a `Rollout`, or of batched sequences, by name."""
    items = moved if isinstance(moved, dict) else vars(moved)
    return {name: x for name, x in items.items() if isinstance(x, torch.Tensor)}


@pytest.mark.parametrize("method", ["get_batched_sequences", "rollout"])
def test_all_fields_move_to_another_device_in_one_copy(method):
    buffer = filled([3, 1, 2], max_steps=4)
    buffer.compute_advantages_and_returns()
    move = getattr(buffer, method)
    with CountOps() as ops:
        here = tensors_of(move("cpu"))
    assert torch.ops.aten._to_copy not in ops.calls
    assert here["states"].data_ptr() == buffer.states.data_ptr()
    with CountOps() as ops:  # the meta device stands for a GPU: same path, no data
        there = tensors_of(move("meta"))
    assert ops.calls.count(torch.ops.aten._to_copy) == 1
    for name, tensor in there.items():
        assert tensor.device.type == "meta", name
        assert tensor.shape == here[name].shape
        assert tensor.dtype == here[name].dtype


@given(ragged_flags())
def test_a_rollout_is_cut_to_the_longest_row_and_says_where_episodes_start(rollout):
    counts, terminated, truncated = rollout
    num_steps = max(counts)
    buffer = filled(counts, terminated, truncated)
    buffer.compute_advantages_and_returns()
    learned = buffer.rollout()
    assert learned.is_full == (min(counts) == num_steps)
    assert torch.equal(learned.initial_h, buffer.initial_hidden_h)
    for name in ("valid", "starts"):
        assert getattr(learned, name).shape == (num_steps, len(counts))
    stored_rows = []
    for t in range(num_steps):
        for env, count in enumerate(counts):
            assert learned.valid[t, env] == (t < count)
            follows_end = t > 0 and terminated[env, t - 1] | truncated[env, t - 1]
            assert learned.starts[t, env] == (t < count and follows_end)
            if t < count:
                stored_rows.append((t, env))
    for name in {*LEARNED_FROM} - {"valid", "starts", "targets"}:
        field = getattr(learned, name)
        assert field.is_contiguous()
        assert torch.equal(field, getattr(buffer, name)[:, :num_steps].transpose(0, 1)), name
        expected = [field[place] for place in stored_rows]
        assert learned.stored(field).tolist() == [x.tolist() for x in expected]


def test_a_minibatch_has_all_rows_of_its_envs():
    buffer = filled([4, 2, 1, 1])
    buffer.set_initial_state(*torch.rand(2, 4, LAYERS, HIDDEN))
    buffer.compute_advantages_and_returns()
    rollout = buffer.rollout()
    envs = torch.tensor([3, 1])
    minibatch = rollout.of_envs(envs)
    for name, tensor in tensors_of(rollout).items():
        axis = 0 if name.startswith("initial") else 1
        assert torch.equal(getattr(minibatch, name), tensor.index_select(axis, envs)), name
    expected = torch.cat([buffer.values[3, :1], buffer.values[1, :2]])
    assert torch.equal(minibatch.stored(minibatch.values), expected)


# -- empty rows -------------------------------------------------------------------------------


def spoil_empty_rows(buffer, flag):
    """NaN in every field of every row past `step_counts`; where none fits, a wrong action or flag."""
    bad = {torch.float32: torch.nan, torch.int64: -(2**40), torch.bool: flag, torch.uint8: 255}
    for name in ARGUMENTS:
        field = getattr(buffer, name)
        field[~buffer.valid_mask] = bad[field.dtype]


@pytest.mark.parametrize("flag", [False, True])
@given(ragged_flags())
def test_whatever_empty_rows_hold_changes_nothing(flag, flags):
    results = []
    for is_spoilt in (False, True):
        torch.manual_seed(0)
        buffer = filled(*flags)
        if is_spoilt:
            spoil_empty_rows(buffer, flag)
        buffer.compute_advantages_and_returns()
        raw = {"raw": buffer.advantages.clone(), "boundaries": buffer.episode_boundaries}
        statistics = buffer.normalize_advantages()._asdict()
        results.append(raw | statistics | tensors_of(buffer.rollout()))
    clean, spoilt = results
    assert_same(clean, spoilt)
    for name in LEARNED_FROM:
        assert not spoilt[name][~clean["valid"]].any(), name


# -- compilers --------------------------------------------------------------------------------


def test_a_compiled_caller_runs():
    buffer = make_buffer()
    buffer.add_batch(random_step(3))
    compiled = []

    def keep_calls(graph, inputs):
        compiled.extend(node.target for node in graph.graph.nodes if "call" in node.op)
        return graph.forward

    @torch.compile(backend=keep_calls)
    def learn(scale):
        buffer.compute_advantages_and_returns(gamma=0.5)
        batch, rollout = buffer.get_batched_sequences(), buffer.rollout()
        return batch["advantages"] * scale * len(rollout.initial_h)

    assert torch.equal(learn(torch.tensor(2.0)), buffer.advantages * 2 * 3)
    assert set(compiled) <= {operator.mul}  # the methods themselves are not traced


# -- on a GPU ---------------------------------------------------------------------------------


@pytest.mark.gpu
def test_collecting_on_a_gpu_never_waits_and_equals_the_cpu():
    torch.manual_seed(0)
    steps = [random_step(3, truncated=[t == 1, False, False]) for t in range(4)]
    for hidden in (steps[2].hidden_h, steps[2].hidden_c):
        hidden[0] = 0.0  # the first step of an episode
    buffers = [make_buffer(device=device) for device in ("cpu", "cuda")]
    for step in steps:
        buffers[0].add_batch(step)
    on_gpu = [TamiyoRolloutStep(*(x.cuda() for x in step)) for step in steps]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in on_gpu[:2]:
            buffers[1].add_batch(step)
        for step in on_gpu[2:]:
            row = buffers[1].row()
            for name, view in row._asdict().items():
                view.copy_(getattr(step, ARGUMENTS[name]))
            buffers[1].commit(row)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for buffer in buffers:
        buffer.compute_advantages_and_returns()
        buffer.normalize_advantages()
    for method in ("get_batched_sequences", "rollout"):
        expected = tensors_of(getattr(buffers[0], method)())
        there = tensors_of(getattr(buffers[1], method)("cpu"))
        moved = tensors_of(getattr(buffers[0], method)("cuda"))
        for name, tensor in expected.items():
            torch.testing.assert_close(there[name], tensor, equal_nan=True, msg=name)
            exactly = dict(rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(moved[name].cpu(), tensor, **exactly, msg=name)
    assert buffers[1].rollout("cuda").states.data_ptr() == buffers[1].states.data_ptr()


@pytest.mark.gpu
def test_bad_values_on_a_gpu_are_found_once_per_rollout():
    buffer = make_buffer(device="cuda")
    masks = torch.ones(3, SPACE.num_choices, dtype=torch.bool)
    SPACE.view(masks, "op")[1] = False
    buffer.add_batch(random_step(3, masks=masks, reward=[0.0, 0.0, torch.nan]))
    with pytest.raises(ValueError, match="env 1, step 0: head 'op'.*env 2, step 0: the reward"):
        buffer.compute_advantages_and_returns()

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
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer, TamiyoRolloutStep

STATE_DIM, LAYERS, HIDDEN = 6, 2, 4
SPACES = {"audit": audit_action_space(), "tamiyo": tamiyo_action_space(3, 5)}


def make_buffer(num_envs=3, max_steps=5, space=SPACES["tamiyo"], device="cpu"):
    return TamiyoRolloutBuffer(num_envs, max_steps, STATE_DIM, space, HIDDEN, LAYERS, device)


def random_step(space, num_envs, *, terminated=None, truncated=None, bootstrap=0.0, **given_fields):
    """A step of random content for a batch, with masks that differ per row."""
    masks = torch.rand(num_envs, space.num_choices) < 0.5
    for head in space.unconditional:  # at least one legal choice, in a place that differs
        start = space.slices[head].start
        masks[torch.arange(num_envs), start + torch.randint(space.sizes[head], (num_envs,))] = True
    none = torch.zeros(num_envs, dtype=torch.bool)
    values = dict(
        state=torch.randn(num_envs, STATE_DIM),
        actions=torch.stack([torch.randint(size, (num_envs,)) for size in space.sizes], dim=1),
        log_probs=-torch.rand(num_envs, space.num_heads),
        masks=masks,
        value=torch.randn(num_envs),
        reward=torch.randn(num_envs),
        terminated=none if terminated is None else torch.tensor(terminated),
        truncated=none if truncated is None else torch.tensor(truncated),
        bootstrap_value=None if bootstrap is None else torch.full((num_envs,), bootstrap),
        hidden_h=torch.randn(num_envs, LAYERS, HIDDEN),
        hidden_c=torch.randn(num_envs, LAYERS, HIDDEN),
    )
    return TamiyoRolloutStep(**(values | given_fields))


def row_of(step, i):
    return TamiyoRolloutStep(*(None if x is None else x[i] for x in step))


def stored(buffer):
    """A copy of everything the buffer holds."""
    fields = {name: view.clone() for name, view in buffer.fields.items()}
    return fields | {"step_counts": buffer.step_counts.clone()}


def assert_same_storage(a, b):
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=0, equal_nan=True, msg=name)


# -- storing ----------------------------------------------------------------------------------


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_a_batch_comes_back_as_it_went_in(space):
    buffer = make_buffer(space=space)
    steps = [random_step(space, 3) for _ in range(5)]
    for step in steps:
        buffer.add_batch(step)
    buffer.compute_advantages_and_returns()
    batch = buffer.get_batched_sequences()
    names = dict(states="state", actions="actions", log_probs="log_probs", masks="masks",
                 values="value", rewards="reward", terminated="terminated", truncated="truncated",
                 bootstrap_values="bootstrap_value", hidden_h="hidden_h", hidden_c="hidden_c")  # fmt: skip
    for field, argument in names.items():
        expected = torch.stack([getattr(step, argument) for step in steps], dim=1)
        assert torch.equal(getattr(buffer, field), expected), field
        if field in vars(batch):
            assert torch.equal(getattr(batch, field), expected), field
    assert torch.equal(batch.initial_hidden_h, steps[0].hidden_h)
    assert torch.equal(batch.initial_hidden_c, steps[0].hidden_c)
    assert batch.valid_mask.all()
    assert len(buffer) == 15


def test_add_is_add_batch_with_one_env():
    one, many = make_buffer(), make_buffer()
    for _ in range(3):
        step = random_step(one.action_space, 3)
        many.add_batch(step)
        for env in (2, 0, 1):
            one.add(env, row_of(step, env))
    assert_same_storage(stored(one), stored(many))


def test_named_envs_advance_and_the_others_do_not():
    buffer = make_buffer()
    step = random_step(buffer.action_space, 2)
    buffer.add_batch(step, env_ids=[2, 0])
    buffer.add(2, row_of(step, 1))
    assert buffer.step_counts.tolist() == [1, 0, 2]
    assert torch.equal(buffer.fields["states"][2, 0], step.state[0])
    assert torch.equal(buffer.fields["states"][0, 0], step.state[1])
    assert torch.equal(buffer.fields["states"][2, 1], step.state[1])


def test_step_counts_is_one_cpu_tensor_updated_in_place():
    buffer = make_buffer()
    counts = buffer.step_counts
    address = counts.data_ptr()
    buffer.add_batch(random_step(buffer.action_space, 3))
    buffer.add_batch(random_step(buffer.action_space, 3))
    assert counts.tolist() == [2, 2, 2]
    buffer.reset()
    assert buffer.step_counts is counts
    assert counts.data_ptr() == address
    assert counts.device.type == "cpu"
    assert counts.tolist() == [0, 0, 0]


def test_stored_tensors_carry_no_graph():
    buffer = make_buffer()
    step = random_step(buffer.action_space, 3)
    weight = torch.ones(1, requires_grad=True)
    live = {
        name: getattr(step, name) * weight
        for name in (
            "state",
            "log_probs",
            "value",
            "reward",
            "hidden_h",
            "hidden_c",
            "bootstrap_value",
        )
    }
    buffer.add_batch(step._replace(**live))
    buffer.compute_advantages_and_returns(last_values=torch.ones(3) * weight)
    buffer.normalize_advantages()
    for name, tensor in [*vars(buffer.get_batched_sequences()).items(), *buffer.fields.items()]:
        assert not tensor.requires_grad, name


def test_lower_precision_is_stored_as_float32():
    buffer = make_buffer()
    step = random_step(buffer.action_space, 3)
    buffer.add_batch(step._replace(value=step.value.bfloat16(), state=step.state.double()))
    assert torch.equal(buffer.fields["values"][:, 0], step.value.bfloat16().float())
    assert torch.equal(buffer.fields["states"][:, 0], step.state)


def test_python_numbers_do_for_one_env():
    buffer = make_buffer()
    step = row_of(random_step(buffer.action_space, 3), 0)
    buffer.add(1, step._replace(value=0.5, reward=1.0, terminated=True, truncated=False))
    assert buffer.fields["rewards"][1, 0] == 1.0
    assert buffer.fields["terminated"][1, 0]


class CountOps(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append(func.overloadpacket)
        return func(*args, **(kwargs or {}))


def test_the_number_of_operations_does_not_depend_on_the_number_of_envs():
    counts = []
    for num_envs in (2, 64):
        buffer = make_buffer(num_envs)
        step = random_step(buffer.action_space, num_envs)
        with CountOps() as ops:
            buffer.add_batch(step)
        counts.append(len(ops.calls))
    assert counts[0] == counts[1]
    assert counts[0] < 100


# -- moving --------------------------------------------------------------------------------


def test_a_move_to_another_device_is_one_copy():
    buffer = make_buffer()
    buffer.add_batch(random_step(buffer.action_space, 3))
    buffer.compute_advantages_and_returns(torch.zeros(3))
    with CountOps() as ops:
        here = buffer.get_batched_sequences("cpu")
    assert torch.ops.aten._to_copy not in ops.calls
    assert here.states.data_ptr() == buffer.fields["states"].data_ptr()
    with CountOps() as ops:  # the meta device stands for a GPU: same path, no data
        there = buffer.get_batched_sequences("meta")
    assert ops.calls.count(torch.ops.aten._to_copy) == 1
    for name, tensor in vars(there).items():
        assert tensor.device.type == "meta", name
        assert tensor.shape == getattr(here, name).shape
        assert tensor.dtype == getattr(here, name).dtype


# -- bad input: refused, and nothing written ----------------------------------------------------

SPACE = SPACES["audit"]
STEP = random_step(SPACE, 2)
BAD_STEPS = {
    "short state": (dict(state=torch.zeros(2, STATE_DIM - 1)), r"state: got shape \(2, 5\), expected \(2, 6\)"),
    "actions of one head missing": (dict(actions=STEP.actions[:, :-1]), r"actions.*heads slot, blueprint, blend, op"),
    "mask too narrow": (dict(masks=STEP.masks[:, 1:]), r"masks: got shape \(2, 14\).*slot: 3, blueprint: 5"),
    "mask of integers": (dict(masks=STEP.masks.long()), "masks: got torch.int64, expected bool"),
    "float actions": (dict(actions=STEP.actions.float()), "actions: got torch.float32, expected integers"),
    "integer reward": (dict(reward=torch.ones(2, dtype=torch.long)), "reward.*floating point"),
    "integer flag": (dict(truncated=torch.zeros(2, dtype=torch.long)), "truncated.*bool"),
    "value with an extra axis": (dict(value=torch.zeros(2, 1)), r"value: got shape \(2, 1\)"),
    "hidden state with the batch in the middle": (
        dict(hidden_h=torch.zeros(LAYERS, 2, HIDDEN).expand(2, 2, HIDDEN)[:, :1]),
        r"hidden_h: got shape \(2, 1, 4\), expected \(2, 2, 4\)",
    ),
    "another device kind": (dict(state=STEP.state.to("meta")), "state is on meta, the buffer on cpu"),
    "last field wrong": (dict(hidden_c=torch.zeros(2, 1, HIDDEN)), "hidden_c"),
    "no bootstrap shape": (dict(bootstrap_value=torch.zeros(3)), "bootstrap_value"),
    "no reward": (dict(reward=None), "reward: got NoneType, expected a tensor or numbers"),
    "text for actions": (dict(actions="wait"), "actions: got str"),
    "a set of values": (dict(value={0.5, 1.5}), "value: got set"),
    "ragged state": (dict(state=[[1.0], [1.0, 2.0]]), "state: got list"),
}  # fmt: skip
ONE_ENV = row_of(STEP, 0)


@pytest.mark.parametrize(("change", "message"), BAD_STEPS.values(), ids=BAD_STEPS)
def test_a_bad_step_is_refused_and_nothing_is_written(change, message):
    buffer = make_buffer(space=SPACE)
    buffer.add_batch(random_step(SPACE, 3))
    before = stored(buffer)
    with pytest.raises(ValueError, match=message):
        buffer.add_batch(STEP._replace(**change), env_ids=[0, 1])
    assert_same_storage(before, stored(buffer))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(state=None), "state: got NoneType"),
        (dict(reward="1"), "reward: got str"),
    ],
)
def test_a_bad_step_of_one_env_is_refused_and_nothing_is_written(change, message):
    buffer = make_buffer(space=SPACE)
    before = stored(buffer)
    with pytest.raises(ValueError, match=message):
        buffer.add(0, ONE_ENV._replace(**change))
    assert_same_storage(before, stored(buffer))


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
        ([0, None], "env_ids: got list"),
    ],
)
def test_bad_env_ids_are_refused_and_nothing_is_written(env_ids, message):
    buffer = make_buffer(space=SPACE)
    before = stored(buffer)
    with pytest.raises(ValueError, match=message):
        buffer.add_batch(STEP, env_ids=env_ids)
    assert_same_storage(before, stored(buffer))


def test_a_full_row_is_refused_for_the_whole_batch():
    buffer = make_buffer(max_steps=1, space=SPACE)
    buffer.add(2, row_of(STEP, 0))
    before = stored(buffer)
    with pytest.raises(ValueError, match=r"envs \[2\] already hold max_steps_per_env=1"):
        buffer.add_batch(random_step(SPACE, 3))
    assert_same_storage(before, stored(buffer))


@pytest.mark.parametrize("head", SPACE.names)
def test_an_unconditional_head_without_a_legal_choice_is_reported(head):
    buffer = make_buffer(space=SPACE)
    masks = torch.ones(2, SPACE.num_choices, dtype=torch.bool)
    SPACE.view(masks, head)[1] = False
    buffer.add_batch(STEP, env_ids=[0, 2])
    buffer.add_batch(STEP._replace(masks=masks), env_ids=[0, 2])
    with pytest.raises(ValueError, match=f"env 2, step 1: head '{head}' has no legal choice"):
        buffer.compute_advantages_and_returns()


def test_a_conditional_head_may_have_nothing_to_choose():
    space = FactoredActionSpace((Head("op", 2), Head("slot", 3, given=("op",))))
    buffer = make_buffer(space=space)
    masks = torch.tensor([[True, False, False, False, False]]).expand(3, -1)
    buffer.add_batch(random_step(space, 3, masks=masks))
    assert len(buffer) == 3


@pytest.mark.parametrize("size", ["num_envs", "max_steps_per_env", "state_dim", "lstm_hidden_dim", "lstm_layers"])  # fmt: skip
def test_sizes_below_one_are_refused(size):
    sizes = dict(num_envs=1, max_steps_per_env=1, state_dim=1, lstm_hidden_dim=1, lstm_layers=1)
    with pytest.raises(ValueError, match=f"{size}=0"):
        TamiyoRolloutBuffer(**(sizes | {size: 0}), action_space=SPACE)


# -- fields by name ---------------------------------------------------------------------------


def test_fields_are_read_only_attributes():
    buffer = make_buffer(space=SPACE)
    step = random_step(SPACE, 3)
    buffer.add_batch(step)
    assert torch.equal(buffer.hidden_h[0, 0], step.hidden_h[0])
    for name in set(buffer.fields) - {"advantages", "returns"}:
        assert getattr(buffer, name) is buffer.fields[name]
    assert buffer.valid_mask.tolist() == [[True] + [False] * 4] * 3
    with pytest.raises(AttributeError, match="states"):
        buffer.states = step.state
    with pytest.raises(ValueError, match="no advantages"):
        _ = buffer.advantages
    buffer.compute_advantages_and_returns()
    assert buffer.advantages is buffer.fields["advantages"]
    assert buffer.returns is buffer.fields["returns"]


def test_a_compiled_caller_runs():
    buffer = make_buffer(space=SPACE)
    buffer.add_batch(random_step(SPACE, 3))
    compiled = []

    def keep_calls(graph, inputs):
        compiled.extend(node.target for node in graph.graph.nodes if "call" in node.op)
        return graph.forward

    @torch.compile(backend=keep_calls)
    def learn(scale):
        buffer.compute_advantages_and_returns(gamma=0.5)
        batch, layout = buffer.get_batched_sequences(), buffer.sequence_layout()
        return batch.advantages * scale * layout.num_rows

    assert torch.equal(learn(torch.tensor(2.0)), buffer.advantages * 2 * 3)
    assert set(compiled) <= {operator.mul}  # the methods themselves are not traced


# -- advantages -------------------------------------------------------------------------------


def fill_worked_case(buffer, env=0, bootstrap=7.0):
    """Two episodes in one row: the first truncated after three steps, the second still running."""
    for t, (reward, value) in enumerate(
        zip([1, 2, 3, 10, 20, 30], [1, 1.5, 2, 40, 41, 42], strict=True)
    ):
        step = random_step(buffer.action_space, 1, reward=torch.tensor([float(reward)]),
                           value=torch.tensor([float(value)]), truncated=[t == 2],
                           bootstrap=bootstrap if t == 2 else None)  # fmt: skip
        if t == 3:  # the first step of an episode
            step = step._replace(hidden_h=step.hidden_h * 0, hidden_c=step.hidden_c * 0)
        buffer.add_batch(step, [env])


def test_a_truncated_episode_is_worked_out_by_hand():
    buffer = make_buffer(num_envs=2, max_steps=8)
    fill_worked_case(buffer, env=1)
    buffer.compute_advantages_and_returns(
        torch.tensor([torch.nan, 50.0]), gamma=0.9, gae_lambda=0.8
    )
    expected = torch.tensor([6.790, 7.556, 7.300, 36.103, 40.560, 33.000, 0, 0])
    batch = buffer.get_batched_sequences()
    torch.testing.assert_close(batch.advantages[1], expected, rtol=0, atol=1e-3)
    assert torch.equal(batch.returns[1, :6], (batch.advantages + batch.values)[1, :6])
    assert not batch.advantages[0].any()
    assert batch.valid_mask.sum(dim=1).tolist() == [0, 6]


def test_termination_ignores_the_bootstrap_and_truncation_uses_it():
    buffer = make_buffer(num_envs=2, space=SPACE)
    step = random_step(SPACE, 2, value=torch.zeros(2), reward=torch.ones(2), bootstrap=10.0,
                       terminated=[True, False], truncated=[False, True])  # fmt: skip
    buffer.add_batch(step)
    buffer.compute_advantages_and_returns(torch.full((2,), 99.0), gamma=0.5)
    assert buffer.fields["returns"][:, 0].tolist() == [1.0, 6.0]


def test_defaults_are_the_constants():
    buffers = [make_buffer(num_envs=1, max_steps=6) for _ in range(2)]
    for buffer, arguments in zip(buffers, [{}, dict(gamma=0.995, gae_lambda=0.97)], strict=True):
        torch.manual_seed(0)
        fill_worked_case(buffer)
        buffer.compute_advantages_and_returns(torch.tensor([50.0]), **arguments)
    assert (DEFAULT_GAMMA, DEFAULT_GAE_LAMBDA) == (0.995, 0.97)
    assert_same_storage(stored(buffers[0]), stored(buffers[1]))


def test_a_needed_bootstrap_that_was_never_given_is_an_error():
    buffer = make_buffer(num_envs=2, space=SPACE)
    buffer.add_batch(random_step(SPACE, 2, bootstrap=None, truncated=[False, True]))
    with pytest.raises(
        ValueError, match="env 0, step 0: a bootstrap value is needed.*env 1, step 0"
    ):
        buffer.compute_advantages_and_returns()
    with pytest.raises(ValueError, match="rollout: env 1, step 0: a bootstrap value is needed"):
        buffer.compute_advantages_and_returns(
            last_values=torch.zeros(2)
        )  # env 0's row has not ended


def test_last_values_leave_the_bootstrap_of_an_ended_row_alone():
    buffer = make_buffer(num_envs=2, space=SPACE)
    buffer.add_batch(random_step(SPACE, 2, bootstrap=3.0, truncated=[False, True]))
    buffer.compute_advantages_and_returns(last_values=torch.tensor([5.0, 5.0]))
    assert buffer.fields["bootstrap_values"][:, 0].tolist() == [5.0, 3.0]


@pytest.mark.parametrize("shape", [(3,), (2, 1), ()])
def test_last_values_of_the_wrong_shape_are_refused(shape):
    buffer = make_buffer(num_envs=2, space=SPACE)
    buffer.add_batch(random_step(SPACE, 2))
    with pytest.raises(ValueError, match="last_values: got shape"):
        buffer.compute_advantages_and_returns(last_values=torch.zeros(shape))


@pytest.mark.parametrize(
    ("field", "word"),
    [
        ("rewards", "the reward"),
        ("values", "the value"),
        ("states", "the state"),
        ("log_probs", "a log-prob"),
        ("hidden_h", "the recurrent state"),
        ("hidden_c", "the recurrent state"),
    ],
)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_value_that_is_not_finite_is_reported_with_env_and_step(field, word, bad):
    buffer = make_buffer(space=SPACE)
    for _ in range(3):
        buffer.add_batch(random_step(SPACE, 3))
    buffer.fields[field][2, 1] = bad
    with pytest.raises(ValueError, match=f"env 2, step 1: {word} is not finite"):
        buffer.compute_advantages_and_returns()


def test_rows_past_the_stored_steps_may_hold_anything():
    buffer = make_buffer(space=SPACE)
    for name in ("rewards", "values", "bootstrap_values"):
        buffer.fields[name].fill_(torch.nan)
    buffer.fields["masks"].fill_(False)
    buffer.add_batch(random_step(SPACE, 1), env_ids=[1])
    buffer.compute_advantages_and_returns()
    buffer.normalize_advantages()
    assert buffer.get_batched_sequences().advantages.isfinite().all()


@given(st.lists(st.integers(0, 4), min_size=3, max_size=3), st.integers(0, 2**31))
def test_normalisation_is_over_stored_rows_only_and_idempotent(counts, rng_seed):
    torch.manual_seed(rng_seed)
    buffer = make_buffer(max_steps=4, space=SPACE)
    for t in range(4):
        envs = [env for env, count in enumerate(counts) if t < count]
        if envs:
            buffer.add_batch(random_step(SPACE, len(envs)), envs)
    buffer.compute_advantages_and_returns()
    raw = [buffer.fields["advantages"][env, :count].double() for env, count in enumerate(counts)]
    statistics = buffer.normalize_advantages()
    once = buffer.get_batched_sequences().advantages.clone()
    if sum(counts) > 1:
        rows = torch.cat(raw)
        mean, std = rows.mean(), rows.std(correction=0)
        torch.testing.assert_close(statistics.mean.double(), mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(statistics.std.double(), std, rtol=1e-4, atol=1e-5)
        for env, count in enumerate(counts):
            expected = ((raw[env] - mean) / std).float()
            torch.testing.assert_close(once[env, :count], expected, rtol=1e-3, atol=1e-4)
    assert buffer.normalize_advantages() is statistics
    assert torch.equal(buffer.get_batched_sequences().advantages, once)


@pytest.mark.parametrize("reward", [1.0, 3.3333, 1000.1])
def test_equal_advantages_normalise_to_zero(reward):
    buffer = make_buffer(space=SPACE)
    rewards = torch.full((3,), reward)
    buffer.add_batch(
        random_step(SPACE, 3, reward=rewards, value=torch.zeros(3), terminated=[True] * 3)
    )
    buffer.compute_advantages_and_returns()
    statistics = buffer.normalize_advantages()
    assert statistics.std > 0
    assert buffer.get_batched_sequences().advantages.abs().max() < 1e-4


def test_advantages_computed_anew_are_normalised_anew():
    buffer = make_buffer(space=SPACE)
    buffer.add_batch(random_step(SPACE, 3))
    results = []
    for _ in range(2):
        buffer.compute_advantages_and_returns(torch.ones(3))
        buffer.normalize_advantages()
        results.append(buffer.get_batched_sequences().advantages[:, 0].clone())
    assert torch.equal(*results)
    torch.testing.assert_close(results[1].std(correction=0), torch.tensor(1.0))


def test_advantages_of_an_older_rollout_are_never_handed_out():
    buffer = make_buffer(space=SPACE)
    for use in (buffer.normalize_advantages, buffer.get_batched_sequences):
        with pytest.raises(ValueError, match="compute_advantages_and_returns"):
            use()
    buffer.add_batch(random_step(SPACE, 3))
    buffer.compute_advantages_and_returns()
    buffer.get_batched_sequences()
    buffer.add_batch(random_step(SPACE, 3))
    with pytest.raises(ValueError, match="compute_advantages_and_returns"):
        buffer.get_batched_sequences()


# -- episodes ---------------------------------------------------------------------------------


def test_boundaries_come_from_the_flags():
    buffer = make_buffer(num_envs=2, max_steps=5, space=SPACE)
    flags = [([False, True], [False, False]), ([True, False], [False, False]),
             ([False, False], [False, True]), ([False, False], [False, False])]  # fmt: skip
    for terminated, truncated in flags:
        buffer.add_batch(random_step(SPACE, 2, terminated=terminated, truncated=truncated))
    assert buffer.episode_boundaries.tolist() == [[0, 0, 2], [1, 0, 1], [1, 1, 3]]
    layout = buffer.sequence_layout()
    assert layout.lengths.tolist() == [2, 2, 1, 2, 1]  # the pieces still running count here
    assert buffer.sequence_layout() is layout
    buffer.add_batch(random_step(SPACE, 2))
    assert buffer.sequence_layout().lengths.tolist() == [2, 3, 1, 2, 2]


@pytest.mark.parametrize("part", ["hidden_h", "hidden_c"])
@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_a_recurrent_state_that_was_not_reset_is_refused(part, end):
    buffer = make_buffer(num_envs=2, space=SPACE)
    zeros = torch.zeros(2, LAYERS, HIDDEN)
    buffer.add_batch(random_step(SPACE, 2, **{end: [False, True]}))
    state = {"hidden_h": zeros.clone(), "hidden_c": zeros.clone()}
    buffer.add_batch(random_step(SPACE, 2, **state))
    buffer.compute_advantages_and_returns()
    buffer.fields[part][1, 1, -1, -1] = 0.1
    with pytest.raises(ValueError, match="env 1, step 1: the recurrent state was not reset.*zero"):
        buffer.compute_advantages_and_returns()


def test_a_state_with_layers_and_envs_swapped_is_refused():
    """[L, N, hidden], as torch returns it, has the shape of [N, L, hidden] if N equals L."""
    buffer = make_buffer(num_envs=LAYERS, space=SPACE)
    buffer.add_batch(random_step(SPACE, LAYERS, terminated=[True] + [False] * (LAYERS - 1)))
    state = torch.rand(LAYERS, LAYERS, HIDDEN)
    state[0] = 0.0  # env 0 starts an episode
    swapped = state.transpose(0, 1)
    buffer.add_batch(random_step(SPACE, LAYERS, hidden_h=swapped, hidden_c=swapped))
    with pytest.raises(ValueError, match=r"env 0, step 1: the recurrent state.*\[envs, layers"):
        buffer.compute_advantages_and_returns()


def test_a_penalty_ends_the_episode_and_replaces_the_reward():
    buffer = make_buffer(num_envs=2, max_steps=5, space=SPACE)
    for _ in range(3):
        buffer.add_batch(random_step(SPACE, 2, bootstrap=None, truncated=[False, False]))
    others = buffer.fields["rewards"][1].clone()
    buffer.mark_terminal_with_penalty(0, -0.5)
    buffer.compute_advantages_and_returns(last_values=torch.tensor([torch.nan, 1.0]))
    batch = buffer.get_batched_sequences()
    torch.testing.assert_close(batch.returns[0, 2], torch.tensor(-0.5))
    assert batch.terminated[0].tolist() == [False, False, True, False, False]
    assert buffer.episode_boundaries.tolist() == [[0, 0, 3]]
    assert torch.equal(batch.rewards[1], others)


def test_a_penalty_wins_over_a_truncation():
    buffer = make_buffer(num_envs=1, space=SPACE)
    buffer.add_batch(random_step(SPACE, 1, truncated=[True], bootstrap=9.0))
    buffer.mark_terminal_with_penalty(0, -0.5)
    assert not buffer.fields["truncated"].any()
    buffer.compute_advantages_and_returns()
    torch.testing.assert_close(buffer.get_batched_sequences().returns[0, 0], torch.tensor(-0.5))


def test_a_penalty_for_an_env_without_rows_is_an_error():
    buffer = make_buffer(space=SPACE)
    with pytest.raises(ValueError, match="env 1 has no stored step"):
        buffer.mark_terminal_with_penalty(1, -0.5)
    with pytest.raises(ValueError, match=r"env_ids \[3\] are out of range"):
        buffer.mark_terminal_with_penalty(3, -0.5)


@pytest.mark.parametrize("penalty", [float("nan"), float("inf")])
def test_a_penalty_that_is_not_finite_is_an_error(penalty):
    buffer = make_buffer(space=SPACE)
    buffer.add_batch(random_step(SPACE, 3))
    with pytest.raises(ValueError, match=f"penalty={penalty} for env 0; use a finite number"):
        buffer.mark_terminal_with_penalty(0, penalty)


def test_reset_keeps_the_storage_and_forgets_the_rollout():
    buffer = make_buffer(space=SPACE)
    buffer.add_batch(random_step(SPACE, 3, terminated=[True] * 3))
    buffer.compute_advantages_and_returns()
    assert buffer.sequence_layout().num_rows == 3
    before = buffer.fields["states"].clone()
    buffer.reset()
    assert len(buffer) == 0
    assert len(buffer.episode_boundaries) == 0
    assert buffer.sequence_layout().num_rows == 0
    with pytest.raises(ValueError, match="compute_advantages_and_returns"):
        buffer.get_batched_sequences()
    assert torch.equal(buffer.fields["states"], before)  # nothing was zeroed
    buffer.add_batch(random_step(SPACE, 3))
    buffer.compute_advantages_and_returns()
    assert buffer.get_batched_sequences().valid_mask.sum() == 3


# -- on a GPU ---------------------------------------------------------------------------------


@pytest.mark.gpu
def test_collecting_on_a_gpu_never_waits_and_equals_the_cpu():
    torch.manual_seed(0)
    steps = [random_step(SPACE, 3, truncated=[t == 1, False, False]) for t in range(4)]
    for hidden in (steps[2].hidden_h, steps[2].hidden_c):
        hidden[0] = 0.0  # the first step of an episode
    buffers = [make_buffer(space=SPACE, device=device) for device in ("cpu", "cuda")]
    for step in steps:
        buffers[0].add_batch(step)
    on_gpu = [TamiyoRolloutStep(*(x.cuda() for x in step)) for step in steps]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in on_gpu:
            buffers[1].add_batch(step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for buffer in buffers:
        buffer.compute_advantages_and_returns()
        buffer.normalize_advantages()
    expected, there = buffers[0].get_batched_sequences(), buffers[1].get_batched_sequences("cpu")
    moved = buffers[0].get_batched_sequences("cuda")
    for name, tensor in vars(expected).items():
        torch.testing.assert_close(getattr(there, name), tensor, msg=name)
        assert torch.equal(getattr(moved, name).cpu(), tensor)
    assert (
        buffers[1].get_batched_sequences("cuda").states.data_ptr()
        == buffers[1].fields["states"].data_ptr()
    )


@pytest.mark.gpu
def test_bad_values_on_a_gpu_are_found_once_per_rollout():
    buffer = make_buffer(space=SPACE, device="cuda")
    masks = torch.ones(3, SPACE.num_choices, dtype=torch.bool)
    SPACE.view(masks, "op")[1] = False
    buffer.add_batch(random_step(SPACE, 3, masks=masks, reward=torch.tensor([0.0, 0.0, torch.nan])))
    with pytest.raises(ValueError, match="env 1, step 0: head 'op'.*env 2, step 0: the reward"):
        buffer.compute_advantages_and_returns()

"""`compute_gae` on every kernel, against the definition of GAE written out per episode."""

from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from esper.leyline.constants import DEFAULT_GAE_LAMBDA, DEFAULT_GAMMA
from esper.simic.agent.gae import available_kernels, compute_gae

NAN = float("nan")
every_kernel = pytest.mark.parametrize(
    "kernel", ["reference", "numba", pytest.param("triton", marks=pytest.mark.gpu)]
)


@dataclass(frozen=True)
class Rollout:
    """The tensor arguments of `compute_gae`, on the CPU."""

    rewards: Tensor
    values: Tensor
    terminated: Tensor
    truncated: Tensor
    bootstrap_values: Tensor
    step_counts: Tensor

    def map(self, change) -> "Rollout":
        return Rollout(*(change(getattr(self, field.name)) for field in fields(self)))

    def run(self, kernel, gamma=DEFAULT_GAMMA, gae_lambda=DEFAULT_GAE_LAMBDA):
        """Advantages and returns by a kernel, back on the CPU."""
        rollout = self.map(torch.Tensor.cuda) if kernel == "triton" else self
        *data, counts = (getattr(rollout, field.name) for field in fields(rollout))
        results = compute_gae(
            *data, step_counts=counts, gamma=gamma, gae_lambda=gae_lambda, kernel=kernel
        )
        return tuple(result.cpu() for result in results)


def random_rollout(
    num_envs, num_steps, *, rng_seed=0, dtype=torch.float32, end_rate=0.2, full=False
):
    rng = torch.Generator().manual_seed(rng_seed)
    shape = (num_envs, num_steps)
    rewards, values, bootstrap_values = (
        torch.randn(*shape, generator=rng, dtype=dtype) for _ in range(3)
    )
    # independent flags: some rows are both terminated and truncated
    terminated, truncated = (torch.rand(*shape, generator=rng) < end_rate / 2 for _ in range(2))
    counts = torch.randint(0, num_steps + 1, (num_envs,), generator=rng)
    if full:
        counts.fill_(num_steps)
    return Rollout(rewards, values, terminated, truncated, bootstrap_values, counts)


rollouts = st.builds(
    random_rollout,
    st.integers(1, 20),
    st.integers(1, 40),
    rng_seed=st.integers(0, 2**32),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    end_rate=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)
discounts = st.sampled_from([0.0, 0.5, 0.97, 0.995, 1.0])


def episodes(rollout, env):
    """`(first, last)` rows of each episode, or piece of one, that an env's row holds."""
    count, first = int(rollout.step_counts[env]), 0
    for t in range(count):
        if rollout.terminated[env, t] or rollout.truncated[env, t] or t == count - 1:
            yield first, t
            first = t + 1


def oracle(rollout, gamma, gae_lambda):
    """The definition in float64: A_t is the sum over its episode of (gamma lambda)^k delta_(t+k)."""
    rewards, values, bootstraps = (
        x.double().numpy() for x in (rollout.rewards, rollout.values, rollout.bootstrap_values)
    )
    advantages, returns = np.zeros_like(rewards), np.zeros_like(rewards)
    for env in range(len(rewards)):
        for first, last in episodes(rollout, env):
            rows = slice(first, last + 1)
            final = 0.0 if rollout.terminated[env, last] else bootstraps[env, last]
            next_values = np.append(values[env, first + 1 : last + 1], final)
            deltas = rewards[env, rows] + gamma * next_values - values[env, rows]
            for t in range(first, last + 1):
                weights = (gamma * gae_lambda) ** np.arange(last + 1 - t)
                advantages[env, t] = np.dot(weights, deltas[t - first :])
            returns[env, rows] = advantages[env, rows] + values[env, rows]
    return torch.from_numpy(advantages), torch.from_numpy(returns)


def assert_close(actual, expected):
    single = actual[0].dtype == torch.float32
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if single else {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(actual, expected, check_dtype=False, **tolerance)


def assert_identical(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


# Worked example and parity


def worked_case(dtype=torch.float32):
    """Episode A, rows 0 to 2, is truncated with V(final) = 7; B, rows 3 to 5, goes on from 50."""
    flags = torch.zeros(1, 6, dtype=torch.bool)
    return Rollout(
        rewards=torch.tensor([[1, 2, 3, 10, 20, 30]], dtype=dtype),
        values=torch.tensor([[1, 1.5, 2, 40, 41, 42]], dtype=dtype),
        terminated=flags,
        truncated=flags.index_fill(1, torch.tensor(2), True),
        bootstrap_values=torch.tensor([[NAN, NAN, 7, NAN, NAN, 50]], dtype=dtype),
        step_counts=torch.tensor([6]),
    )


@every_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_worked_case(kernel, dtype):
    rollout = worked_case(dtype)
    advantages, returns = rollout.run(kernel, gamma=0.9, gae_lambda=0.8)
    expected = torch.tensor([[6.79032, 7.556, 7.3, 36.1032, 40.56, 33.0]], dtype=dtype)
    torch.testing.assert_close(advantages, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(returns, expected + rollout.values, rtol=0, atol=1e-5)


@every_kernel
@given(rollout=rollouts, gamma=discounts, gae_lambda=discounts)
def test_matches_the_definition(kernel, rollout, gamma, gae_lambda):
    assert_close(rollout.run(kernel, gamma, gae_lambda), oracle(rollout, gamma, gae_lambda))


@every_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("num_envs", "num_steps"),
    [(1, 1), (7, 2), (8, 1), (9, 25), (130, 3), (3, 1023), (2, 1024), (5, 1025), (2, 8192)],
)
def test_matches_the_definition_at_awkward_sizes(kernel, dtype, num_envs, num_steps):
    rollout = random_rollout(num_envs, num_steps, dtype=dtype, end_rate=0.01)
    assert_close(rollout.run(kernel), oracle(rollout, DEFAULT_GAMMA, DEFAULT_GAE_LAMBDA))


@every_kernel
def test_one_long_episode_carries_through_every_row(kernel):
    rollout = random_rollout(3, 2100, end_rate=0.0, dtype=torch.float64, full=True)
    assert_close(rollout.run(kernel, 1.0, 1.0), oracle(rollout, 1.0, 1.0))


@every_kernel
@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0)])
def test_nothing_in_nothing_out(kernel, shape):
    advantages, returns = random_rollout(*shape).run(kernel)
    assert advantages.shape == returns.shape == shape


@every_kernel
def test_without_step_counts_every_row_is_stored(kernel):
    rollout = random_rollout(9, 30, full=True)
    device = "cuda" if kernel == "triton" else "cpu"
    *data, _ = (getattr(rollout, field.name).to(device) for field in fields(rollout))
    advantages, returns = compute_gae(*data, kernel=kernel)
    assert_identical((advantages.cpu(), returns.cpu()), rollout.run(kernel))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_reference_takes_half_precision(dtype):
    rollout = random_rollout(4, 10, dtype=dtype)
    advantages, _ = rollout.run("auto")
    expected, _ = oracle(rollout, DEFAULT_GAMMA, DEFAULT_GAE_LAMBDA)
    torch.testing.assert_close(advantages.double(), expected, rtol=0.05, atol=0.1)


# Identities


@every_kernel
@given(rollout=rollouts, gamma=discounts)
def test_lambda_zero_gives_the_one_step_error(kernel, rollout, gamma):
    advantages, _ = rollout.run(kernel, gamma, 0.0)
    for env in range(len(advantages)):
        for first, last in episodes(rollout, env):
            final = 0 if rollout.terminated[env, last] else rollout.bootstrap_values[env, last]
            for t in range(first, last + 1):
                next_value = final if t == last else rollout.values[env, t + 1]
                delta = rollout.rewards[env, t] + gamma * next_value - rollout.values[env, t]
                torch.testing.assert_close(advantages[env, t], delta, rtol=1e-4, atol=1e-5)


@every_kernel
@given(rollout=rollouts, gamma=discounts)
def test_lambda_one_gives_the_discounted_return(kernel, rollout, gamma):
    _, returns = rollout.run(kernel, gamma, 1.0)
    for env in range(len(returns)):
        for first, last in episodes(rollout, env):
            future = 0.0
            if not rollout.terminated[env, last]:
                future = float(rollout.bootstrap_values[env, last])
            for t in range(last, first - 1, -1):
                future = float(rollout.rewards[env, t]) + gamma * future
                assert float(returns[env, t]) == pytest.approx(future, rel=1e-4, abs=1e-4)


@every_kernel
@given(rollout=rollouts, data=st.data())
def test_splitting_a_row_at_an_episode_end_changes_nothing(kernel, rollout, data):
    env = data.draw(st.integers(0, len(rollout.rewards) - 1))
    ends = [last + 1 for _, last in episodes(rollout, env)]
    cut = data.draw(st.sampled_from([0, *ends]))
    count = int(rollout.step_counts[env])
    head = replace(rollout.map(lambda x: x[env : env + 1]), step_counts=torch.tensor([cut]))
    tail = replace(
        rollout.map(lambda x: x[env : env + 1, cut:] if x.ndim == 2 else x[env : env + 1]),
        step_counts=torch.tensor([count - cut]),
    )
    whole = rollout.run(kernel)
    parts = zip(head.run(kernel), tail.run(kernel), strict=True)
    joined = tuple(torch.cat([first[0, :cut], second[0]]) for first, second in parts)
    assert_close(joined, tuple(x[env] for x in whole))


@every_kernel
@given(rollout=rollouts, other=st.integers(0, 2**32))
def test_appending_an_episode_changes_nothing_before_it(kernel, rollout, other):
    num_envs, num_steps = rollout.rewards.shape
    more = random_rollout(num_envs, 7, rng_seed=other, dtype=rollout.rewards.dtype, full=True)
    full = replace(rollout, step_counts=torch.full((num_envs,), num_steps))
    # the row's bootstrap stays where it was, and so the row has to end there
    full.truncated[:, -1] |= ~full.terminated[:, -1]
    longer = Rollout(
        *(
            torch.cat([getattr(full, f.name), getattr(more, f.name)], dim=1)
            for f in fields(full)
            if f.name != "step_counts"
        ),
        step_counts=full.step_counts + 7,
    )
    assert_close(tuple(x[:, :num_steps] for x in longer.run(kernel)), tuple(full.run(kernel)))


@every_kernel
@given(rollout=rollouts, other=st.integers(0, 2**32))
def test_appending_an_env_changes_no_other(kernel, rollout, other):
    num_envs, num_steps = rollout.rewards.shape
    more = random_rollout(1, num_steps, rng_seed=other, dtype=rollout.rewards.dtype)
    wider = Rollout(
        *(torch.cat([getattr(rollout, f.name), getattr(more, f.name)]) for f in fields(more))
    )
    assert_close(tuple(x[:num_envs] for x in wider.run(kernel)), rollout.run(kernel))


@every_kernel
@given(rollout=rollouts, rng_seed=st.integers(0, 2**32))
def test_permuting_envs_permutes_the_result(kernel, rollout, rng_seed):
    rng = torch.Generator().manual_seed(rng_seed)
    order = torch.randperm(len(rollout.rewards), generator=rng)
    expected = tuple(x[order] for x in rollout.run(kernel))
    assert_close(rollout.map(lambda x: x[order]).run(kernel), expected)


# What must not matter


@every_kernel
@pytest.mark.parametrize("junk", [NAN, float("inf"), 1e30])
@given(rollout=rollouts)
def test_rows_past_the_stored_ones_come_back_zero_and_never_matter(kernel, junk, rollout):
    padding = torch.arange(rollout.rewards.shape[1]) >= rollout.step_counts[:, None]
    expected = rollout.run(kernel)
    for flag in (False, True):
        dirty = rollout.map(
            lambda x, flag=flag: (
                x
                if x.ndim == 1
                else x.masked_fill(padding, flag if x.dtype == torch.bool else junk)
            )
        )
        actual = dirty.run(kernel)
        assert_identical(actual, expected)
        assert all((x[padding] == 0).all() for x in actual)


@every_kernel
@given(rollout=rollouts)
def test_bootstraps_that_are_not_needed_never_matter(kernel, rollout):
    steps = torch.arange(rollout.rewards.shape[1])
    is_last = steps == rollout.step_counts[:, None] - 1
    needed = (rollout.truncated | is_last) & ~rollout.terminated
    dirty = replace(rollout, bootstrap_values=rollout.bootstrap_values.masked_fill(~needed, NAN))
    assert_identical(dirty.run(kernel), rollout.run(kernel))


@every_kernel
@given(rollout=rollouts)
def test_terminated_wins_over_truncated(kernel, rollout):
    both = replace(rollout, truncated=rollout.truncated | rollout.terminated)
    terminated_only = replace(rollout, truncated=rollout.truncated & ~rollout.terminated)
    assert_identical(both.run(kernel), terminated_only.run(kernel))


@every_kernel
@pytest.mark.parametrize("ends_by", ["terminated", "truncated"])
def test_a_nan_stays_within_its_episode(kernel, ends_by):
    rollout = random_rollout(9, 12, end_rate=0.0, full=True)
    getattr(rollout, ends_by)[:, 5] = True
    expected, _ = rollout.run(kernel)
    rollout.rewards[:, 8] = NAN
    actual, _ = rollout.run(kernel)
    assert_identical(actual[:, :6], expected[:, :6])
    assert actual[:, 6:9].isnan().all()


@every_kernel
@pytest.mark.parametrize(
    "relayout",
    [
        pytest.param(lambda x: x.t().contiguous().t(), id="transposed"),
        pytest.param(lambda x: x.repeat_interleave(2, dim=1)[:, ::2], id="every other step"),
        pytest.param(lambda x: torch.cat([x, x], dim=1)[:, : x.shape[1]], id="part of a row"),
    ],
)
def test_memory_layout_never_matters(kernel, relayout):
    rollout = random_rollout(11, 17)
    expected = rollout.run(kernel)
    strided = rollout.map(lambda x: x if x.ndim == 1 else relayout(x))
    assert not strided.rewards.is_contiguous()
    actual = strided.run(kernel)
    assert_identical(actual, expected)
    assert all(x.is_contiguous() for x in actual)


@every_kernel
def test_expanded_inputs_and_strided_counts_are_read_as_they_look(kernel):
    rollout = random_rollout(11, 17)
    strided_counts = rollout.step_counts.repeat_interleave(3)[::3]
    alike = rollout.map(lambda x: x[:1].expand(11, 17) if x.ndim == 2 else strided_counts)
    dense = alike.map(torch.Tensor.contiguous)
    assert_identical(alike.run(kernel), dense.run(kernel))


@every_kernel
def test_inputs_are_left_as_they_were(kernel):
    rollout = random_rollout(9, 20)
    before = rollout.map(torch.clone)
    rollout.run(kernel)
    for field in fields(rollout):
        assert torch.equal(getattr(rollout, field.name), getattr(before, field.name))


@every_kernel
def test_outputs_never_require_grad(kernel):
    rollout = random_rollout(4, 5)
    rollout.values.requires_grad_()
    rollout.bootstrap_values.requires_grad_()
    assert not any(x.requires_grad for x in rollout.run(kernel))


# Errors


@every_kernel
@pytest.mark.parametrize(("env", "count"), [(0, -1), (3, 6), (3, 2**40)])
def test_a_step_count_out_of_range_is_refused(kernel, env, count):
    *data, counts = (getattr(random_rollout(4, 5), f.name) for f in fields(Rollout))
    counts[env] = count
    device = "cuda" if kernel == "triton" else "cpu"
    message = rf"step_counts\[{env}\] is {count}; expected 0 to 5"
    with pytest.raises(ValueError, match=message):
        compute_gae(*(x.to(device) for x in data), step_counts=counts, kernel=kernel)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("rewards", lambda x: x[0], r"rewards is torch.float32 \[5\]; expected .* \[N, T\]"),
        ("rewards", lambda x: x.long(), "rewards is torch.int64"),
        ("values", lambda x: x[:, :4], r"values is .* \[4, 4\] on cpu; expected .* \[4, 5\]"),
        ("values", lambda x: x.double(), "values is torch.float64.*expected torch.float32"),
        ("terminated", lambda x: x.float(), "terminated is torch.float32.*expected torch.bool"),
        ("truncated", lambda x: x.to(torch.uint8), "truncated is torch.uint8.*torch.bool"),
        ("bootstrap_values", lambda x: x[:, -1], r"bootstrap_values is .* \[4\] on cpu"),
        ("bootstrap_values", lambda x: x.to("meta"), "on meta; expected .* on cpu"),
        ("step_counts", lambda x: x[:3], r"step_counts is torch.int64 \[3\].*\[4\]"),
        ("step_counts", lambda x: x.int(), "step_counts is torch.int32.*expected torch.int64"),
        ("step_counts", lambda x: x.to("meta"), "step_counts is .* on meta; expected .* on cpu"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(name, change, message):
    rollout = random_rollout(4, 5)
    with pytest.raises(ValueError, match=message):
        replace(rollout, **{name: change(getattr(rollout, name))}).run("auto")


@pytest.mark.parametrize("name", ["gamma", "gae_lambda"])
@pytest.mark.parametrize("value", [-0.1, 1.01, NAN])
def test_a_discount_outside_zero_and_one_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}={value}.*use numbers from 0 to 1"):
        random_rollout(2, 3).run("auto", **{name: value})


@pytest.mark.parametrize("kernel", ["cuda_magic", "triton"])
def test_an_unavailable_kernel_is_refused_with_those_there_are(kernel):
    *data, _ = (getattr(random_rollout(2, 3), f.name) for f in fields(Rollout))
    with pytest.raises(ValueError, match=f"{kernel}.*expected one of 'auto', 'numba', 'reference'"):
        compute_gae(*data, kernel=kernel)


def test_the_compiled_kernels_take_single_and_double_precision_only():
    cpu = torch.device("cpu")
    assert available_kernels(cpu, torch.float32) == ("numba", "reference")
    assert available_kernels(cpu, torch.bfloat16) == ("reference",)


@pytest.mark.gpu
def test_step_counts_on_a_gpu_are_clamped_not_read():
    rollout = random_rollout(5, 30)
    *data, counts = (getattr(rollout.map(torch.Tensor.cuda), f.name) for f in fields(rollout))
    counts[:2] = torch.tensor([-3, 31])
    clamped = counts.clamp(0, 30)
    for kernel in ("triton", "reference"):
        actual = compute_gae(*data, step_counts=counts, kernel=kernel)
        assert_identical(actual, compute_gae(*data, step_counts=clamped, kernel=kernel))


@pytest.mark.gpu
@pytest.mark.parametrize("counts_on", ["cpu", "cuda"])
@pytest.mark.parametrize("kernel", ["triton", "reference"])
def test_the_host_never_waits_for_the_gpu(kernel, counts_on):
    rollout = random_rollout(5, 30)
    *data, counts = (getattr(rollout.map(torch.Tensor.cuda), f.name) for f in fields(rollout))
    counts = counts.to(counts_on)
    expected = compute_gae(*data, step_counts=counts, kernel=kernel)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(100_000_000)  # the counts are changed while their copy still waits
        actual = compute_gae(*data, step_counts=counts, kernel=kernel)
        counts.zero_()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_identical(actual, expected)


# Compilers and cost


@every_kernel
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_caller_has_no_graph_break(kernel, backend):
    rollout = random_rollout(9, 12)
    rollout.values.requires_grad_()

    def caller(rollout):
        advantages, returns = rollout.run(kernel)
        return advantages * 2, returns

    compiled = torch.compile(caller, backend=backend, fullgraph=True)
    actual = compiled(rollout)
    assert_identical(actual, caller(rollout))
    assert not any(x.requires_grad for x in actual)


def test_the_operator_keeps_the_promises_of_an_operator():
    arguments = [getattr(random_rollout(4, 6), f.name) for f in fields(Rollout)]
    for kernel in ("numba", "reference"):
        torch.library.opcheck(torch.ops.esper.compute_gae.default, (*arguments, 0.9, 0.8, kernel))


class AllocationCount(TorchDispatchMode):
    """Counts the tensors whose storage no earlier tensor had."""

    def __init__(self):
        super().__init__()
        self.count = 0
        self.alive = []  # keeps storages, so that no address is used twice

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        known = {x.untyped_storage()._cdata for x in self._tensors((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        for tensor in self._tensors(result):
            self.alive.append(tensor)
            self.count += tensor.untyped_storage()._cdata not in known
        return result

    @staticmethod
    def _tensors(tree):
        return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@every_kernel
def test_the_number_of_allocations_does_not_grow_with_the_steps(kernel):
    def allocations(num_steps):
        rollout = random_rollout(3, num_steps)
        rollout.run(kernel)  # compiles what there is to compile
        with AllocationCount() as allocated:
            rollout.run(kernel)
        return allocated.count

    assert 2 <= allocations(10) == allocations(300)

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
TRITON = pytest.param("triton", marks=pytest.mark.gpu)
every_kernel = pytest.mark.parametrize("kernel", ["reference", "numba", TRITON])
LAYOUTS = {  # a tensor [N, T] with the same content in other memory
    "rows": torch.Tensor.contiguous,
    "time-major": lambda x: x.t().contiguous().t(),  # the views of a rollout buffer
    "every other step": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "part of a row": lambda x: torch.cat([x, x], dim=1)[:, : x.shape[1]],
    "part of a step": lambda x: torch.cat([x, x]).t().contiguous().t()[: x.shape[0]],
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


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

    def map_rows(self, change) -> "Rollout":
        """Change the tensors [N, T], and not the counts."""
        return self.map(lambda x: change(x) if x.ndim == 2 else x)

    def run(self, kernel, gamma=DEFAULT_GAMMA, gae_lambda=DEFAULT_GAE_LAMBDA, out=None):
        """Advantages and returns by a kernel; on the CPU unless `out` is given."""
        rollout = self.map(torch.Tensor.cuda) if kernel == "triton" else self
        *data, counts = (getattr(rollout, field.name) for field in fields(rollout))
        results = compute_gae(
            *data, step_counts=counts, gamma=gamma, gae_lambda=gae_lambda, kernel=kernel, out=out
        )
        return results if out is not None else tuple(result.cpu() for result in results)


def random_rollout(
    num_envs,
    num_steps,
    *,
    rng_seed=0,
    dtype=torch.float32,
    end_rate=0.2,
    full=False,
    layout="rows",
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
    rollout = Rollout(rewards, values, terminated, truncated, bootstrap_values, counts)
    return rollout.map_rows(LAYOUTS[layout])


rollouts = st.builds(
    random_rollout,
    st.integers(1, 20),
    st.integers(1, 40),
    rng_seed=st.integers(0, 2**32),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    end_rate=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    layout=st.sampled_from(["rows", "time-major"]),
)
discounts = st.sampled_from([0.0, 0.5, 0.97, 0.995, 1.0])


def episodes(rollout, env):
    """`(first, last)` rows of each episode, or piece of one, that an env's row holds."""
    count, first = int(rollout.step_counts[env]), 0
    for t in range(count):
        if rollout.terminated[env, t] or rollout.truncated[env, t] or t == count - 1:
            yield first, t
            first = t + 1


def oracle(rollout, gamma=DEFAULT_GAMMA, gae_lambda=DEFAULT_GAE_LAMBDA):
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


def assert_same(kernel, actual, expected):
    """Identical; of Triton up to rounding, because another layout is another order of its scan."""
    tolerance = 1e-5 if kernel == "triton" else 0
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# -- worked example and parity ----------------------------------------------------------------


@every_kernel
@every_layout
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_worked_case(kernel, layout, dtype):
    """Episode A, rows 0 to 2, is truncated with V(final) = 7; B, rows 3 to 5, goes on from 50."""
    flags = torch.zeros(1, 6, dtype=torch.bool)
    rollout = Rollout(
        rewards=torch.tensor([[1, 2, 3, 10, 20, 30]], dtype=dtype),
        values=torch.tensor([[1, 1.5, 2, 40, 41, 42]], dtype=dtype),
        terminated=flags,
        truncated=flags.index_fill(1, torch.tensor(2), True),
        bootstrap_values=torch.tensor([[NAN, NAN, 7, NAN, NAN, 50]], dtype=dtype),
        step_counts=torch.tensor([6]),
    )
    advantages, returns = rollout.map_rows(LAYOUTS[layout]).run(kernel, gamma=0.9, gae_lambda=0.8)
    expected = torch.tensor([[6.79032, 7.556, 7.3, 36.1032, 40.56, 33.0]], dtype=dtype)
    torch.testing.assert_close(advantages, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(returns, expected + rollout.values, rtol=0, atol=1e-5)


@every_kernel
@given(rollout=rollouts, gamma=discounts, gae_lambda=discounts)
def test_matches_the_definition(kernel, rollout, gamma, gae_lambda):
    assert_close(rollout.run(kernel, gamma, gae_lambda), oracle(rollout, gamma, gae_lambda))


@every_kernel
@pytest.mark.parametrize("layout", ["rows", "time-major"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("num_envs", "num_steps"),
    [(1, 1), (7, 2), (8, 1), (9, 25), (130, 3), (3, 1023), (2, 1024), (5, 1025), (2, 8192)],
)
def test_matches_the_definition_at_awkward_sizes(kernel, layout, dtype, num_envs, num_steps):
    rollout = random_rollout(num_envs, num_steps, dtype=dtype, end_rate=0.01, layout=layout)
    assert_close(rollout.run(kernel), oracle(rollout))


@every_kernel
@pytest.mark.parametrize("layout", ["rows", "time-major"])
def test_one_long_episode_carries_through_every_row(kernel, layout):
    whole = dict(end_rate=0.0, dtype=torch.float64, full=True)
    rollout = random_rollout(3, 2100, **whole, layout=layout)
    assert_close(rollout.run(kernel, 1.0, 1.0), oracle(rollout, 1.0, 1.0))


@every_kernel
@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0)])
def test_nothing_in_nothing_out(kernel, shape):
    advantages, returns = random_rollout(*shape).run(kernel)
    assert advantages.shape == returns.shape == shape


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_reference_takes_half_precision(dtype):
    rollout = random_rollout(4, 10, dtype=dtype)
    advantages, _ = rollout.run("auto")
    torch.testing.assert_close(advantages.double(), oracle(rollout)[0], rtol=0.05, atol=0.1)


# -- identities -------------------------------------------------------------------------------


@every_kernel
@given(rollout=rollouts, gamma=discounts)
def test_lambda_zero_gives_the_one_step_error_and_one_the_discounted_return(kernel, rollout, gamma):
    one_step, _ = rollout.run(kernel, gamma, 0.0)
    _, to_the_end = rollout.run(kernel, gamma, 1.0)
    for env in range(len(one_step)):
        for first, last in episodes(rollout, env):
            next_value = future = 0.0
            if not rollout.terminated[env, last]:
                next_value = future = float(rollout.bootstrap_values[env, last])
            for t in range(last, first - 1, -1):
                reward, value = float(rollout.rewards[env, t]), float(rollout.values[env, t])
                error = reward + gamma * next_value - value
                future = reward + gamma * future
                next_value = value
                assert float(one_step[env, t]) == pytest.approx(error, rel=1e-4, abs=1e-5)
                assert float(to_the_end[env, t]) == pytest.approx(future, rel=1e-4, abs=1e-4)


@every_kernel
@given(rollout=rollouts, data=st.data())
def test_splitting_a_row_at_an_episode_end_changes_nothing(kernel, rollout, data):
    env = data.draw(st.integers(0, len(rollout.rewards) - 1))
    ends = [last + 1 for _, last in episodes(rollout, env)]
    cut = data.draw(st.sampled_from([0, *ends]))
    row = rollout.map(lambda x: x[env : env + 1])
    head = replace(row, step_counts=torch.tensor([cut]))
    tail = replace(row.map_rows(lambda x: x[:, cut:]), step_counts=row.step_counts - cut)
    parts = zip(head.run(kernel), tail.run(kernel), strict=True)
    joined = tuple(torch.cat([first[0, :cut], second[0]]) for first, second in parts)
    assert_close(joined, tuple(x[env] for x in rollout.run(kernel)))


@every_kernel
@given(rollout=rollouts, other=st.integers(0, 2**32))
def test_appending_an_episode_or_an_env_changes_nothing_else(kernel, rollout, other):
    num_envs, num_steps = rollout.rewards.shape
    like = dict(rng_seed=other, dtype=rollout.rewards.dtype)
    wider = joined(rollout, random_rollout(1, num_steps, **like), dim=0)
    assert_close(tuple(x[:num_envs] for x in wider.run(kernel)), rollout.run(kernel))
    full = replace(rollout, step_counts=torch.full((num_envs,), num_steps))
    # the row's bootstrap stays where it was, and so the row has to end there
    full.truncated[:, -1] |= ~full.terminated[:, -1]
    longer = joined(full, random_rollout(num_envs, 7, full=True, **like), dim=1)
    assert_close(tuple(x[:, :num_steps] for x in longer.run(kernel)), full.run(kernel))


def joined(rollout, other, dim):
    """Two rollouts as one: of more envs (0), or with rows that follow (1)."""
    pairs = [(getattr(rollout, f.name), getattr(other, f.name)) for f in fields(rollout)]
    *rows, counts = pairs
    return Rollout(
        *(torch.cat(pair, dim=dim) for pair in rows),
        step_counts=torch.cat(counts) if dim == 0 else counts[0] + counts[1],
    )


# -- what must not matter ---------------------------------------------------------------------


@every_kernel
@pytest.mark.parametrize("junk", [NAN, float("inf"), 1e30])
@given(rollout=rollouts)
def test_empty_rows_come_back_zero_and_never_matter(kernel, junk, rollout):
    padding = torch.arange(rollout.rewards.shape[1]) >= rollout.step_counts[:, None]
    expected = rollout.run(kernel)
    for flag in (False, True):
        dirty = rollout.map_rows(
            lambda x, flag=flag: x.masked_fill(padding, flag if x.dtype == torch.bool else junk)
        )
        actual = dirty.run(kernel)
        assert_same(kernel, actual, expected)
        assert all((x[padding] == 0).all() for x in actual)


@every_kernel
@given(rollout=rollouts)
def test_bootstraps_that_are_not_needed_never_matter(kernel, rollout):
    steps = torch.arange(rollout.rewards.shape[1])
    is_last = steps == rollout.step_counts[:, None] - 1
    needed = (rollout.truncated | is_last) & ~rollout.terminated
    dirty = replace(rollout, bootstrap_values=rollout.bootstrap_values.masked_fill(~needed, NAN))
    assert_same(kernel, dirty.run(kernel), rollout.run(kernel))


@every_kernel
@pytest.mark.parametrize("layout", ["rows", "time-major"])
@pytest.mark.parametrize("ends_by", ["terminated", "truncated"])
def test_a_nan_stays_within_its_episode(kernel, layout, ends_by):
    rollout = random_rollout(9, 12, end_rate=0.0, full=True, layout=layout)
    getattr(rollout, ends_by)[:, 5] = True
    expected, _ = rollout.run(kernel)
    rollout.rewards[:, 8] = NAN
    actual, _ = rollout.run(kernel)
    assert_identical(actual[:, :6], expected[:, :6])
    assert actual[:, 6:9].isnan().all()


@every_kernel
def test_inputs_are_left_as_they_were_and_outputs_carry_no_graph(kernel):
    rollout = random_rollout(9, 20)
    before = rollout.map(torch.clone)
    rollout.values.requires_grad_()
    rollout.bootstrap_values.requires_grad_()
    assert not any(x.requires_grad for x in rollout.run(kernel))
    for field in fields(rollout):
        assert torch.equal(getattr(rollout, field.name), getattr(before, field.name))


# -- memory -----------------------------------------------------------------------------------


def memory_for(rollout, layout, kernel):
    """Two tensors to write to, each a part of more memory, and all of that memory."""
    device = "cuda" if kernel == "triton" else "cpu"
    blank = torch.full_like(rollout.rewards, -1e9, memory_format=torch.contiguous_format)
    views = [LAYOUTS[layout](blank.to(device).clone()) for _ in range(2)]
    wholes = [x.as_strided((len(x.untyped_storage()) // x.itemsize,), (1,), 0) for x in views]
    return tuple(views), wholes


@every_kernel
@every_layout
@pytest.mark.parametrize("out_layout", [None, *LAYOUTS])
def test_results_land_in_the_given_memory_and_nowhere_else(kernel, layout, out_layout):
    plain = random_rollout(11, 17)
    rollout = plain.map_rows(LAYOUTS[layout])
    expected = plain.run(kernel)
    if out_layout is None:
        assert_same(kernel, rollout.run(kernel), expected)
        return
    out, wholes = memory_for(rollout, out_layout, kernel)
    unwritten = [len(whole) - out[0].numel() for whole in wholes]
    addresses = [x.data_ptr() for x in out]
    results = rollout.run(kernel, out=out)
    assert [x.data_ptr() for x in results] == addresses
    assert_same(kernel, tuple(x.cpu() for x in out), expected)
    assert [int((whole == -1e9).sum()) for whole in wholes] == unwritten


@every_kernel
@every_layout
def test_views_with_the_same_strides_are_never_copied(kernel, layout):
    rollout = random_rollout(11, 17, full=True)
    expected = rollout.run(kernel)
    device = "cuda" if kernel == "triton" else "cpu"
    *data, _ = (getattr(rollout, field.name).to(device) for field in fields(rollout))
    data = [LAYOUTS[layout](x) for x in data]
    out, _ = memory_for(rollout, layout, kernel)
    with AllocationCount() as allocated:
        compute_gae(*data, kernel=kernel, out=out)  # without counts every row is stored
    assert allocated.count == 0 or kernel == "reference"
    assert_same(kernel, tuple(x.cpu() for x in out), expected)


@every_kernel
def test_expanded_inputs_and_strided_counts_are_read_as_they_look(kernel):
    rollout = random_rollout(11, 17)
    counts = rollout.step_counts.repeat_interleave(3)[::3]
    alike = replace(rollout.map_rows(lambda x: x[:1].expand(11, 17)), step_counts=counts)
    assert_identical(alike.run(kernel), alike.map(torch.Tensor.contiguous).run(kernel))


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


# -- errors -----------------------------------------------------------------------------------


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
        ("advantages", lambda x: x[:3], r"advantages is .* \[3, 5\] on cpu; expected .* \[4, 5\]"),
        ("returns", lambda x: x.double(), "returns is torch.float64.*expected torch.float32"),
        ("returns", lambda x: x.to("meta"), "returns is .* on meta; expected .* on cpu"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(name, change, message):
    rollout = random_rollout(4, 5)
    out = {"advantages": torch.empty(4, 5), "returns": torch.empty(4, 5)}
    if name in out:
        out[name] = change(out[name])
    else:
        rollout = replace(rollout, **{name: change(getattr(rollout, name))})
    with pytest.raises(ValueError, match=message):
        rollout.run("auto", out=tuple(out.values()))


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


# -- compilers and GPUs -----------------------------------------------------------------------


@every_kernel
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("layout", ["rows", "time-major"])
def test_a_compiled_caller_has_no_graph_break(kernel, backend, layout):
    rollout = random_rollout(9, 12, layout=layout)
    rollout.values.requires_grad_()
    out, _ = memory_for(rollout, layout, kernel)

    def caller(rollout, out):
        fresh, _ = rollout.run(kernel)
        advantages, returns = rollout.run(kernel, out=out)
        return fresh * 2, advantages * 2, returns

    compiled = torch.compile(caller, backend=backend, fullgraph=True)
    actual = compiled(rollout, out)
    advantages, returns = rollout.run(kernel)
    assert_identical(tuple(x.cpu() for x in actual), (advantages * 2, advantages * 2, returns))
    assert_identical(tuple(x.cpu() for x in out), (advantages, returns))
    assert not any(x.requires_grad for x in actual)


def test_the_operator_keeps_the_promises_of_an_operator():
    arguments = [getattr(random_rollout(4, 6), f.name) for f in fields(Rollout)]
    for kernel in ("numba", "reference"):
        torch.library.opcheck(torch.ops.esper.compute_gae.default, (*arguments, 0.9, 0.8, kernel))


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

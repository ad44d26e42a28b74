"""CUDA graphs of acting and of learning from a minibatch: one launch instead of some hundred.

A graph reads and writes fixed addresses. What acting is given is copied to tensors of the graph;
weights, the optimiser's state and the rollout are read where they are. If one of them has moved, as
after weights were loaded or an update was undone, the work is captured again. So a graph never reads
freed memory.
"""

import gc
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from esper.leyline.factored_actions import ActionMasks
from esper.simic.agent.rollout import Rollout, RolloutRow
from esper.tamiyo.policy.network import Decision, RecurrentState

if TYPE_CHECKING:
    from esper.simic.agent.ppo import LearnedMinibatch, PPOAgent

_WARM_UPS = 3  # runs before capturing, in which libraries allocate and choose their kernels
_MOST_LAYOUTS = 8  # of minibatches; with more, rounds differ too much to be captured
_Result = TypeVar("_Result")


class CannotCapture(RuntimeError):
    """Work that waits for the GPU, or does something else that a graph cannot hold."""


class Captured(Generic[_Result]):
    """Work as one CUDA graph, captured at its first run and whenever a tensor that it reads moved."""

    def __init__(
        self,
        work: Callable[[], _Result],
        reads: Callable[[], Iterable[Tensor]],
        changes: Callable[[], Iterable[Tensor]],
    ):
        """`reads` lists what others may replace; `changes`, what the runs before a capture change."""
        self._work = work
        self._reads = reads
        self._changes = changes
        self._addresses: list[int] | None = None  # at the last capture

    @property
    def is_new(self) -> bool:
        """Nothing was captured yet."""
        return self._addresses is None

    def run(self) -> _Result:
        """The results, in tensors that the next run overwrites."""
        self.prepare()
        return self.run_again()

    def prepare(self) -> bool:
        """Capture, unless all tensors are where they were at the last capture; whether it did."""
        addresses = [tensor.data_ptr() for tensor in self._reads()]
        if addresses == self._addresses:
            return False
        self._capture()
        self._addresses = addresses
        return True

    def run_again(self) -> _Result:
        """As `run`, where nothing can have moved since `prepare`."""
        self._graph.replay()
        return self._results

    def _capture(self) -> None:
        before = [(tensor, tensor.detach().clone()) for tensor in self._changes()]
        caller = torch.cuda.current_stream()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(caller)
        was_enabled = gc.isenabled()
        try:
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    self._work()
                    _restore(before)  # a counter may not run past its end
            caller.wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            gc.collect()
            gc.disable()  # a tensor that is freed in between would end the capture
            # with ranks, NCCL's own thread looks at events meanwhile
            mode = "thread_local" if dist.is_initialized() else "global"
            with torch.cuda.graph(self._graph, capture_error_mode=mode):
                self._results = self._work()
        except RuntimeError as error:
            raise CannotCapture(str(error).splitlines()[0]) from error
        finally:
            if was_enabled:
                gc.enable()
            _restore(before)


@torch.no_grad()
def _restore(before: Sequence[tuple[Tensor, Tensor]]) -> None:
    for tensor, old in before:
        tensor.copy_(old)


def copy_all(targets: Sequence[Any], sources: Sequence[Any]) -> None:
    """Copy tensors into others, with one launch for each kind; what is no tensor is skipped."""
    pairs: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        if isinstance(target, Tensor):
            same_targets, same_sources = pairs.setdefault(target.dtype, ([], []))
            same_targets.append(target)
            same_sources.append(source)
    for same_targets, same_sources in pairs.values():
        torch._foreach_copy_(same_targets, same_sources)


class ActInputs(NamedTuple):
    """What acting reads besides the weights: tensors that stay where they are."""

    features: Tensor
    frames: Tensor | None
    groups: tuple[Tensor, ...]  # of the masks
    h: Tensor
    c: Tensor
    noise: Tensor | None

    def tensors(self) -> list[Tensor]:
        given = [self.features, self.frames, *self.groups, self.h, self.c, self.noise]
        return [tensor for tensor in given if tensor is not None]

    def clone(self) -> "ActInputs":
        return ActInputs(
            self.features.clone(),
            None if self.frames is None else self.frames.clone(),
            tuple(group.clone() for group in self.groups),
            self.h.clone(),
            self.c.clone(),
            None if self.noise is None else self.noise.clone(),
        )


class AgentGraphs:
    """The graphs of one agent: of `act` for each number of envs, of learning for each layout."""

    def __init__(self, agent: "PPOAgent"):
        self._agent = agent
        self._act: dict[tuple[Any, ...], tuple[ActInputs, Captured[Decision]]] = {}
        self._learn: dict[tuple[Any, ...], _MinibatchGraph] = {}

    def act(
        self,
        features: Tensor,
        frames: Tensor | None,
        masks: ActionMasks,
        state: RecurrentState,
        noise: Tensor | None,
        out: RolloutRow,
    ) -> Decision:
        """As `PPOAgent.act`; the state that it returns is overwritten by the next call."""
        given = ActInputs(features, frames, masks.groups, *state, noise)
        key = (len(features), noise is None)
        if key not in self._act:
            self._act[key] = self._capture_act(given)
        fixed, graph = self._act[key]
        copy_all(fixed.tensors(), given.tensors())
        decision = graph.run()
        copy_all([out.actions, out.log_probs, out.masks, out.values], list(decision[:4]))
        return Decision(out.actions, out.log_probs, out.masks, out.values, decision.state)

    def _capture_act(self, given: ActInputs) -> tuple[ActInputs, Captured[Decision]]:
        agent = self._agent
        fixed = given.clone()
        masks = ActionMasks(agent.policy.action_space, fixed.groups)

        def work() -> Decision:
            return agent.act_eagerly(
                fixed.features,
                masks,
                RecurrentState(fixed.h, fixed.c),
                frames=fixed.frames,
                noise=fixed.noise,
                deterministic=fixed.noise is None,
            )

        return fixed, Captured(work, agent.tensors_of_acting, lambda: ())

    def learn(self, rollout: Rollout, env_ids: Tensor) -> "LearnedMinibatch":
        """As `PPOAgent.learn_from` the rows of these envs."""
        self._agent.prepare_optimizer()
        key = (*rollout.states.shape, len(env_ids))
        if key not in self._learn:
            if len(self._learn) == _MOST_LAYOUTS:
                raise CannotCapture(f"minibatches of more than {_MOST_LAYOUTS} different sizes")
            self._learn[key] = _MinibatchGraph(self._agent, len(env_ids))
        return self._learn[key].run(rollout, env_ids)


class _MinibatchGraph:
    """Learning from a minibatch; which envs it has is read from a fixed tensor."""

    def __init__(self, agent: "PPOAgent", num_envs: int):
        self._agent = agent
        self._env_ids = torch.arange(num_envs, device=agent.device)
        self._rollout: Rollout | None = None
        self._graph = Captured(self._work, self._reads, agent.tensors_of_learning)

    def run(self, rollout: Rollout, env_ids: Tensor) -> "LearnedMinibatch":
        self._rollout = rollout
        self._env_ids.copy_(env_ids, non_blocking=True)
        learned = self._graph.run()
        self._rollout = None  # the buffer may be freed
        return learned

    def _work(self) -> "LearnedMinibatch":
        assert self._rollout is not None
        return self._agent.learn_from(self._rollout.of_envs(self._env_ids))

    def _reads(self) -> list[Tensor]:
        values = vars(self._rollout).values()
        return [*self._agent.tensors_of_learning(), *(v for v in values if isinstance(v, Tensor))]

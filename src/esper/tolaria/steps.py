"""The ways to run a population's minibatches, behind one interface.

| kernels | where | how |
|---|---|---|
| eager | anywhere, any layer | operations of the whole population, launched one by one |
| graphs | CUDA | the same operations, captured |
| compiled | CPU, the layers that kasmina knows | host after host, by compiled code |
| fused | CUDA, the same layers | all hosts and minibatches in one launch, a block per host |
"""

from collections.abc import Sequence
from typing import Literal, Protocol, get_args

from torch import Tensor

from esper.kasmina.lifecycle import SlotStates
from esper.kernels.hosts.compiled import CompiledSteps
from esper.kernels.hosts.fused import FusedSteps, has_room
from esper.kernels.hosts.graphs import GraphedSteps
from esper.kernels.hosts.layer_table import has_kernels
from esper.tolaria.batched import Minibatch, TrainingSetup
from esper.tolaria.groups import Grouping
from esper.tolaria.optimizers import SGD, AdamW

Kernels = Literal["eager", "graphs", "compiled", "fused"]


class Steps(Protocol):
    """Runs minibatches for whatever seeds the hosts have."""

    def prepare(self, states: SlotStates) -> None:
        """The slots have changed."""
        ...

    def run(self, count: int) -> None:
        """That many minibatches from the feed."""
        ...

    def logits(self, x: Tensor, ablate: bool) -> tuple[Tensor, Sequence[int]]:
        """See `batched.run_hosts`; and the slots that added a copy."""
        ...


class EagerSteps:
    """Every operation launched by itself."""

    def __init__(self, setup: TrainingSetup):
        self._setup = setup

    def prepare(self, states: SlotStates) -> None:
        grouping = Grouping.of(states)
        self._minibatch = Minibatch(self._setup, grouping.signature)
        self._minibatch.members.fill(grouping.members)

    def run(self, count: int) -> None:
        for _ in range(count):
            self._minibatch.train()

    def logits(self, x: Tensor, ablate: bool) -> tuple[Tensor, tuple[int, ...]]:
        return self._minibatch.logits(x, ablate), self._minibatch.felt_slots


def fastest_kernels(setup: TrainingSetup) -> Kernels:
    """The fastest way that knows every layer and the optimiser."""
    on_cuda = setup.parameter_table.params.device.type == "cuda"
    seeds = (e.program(s) for e in setup.menu for s in setup.host.sites if e.fits(s))
    knows_layers = all(map(has_kernels, (*setup.host.programs, *seeds)))
    knows_optimizer = type(setup.optimizer) in (AdamW, SGD)
    knows_all = knows_layers and knows_optimizer
    if on_cuda:
        return "fused" if knows_all and has_room(setup) else "graphs"
    return "compiled" if knows_all else "eager"


def build_steps(setup: TrainingSetup, kernels: Kernels) -> Steps:
    match kernels:
        case "eager":
            return EagerSteps(setup)
        case "graphs":
            return GraphedSteps(setup)
        case "compiled":
            return CompiledSteps(setup)
        case "fused":
            return FusedSteps(setup)
    raise ValueError(f"kernels={kernels!r}; use one of {get_args(Kernels)}")

"""The ways to run a population's minibatches, behind one interface.

| kernels | where | how |
|---|---|---|
| eager | any device, any layer | batched operations on the whole population, launched one by one |
| compiled | CPU, layers of kasmina | host after host, by numba |
| fused | CUDA, layers of kasmina | all hosts and minibatches in one launch, a block per host |
"""

from collections.abc import Sequence
from typing import Literal, Protocol, get_args

from torch import Tensor

from esper.kasmina.lifecycle import SlotStates
from esper.kernels.hosts.compiled import CompiledSteps
from esper.kernels.hosts.fused import FusedSteps, has_room
from esper.kernels.hosts.layer_table import has_kernels
from esper.tolaria.batched import EagerSteps, TrainingSetup
from esper.tolaria.optimizers import AdamW

Kernels = Literal["eager", "compiled", "fused"]


class Steps(Protocol):
    """Runs minibatches for the seeds that the hosts have."""

    def prepare(self, states: SlotStates) -> None:
        """Called when slots have changed."""
        ...

    def run(self, count: int) -> None:
        """Train on the next `count` minibatches of the feed."""
        ...

    def logits(self, x: Tensor, ablate: bool) -> tuple[Tensor, Sequence[int]]:
        """Logits as in `batched.run_hosts`, and the slots that added a copy."""
        ...


def fastest_kernels(setup: TrainingSetup) -> Kernels:
    """The fastest kernels that support all layers and the optimiser."""
    on_cuda = setup.parameter_table.params.device.type == "cuda"
    seeds = (e.program(s) for e in setup.menu for s in setup.host.sites if e.fits(s))
    supports_all = all(map(has_kernels, (*setup.host.programs, *seeds)))
    supports_all &= type(setup.optimizer) is AdamW  # a subclass may do otherwise
    if not supports_all or (on_cuda and not has_room(setup)):
        return "eager"
    return "fused" if on_cuda else "compiled"


def build_steps(setup: TrainingSetup, kernels: Kernels) -> Steps:
    match kernels:
        case "eager":
            return EagerSteps(setup)
        case "compiled":
            return CompiledSteps(setup)
        case "fused":
            return FusedSteps(setup)
    raise ValueError(f"kernels={kernels!r}; use one of {get_args(Kernels)}")

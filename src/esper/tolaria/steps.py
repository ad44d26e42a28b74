"""The ways to run a population's minibatches, all with the methods of `EagerSteps`.

| kernels | where | how |
|---|---|---|
| eager | any device, any layer | batched operations on the whole population, launched one by one |
| compiled | CPU, layers of kasmina | host after host, by numba |
| fused | CUDA, layers of kasmina | all hosts and minibatches in one launch, a block per host |
"""

from typing import Literal

from esper.kernels.hosts.compiled import CompiledSteps
from esper.kernels.hosts.fused import FusedSteps, has_room
from esper.kernels.hosts.layer_table import has_kernels
from esper.tolaria.batched import EagerSteps, TrainingSetup
from esper.tolaria.optimizers import AdamW

Kernels = Literal["eager", "compiled", "fused"]


Steps = EagerSteps | CompiledSteps | FusedSteps
_STEPS: dict[Kernels, type[Steps]] = {
    "eager": EagerSteps,
    "compiled": CompiledSteps,
    "fused": FusedSteps,
}


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
    if kernels not in _STEPS:
        raise ValueError(f"kernels={kernels!r}; use one of {tuple(_STEPS)}")
    return _STEPS[kernels](setup)

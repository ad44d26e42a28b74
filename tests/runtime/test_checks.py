"""Deferred checks: at once on a CPU, at the end on a device, always the earliest failure."""

import pytest
import torch

from esper.runtime.checks import DeferredChecks


def test_on_a_cpu_a_failure_raises_at_once_with_its_indices():
    checks = DeferredChecks()
    checks.require(torch.tensor([True, True]), lambda env: f"env {env}")
    ok = torch.tensor([[True, True], [False, True]])
    with pytest.raises(ValueError, match="env 1, head 0"):
        checks.require(ok, lambda env, head: f"env {env}, head {head}")
    checks.raise_if_failed()


@pytest.mark.gpu
def test_on_a_device_the_earliest_failure_is_raised_at_the_end_and_only_once():
    checks = DeferredChecks()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(3):
            ok = torch.arange(4, device="cuda") != step + 1
            checks.require(ok | (step == 0), lambda env, step=step: f"{step}, {env}")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with pytest.raises(ValueError, match="1, 2"):
        checks.raise_if_failed()
    checks.raise_if_failed()

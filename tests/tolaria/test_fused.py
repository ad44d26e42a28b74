"""The fused kernel trains as batched operations do; here by the C++ compiler, without a GPU."""

import shutil

import pytest
from tolaria.test_steps import HOSTS, OPTIMIZERS, assert_agree, build

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")


@needs_compiler
@pytest.mark.parametrize("behind_host", [False, True], ids=["in host", "behind host"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", HOSTS)
def test_the_fused_kernel_trains_as_batched_operations_do(kind, optimizer, behind_host):
    fused, eager = build(kind, optimizer, "fused"), build(kind, optimizer, "eager")
    assert_agree(fused, eager, num_steps=12, behind_host=behind_host)

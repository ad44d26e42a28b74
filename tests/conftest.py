"""Two test workers share two cores: one torch thread each, the same everywhere."""

import signal

import pytest
import torch
from hypothesis import settings

pytest.register_assert_rewrite("support")
torch.set_num_threads(1)
# derandomized: a red test is red for everybody; no deadline: the first call may compile a kernel
settings.register_profile("esper", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("esper")


@pytest.fixture
def default_sigint():
    """Python's own Ctrl-C handler, also if the suite was started with SIGINT ignored (`nohup`).

    Child processes get the default, too: a handled signal is reset on exec, an ignored one is not.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)

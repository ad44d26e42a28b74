"""Two test workers share two cores: one torch thread each, the same everywhere."""

import torch
from hypothesis import settings

torch.set_num_threads(1)
# derandomized: a red test is red for everybody; no deadline: the first call may compile a kernel
settings.register_profile("esper", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("esper")

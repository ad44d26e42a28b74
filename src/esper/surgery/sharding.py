"""Models whose weights are split over processes: no seed grows on a part of a weight."""

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel


def check_not_sharded(model: nn.Module, remedy: str) -> None:
    if any(isinstance(m, FSDPModule | FullyShardedDataParallel) for m in model.modules()):
        raise ValueError(
            "the model is sharded (fully_shard, FSDP), but a seed grows on whole weights; give "
            f"{remedy}"
        )

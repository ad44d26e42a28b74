"""What it costs to train networks, in floating-point operations."""

from collections.abc import Sequence

import torch

from esper.kasmina.hosts import Host
from esper.simic.growth.hosts_and_data import load_hosts, load_task
from esper.simic.growth.train_config import TrainConfig
from growth_evaluation.paired_experiment import (
    FORWARD_FLOPS,
    TRAINING_FLOPS,
    ArmOutcome,
    PairedExperiment,
)


def flops_of(outcomes: Sequence[ArmOutcome]) -> float:
    """Floating-point operations to train these networks."""
    return sum(float(outcome.training_flops.sum()) for outcome in outcomes)


def host_training_flops(config: TrainConfig) -> float:
    """FLOPs to train a controller's hosts, without seeds and validation."""
    hosts = load_hosts(config, load_task(config, config.variants[:1]), config.training_widths)
    networks, host_batch = config.rounds * config.num_envs, config.host_batch
    rows = host_batch.minibatches * host_batch.batch_size * config.growth.num_steps
    return networks * rows * TRAINING_FLOPS * sum(host.macs for host in hosts) / len(hosts)


def relative_flops(outcome: ArmOutcome, experiment: PairedExperiment) -> float:
    """Training FLOPs of `[K, R, H]` relative to the bare host (seeds and validation included)."""
    macs = torch.tensor([float(host.macs) for host in experiment.architectures])
    copies = experiment.num_hosts // len(macs)
    bare = macs.repeat_interleave(copies) * experiment.training_rows * TRAINING_FLOPS
    return float((outcome.training_flops / bare).mean())


def host_flops(experiment: PairedExperiment, host: Host) -> float:
    """FLOPs to train a host without seeds on every view and repeat, validation included."""
    config = experiment.hosts.config
    validation_rows = (1 + config.growth.num_steps) * config.host_batch.validation_rows
    each = experiment.training_rows * TRAINING_FLOPS + validation_rows * FORWARD_FLOPS
    copies = experiment.num_hosts // len(experiment.hosts.widths)
    return float(copies * each * host.macs)

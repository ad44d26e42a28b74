"""Growth in the training loops of other libraries: a callback for each.

    callback = esper.trainer_callback(metric="eval_accuracy", budget=esper.Budget(params=20_000))
    trainer = transformers.Trainer(model, args, callbacks=[callback], ...)
    trainer.train()
    model = callback.growth.plain_model()

The model is evaluated by the library, as its settings say; a decision follows every evaluation.
"""

import math
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import nn

from esper.growing.ddp import connected_ranks
from esper.growing.growth import Growth
from esper.surgery.eval_mode import untouched_randomness
from esper.surgery.inputs import moved


class _Decisions:
    """Makes a growth, and its decisions from the metrics that a library reports."""

    def __init__(self, metric: str, options: dict[str, Any]):
        self._metric, self._options = metric, options
        self._last: float | None = None
        self._steps = 0
        self.growth: Any = None  # a Growth, once training starts

    def _start(
        self, model: nn.Module, optimizer: Any, scheduler: Any, decisions: int, loader: Any,
        inputs: Callable[[Any], Any],
    ) -> None:  # fmt: skip
        if decisions < 2:
            raise ValueError(f"{decisions} evaluations are planned; evaluate more often")
        with untouched_randomness(model, loader):
            example = moved(inputs(next(iter(loader))), next(model.parameters()).device)
        options = {"example": example, "decisions": decisions, "metric": self._metric}
        options |= self._options
        self.growth = Growth(
            model, optimizer, scheduler=scheduler, ranks=connected_ranks(), **options
        )

    def _decide(self, metrics: Mapping[str, Any]) -> None:
        if self.growth is None or self.growth.is_closed:
            return
        if self._metric not in metrics:
            raise ValueError(f"no metric {self._metric!r} is reported, only {sorted(metrics)}")
        value = float(metrics[self._metric])
        self._last = math.exp(-value) if "loss" in self._metric else value
        self.growth.decide(self._last)

    def on_train_end(self, *given: Any, **named: Any) -> None:
        if self.growth is not None and not self.growth.is_closed and self._last is not None:
            self.growth.close(self._last)


def trainer_callback(*, metric: str = "eval_loss", **options: Any) -> Any:
    """A callback for `transformers.Trainer`; `options` are those of `Growth`.

    `metric` is a name in the Trainer's metrics, 0 to 1, higher is better; of a loss exp(-loss) is
    used. `callback.growth` is the `Growth`. Set `eval_strategy`, for example to "epoch".
    """
    from transformers import TrainerCallback

    class GrowthCallback(_Decisions, TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if args.load_best_model_at_end:
                raise ValueError(
                    "load_best_model_at_end=True would load weights without seeds; switch it off: "
                    "growth itself returns the best network"
                )
            by_steps = args.eval_strategy == "steps"
            planned = state.max_steps // state.eval_steps if by_steps else state.num_train_epochs
            optimizer, scheduler = given["optimizer"], given["lr_scheduler"]
            optimizer = getattr(optimizer, "optimizer", optimizer)  # inside that of accelerate
            scheduler = getattr(scheduler, "scheduler", scheduler)
            planned = 0 if args.eval_strategy == "no" else int(planned)
            loader = given["train_dataloader"]
            self._start(given["model"], optimizer, scheduler, planned, loader, inputs=dict)

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            """Clip seeds too; the Trainer has clipped the model."""
            if args.max_grad_norm:
                nn.utils.clip_grad_norm_(self.growth.parameters(), args.max_grad_norm)

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.growth.after_step()

        def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self._decide(given["metrics"])

    return GrowthCallback(metric, options)


def lightning_callback(
    network: str,
    *,
    metric: str = "val_loss",
    decisions: int | None = None,
    inputs: Callable[[Any], Any] = lambda batch: batch[0],
    **options: Any,
) -> Any:
    """A callback for a Lightning `Trainer`; `options` are those of `Growth`.

    `network` names the attribute of the LightningModule that grows. `inputs` maps a training batch to
    its inputs. `metric` is a logged name, as for `trainer_callback`. `decisions` is the number of
    validations; by default one per epoch.
    """
    package = "lightning.pytorch" if find_spec("lightning") else "pytorch_lightning"
    base: Any = import_module(package).Callback

    class GrowthCallback(_Decisions, base):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            if len(trainer.optimizers) != 1:
                raise ValueError(f"{len(trainer.optimizers)} optimizers; growth needs exactly one")
            model, configs = pl_module.get_submodule(network), trainer.lr_scheduler_configs
            scheduler = configs[0].scheduler if configs else None
            planned = _validations(trainer) if decisions is None else decisions
            loader = trainer.train_dataloader
            self._start(model, trainer.optimizers[0], scheduler, planned, loader, inputs)

        def on_train_batch_end(self, trainer: Any, *given: Any) -> None:
            if trainer.global_step > self._steps:  # not while gradients accumulate
                self._steps = trainer.global_step
                self.growth.after_step()

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            if not trainer.sanity_checking:
                self._decide(trainer.callback_metrics)

    return GrowthCallback(metric, options)


def _validations(trainer: Any) -> int:
    """How many validations a Lightning `Trainer` plans."""
    epochs, every = trainer.max_epochs, trainer.check_val_every_n_epoch
    if every is None or epochs is None or epochs < 0:
        raise ValueError(
            f"max_epochs={epochs} and check_val_every_n_epoch={every} do not say how often the "
            "model is validated; give decisions=, the number of validations"
        )
    return int(epochs // every)

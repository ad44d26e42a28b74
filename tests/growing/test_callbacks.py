"""Growth in the Trainer of transformers and in Lightning, with the real packages if installed."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.growing.callbacks import _validations
from esper.surgery.sites import count_params
from support.models import Script, blobs, germinate, mlp

EPOCHS = 6
X, Y = blobs()


def test_the_trainer_of_transformers_grows_a_model(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x, labels=None):
            logits = self.net(x)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    rows = [{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)]
    callback = esper.trainer_callback(
        metric="eval_accuracy", controller=Script(germinate(blueprint=1)), rent=0.0
    )
    arguments = transformers.TrainingArguments(
        tmp_path, num_train_epochs=EPOCHS, eval_strategy="epoch", report_to=[], use_cpu=True,
        disable_tqdm=True, learning_rate=1e-2, save_strategy="no", logging_strategy="no",
    )  # fmt: skip
    trainer = transformers.Trainer(
        Classifier(), arguments, train_dataset=rows, eval_dataset=rows, callbacks=[callback],
        compute_metrics=lambda p: {"accuracy": (p.predictions.argmax(1) == p.label_ids).mean()},
    )  # fmt: skip
    trainer.train()
    growth = callback.growth
    assert growth.is_closed
    assert len(growth.ledger.steps) == EPOCHS
    assert growth.optimizer_steps == trainer.state.global_step
    born = growth.ledger.seeds
    assert len(born) == 1
    assert trainer.evaluate()["eval_accuracy"] > 0.5  # after the run it decides nothing
    assert count_params(growth.plain_model()) == growth.params


def test_settings_of_the_trainer_that_do_not_fit_are_refused(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    rows = [{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)]
    for settings, reason in (
        ({"eval_strategy": "no"}, "evaluate more often"),
        ({"eval_strategy": "epoch", "load_best_model_at_end": True}, "load_best_model_at_end"),
    ):
        arguments = transformers.TrainingArguments(
            tmp_path, num_train_epochs=2, report_to=[], use_cpu=True, save_strategy=settings["eval_strategy"], **settings
        )  # fmt: skip
        trainer = transformers.Trainer(
            mlp(), arguments, train_dataset=rows, eval_dataset=rows,
            callbacks=[esper.trainer_callback()],
        )  # fmt: skip
        with pytest.raises(ValueError, match=reason):
            trainer.train()


def test_lightning_settings_that_plan_no_number_of_validations_ask_for_decisions():
    assert _validations(SimpleNamespace(max_epochs=9, check_val_every_n_epoch=2)) == 4
    for epochs, every in ((9, None), (-1, 1), (None, 1)):
        with pytest.raises(ValueError, match=r"give decisions="):
            _validations(SimpleNamespace(max_epochs=epochs, check_val_every_n_epoch=every))


@pytest.mark.filterwarnings("ignore")  # of Lightning about its own settings
def test_lightning_grows_a_network(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def training_step(self, batch, index):
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch, index):
            self.log("val_accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

    callback = esper.lightning_callback(
        "net", metric="val_accuracy", controller=Script(germinate(blueprint=1)), rent=0.0
    )
    loader = DataLoader(TensorDataset(X, Y), 16)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS, callbacks=[callback], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
        accumulate_grad_batches=2, default_root_dir=tmp_path,
    )  # fmt: skip
    module = Module()
    trainer.fit(module, loader, loader)
    growth = callback.growth
    assert growth.is_closed
    assert len(growth.ledger.steps) == EPOCHS
    assert growth.optimizer_steps == trainer.global_step
    assert len(growth.ledger.seeds) == 1
    rates = {group["lr"] for group in growth.optimizer.param_groups}
    assert len(rates) == 1  # seeds follow the schedule
    assert count_params(growth.plain_model()) == growth.params

"""Small runs of growth in a loop of one's own."""

import torch
import torch.nn.functional as F

from esper import Growth
from esper.leyline.stages import SeedStage
from support.models import Script, blobs, build

X, Y = blobs()


def new_growth(controller=None, name="mlp", decisions=8, measures_itself=False, **options):
    model, example = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    controller = controller or Script()
    if measures_itself:
        options |= dict(
            val_loader=[(X, Y)],
            score=lambda batch: (model(batch[0]).argmax(1) == batch[1]).float(),
        )
    return Growth(
        model, optimizer, example=example, controller=controller, decisions=decisions, **options
    )


def train(growth: Growth, steps: int = 3) -> None:
    for step in range(steps):
        rows = slice(16 * step % 96, 16 * step % 96 + 16)
        growth.optimizer.zero_grad()
        loss = F.cross_entropy(growth.model(X[rows]), Y[rows])
        loss.backward()
        growth.optimizer.step()
        growth.after_step(loss)


def stages(growth: Growth) -> list[SeedStage]:
    return [SeedStage(int(stage)) for stage in growth._network.states.stage[0]]


def frozen_state(growth: Growth) -> list[torch.Tensor]:
    """The model's weights and their optimiser state, copied."""
    tensors = [*growth.model.state_dict().values()]
    for parameter in growth.model.parameters():
        tensors += [v for v in growth.optimizer.state[parameter].values() if torch.is_tensor(v)]
    return [tensor.clone() for tensor in tensors]

"""A model that is compiled in place: compiled again when its seeds change, and only then."""

import pytest
import torch
from torch import Tensor, nn

import esper
from esper.leyline.constants import BlendStyle
from esper.surgery.slots import blend_one

X = torch.randn(120, 10, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] * X[:, 1] > 0).long()
STEPS = 10  # between two decisions


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(10, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(torch.relu(self.norm(self.first(x)))))


class Compiler:
    """A backend that counts the graphs."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]):
        self.graphs += 1
        return graph.forward


@pytest.fixture
def own_settings():
    config = torch._dynamo.config
    with config.patch(skip_nnmodule_hook_guards=True, recompile_limit=config.recompile_limit):
        yield
    torch.compiler.reset()


def grown(compiler: Compiler | None) -> tuple[list[tuple[str, int]], Tensor]:
    """Each decision with the graphs compiled so far, and the outputs at the end."""
    torch.manual_seed(0)
    model = Net()
    if compiler is not None:
        model.compile(backend=compiler)
    model(X[:5])  # compiled before growth begins
    if compiler is not None:
        compiler.graphs = 0
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    growth = esper.Growth(
        model,
        optimizer,
        example=X[:20],
        decisions=9,
        val_loader=[(X[80:], Y[80:])],
        score=lambda batch: (model(batch[0]).argmax(1) == batch[1]).float(),
        sites=["first"],
    )
    decisions = []
    for _ in range(9):
        for step in range(STEPS):
            rows = slice(8 * step, 8 * step + 8)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(X[rows]), Y[rows]).backward()
            optimizer.step()
            growth.after_step()
        graphs = 0 if compiler is None else compiler.graphs
        made = growth.decide()
        decisions.append(("close" if made is None else made.op, graphs))
    return decisions, growth.plain_model().eval()(X)


def test_a_model_compiled_in_place_is_compiled_once_for_each_change_of_its_seeds(own_settings):
    decisions, output = grown(Compiler())
    most = 1  # the first graph
    for op, graphs in decisions:
        assert graphs <= most, decisions
        most = graphs + (op in ("GERMINATE", "PRUNE"))
    assert ("GERMINATE", 1) in decisions
    assert decisions[-1][1] > 1
    eager, expected = grown(None)
    assert [op for op, _ in eager] == [op for op, _ in decisions]
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("style", list(BlendStyle))
def test_alpha_as_a_tensor_blends_as_a_number_does(style):
    x, seed = torch.randn(2, 3, 5).unbind()
    blended = blend_one(x, seed, torch.tensor(0.3), style)
    torch.testing.assert_close(blended, blend_one(x, seed, 0.3, style))

"""Sites: found where everything flows through, and nothing of the model is changed by looking."""

import re

import pytest
import torch
from torch import Tensor, nn

from esper.leyline.constants import SiteKind
from esper.surgery.inputs import forward
from esper.surgery.sites import count_macs, find_sites, site_table, trace_sites
from support.models import MODELS, TokenEncoder, block_sites, build, mlp


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("residual", ["stem.2", "layer1.0", "layer1.1", "layer2.0"]),
        ("mlp", ["1", "5"]),
        ("series", ["1", "4"]),
        (
            "encoder",
            [
                "embedding",
                "encoder.layers.0.norm1",
                "encoder.layers.0",
                "encoder.layers.1.norm1",
                "encoder.layers.1",
            ],
        ),
    ],
)
def test_the_places_offered(name, expected):
    assert [site.name for site in block_sites(*build(name))] == expected


def test_kinds_and_shapes():
    found = {
        name: [(site.kind, site.shape) for site in block_sites(*build(name))][-1] for name in MODELS
    }
    assert found == {
        "residual": (SiteKind.IMAGE, (8, 4, 4)),
        "mlp": (SiteKind.VECTOR, (6,)),
        "series": (SiteKind.SERIES, (4, 4)),
        "encoder": (SiteKind.TOKENS, (7, 8)),
    }


def output_with_transplant(model: nn.Module, name: str, donor: Tensor, inputs: Tensor) -> Tensor:
    """The model on `inputs`, with a module's output taken from its run on `donor`."""
    kept: list[Tensor] = []
    module = model.get_submodule(name)
    handle = module.register_forward_hook(lambda m, a, output: kept.append(output))
    model(donor)
    handle.remove()
    handle = module.register_forward_hook(lambda m, a, output: kept[0])
    try:
        return model(inputs)
    finally:
        handle.remove()


@pytest.mark.parametrize("name", list(MODELS))
def test_everything_flows_through_a_site(name):
    """With a site's output from another batch, the whole output is that of the other batch."""
    model, inputs = build(name)
    donor = MODELS[name][1]()
    model.eval()
    with torch.no_grad():
        expected = model(donor)
        for site in block_sites(model, inputs):
            given = output_with_transplant(model, site.name, donor, inputs)
            torch.testing.assert_close(given, expected)
        if name == "residual":  # and not so where a skip connection goes around
            given = output_with_transplant(model, "layer1.0.bn2", donor, inputs)
            assert not torch.allclose(given, expected)


@pytest.mark.parametrize("name", list(MODELS))
def test_tracing_changes_nothing(name):
    model, example = build(name)
    model.train()
    next(model.children()).eval()
    frozen = next(model.parameters()).requires_grad_(False)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    randomness = torch.get_rng_state()
    block_sites(model, example)
    count_macs(model, example)
    assert torch.equal(torch.get_rng_state(), randomness)
    assert [module.training for module in model.modules()] == modes
    assert not frozen.requires_grad
    assert not any(module._forward_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])


def test_multiply_adds_by_hand():
    model, example = build("series")
    expected = 8 * (1 * 4 * 3) + 4 * (4 * 4 * 3) + 16 * 3
    assert count_macs(model, example) == expected


def test_multiply_adds_of_attention_are_counted():
    model, example = build("encoder")
    per_token = 8 * 24 + 8 * 8 + 2 * 8 * 16  # projections and feed-forward
    attention = 2 * 7 * 7 * 8
    assert count_macs(model, example) == 2 * (7 * per_token + attention) + 8 * 3


@pytest.mark.parametrize(("layer", "gates"), [(nn.LSTM, 4), (nn.GRU, 3)])
def test_multiply_adds_of_recurrent_layers_are_counted(layer, gates):
    model = layer(5, 16, batch_first=True)
    assert count_macs(model, torch.randn(4, 7, 5)) == 7 * gates * 16 * (5 + 16)


def test_channels_last_images_are_tokens():
    class Permuting(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.mix, self.head = nn.Conv2d(1, 6, 3), nn.Linear(6, 6), nn.Linear(6, 2)

        def forward(self, x):
            return self.head(self.mix(self.conv(x).movedim(1, -1)).mean((1, 2)))

    sites = block_sites(Permuting(), torch.randn(2, 1, 8, 8))
    assert [(s.name, s.kind, s.width) for s in sites] == [
        ("conv", SiteKind.IMAGE, 6),
        ("mix", SiteKind.TOKENS, 6),
    ]
    assert sites[1].tokens == 36


def test_where_lengths_differ_only_seeds_for_any_length_fit():
    model = nn.Sequential(nn.Conv1d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten())
    model.append(nn.Linear(4, 2))
    fixed, varying = (
        {site.name: site for site in block_sites(model, torch.randn(2, 1, 16), *others)}
        for others in ((), (torch.randn(2, 1, 20),))
    )
    assert list(fixed) == list(varying) == ["1"]
    lost = set(fixed["1"].blueprints()) - set(varying["1"].blueprints())
    assert {blueprint.name for blueprint in lost} == {"mixer", "attention"}
    assert "(4, any)" in site_table([varying["1"]])


def test_another_example_rules_out_what_does_not_keep_its_width():
    class Widths(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.part, self.last = nn.Linear(4, 4), nn.Identity(), nn.Linear(1, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.part(self.first(x)[:, : len(x)]).mean(1, keepdim=True))

    trace = trace_sites(Widths(), torch.randn(3, 4), torch.randn(2, 4))
    assert "changes shape: (3,), then (2,)" in trace.refused["part"]


def test_the_kind_of_a_site_can_be_named():
    """Channels first, as many as the image is wide: the layer norm before it suggests tokens."""

    class Confusing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Conv2d(1, 8, 1), nn.Identity()
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(self.first(x).movedim(1, -1).movedim(-1, 1))
            return self.head(x.mean((2, 3)))

    model, x = Confusing(), torch.randn(2, 1, 8, 8)
    assert block_sites(model, x)[-1].kind == SiteKind.IMAGE
    site = find_sites(model, x, kind={"norm": "tokens"})[0]
    assert (site.name, site.kind, site.width, site.tokens) == ("norm", SiteKind.TOKENS, 8, 64)


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("series", r"kind='series'; give a dict"),
        ({"1": "picture"}, r"'picture'}; there are \['vector', 'series', 'image', 'tokens'\]"),
        ({"1": "image"}, r"has shape \(2, 4, 14\); this kind has 4 axes"),
        ({"4": "tokens"}, r"has shape \(2, 2\); this kind has 3 or more axes"),
        ({"conv": "series"}, r"'conv': 'series'}: it is not called; did you mean"),
    ],
)
def test_a_kind_that_cannot_be_is_an_error(kind, problem):
    model = nn.Sequential(nn.Conv1d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten())
    model.append(nn.Linear(4, 2))
    with pytest.raises(ValueError, match=problem):
        find_sites(model, torch.randn(2, 1, 16), kind=kind)


def test_tokens_may_vary_in_number():
    model = TokenEncoder()
    sites = block_sites(model, torch.randint(0, 20, (2, 5)), torch.randint(0, 20, (3, 9)))
    assert len(sites) == 5


def test_sites_are_chosen_and_excluded_by_name_or_by_what_is_above_them():
    trace = trace_sites(*build("residual"))
    names = lambda *args: [s.name for s in trace.choose(*args) if s.pair is None]  # noqa: E731
    assert names(["layer1"], ()) == ["layer1.0", "layer1.1"]
    assert names(None, ["layer1"]) == ["stem.2", "layer2.0"]
    assert names(["layer1.0.conv1"], ()) == ["layer1.0.conv1"]  # possible, though not offered
    with pytest.raises(ValueError, match="no site is left"):
        names(["stem.2"], ["stem"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("layer2.O", "no module 'layer2.O'; did you mean 'layer2.0'?"),
        ("layer1.0.relu", "it is called 2 times"),
        ("fc2", "did you mean 'fc'?"),
    ],
)
def test_a_wrong_name_is_told_what_is_there(name, message):
    trace = trace_sites(*build("residual"))
    with pytest.raises(ValueError, match=re.escape(message)):
        trace.choose([name], ())


def test_a_model_without_a_site_is_told_what_was_looked_at():
    model = nn.Sequential(nn.Flatten(), nn.Linear(5, 3))
    with pytest.raises(ValueError, match="the model has no site") as error:
        trace_sites(model, torch.randn(2, 5)).choose(None, ())
    assert "0: no layer with weights comes before it" in str(error.value)
    assert "1: no layer with weights reads it" in str(error.value)


def test_an_output_without_a_tensor_is_refused():
    class Silent(nn.Linear):
        def forward(self, x):
            return float(super().forward(x).detach().sum())

    with pytest.raises(ValueError, match="returns float without a tensor"):
        trace_sites(Silent(4, 2), torch.randn(2, 4))


def test_inputs_without_a_tensor_are_refused():
    with pytest.raises(ValueError, match="hold no tensor with a batch axis"):
        block_sites(mlp(), "not a batch")


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # torch's own
def test_a_compiled_model_is_refused():
    with pytest.raises(ValueError, match="the model is compiled"):
        block_sites(torch.compile(mlp()), torch.randn(2, 5))


def test_models_take_tensors_tuples_and_dicts():
    class TwoInputs(nn.Linear):
        def forward(self, x, y):
            return super().forward(x + y)

    model, x, y = TwoInputs(2, 3), torch.randn(4, 2), torch.randn(4, 2)
    assert torch.equal(forward(model, (x, y)), forward(model, {"x": x, "y": y}))


def test_the_table_names_every_site_and_its_costs():
    sites = block_sites(*build("mlp"))
    table = site_table(sites).splitlines()
    assert len(table) == 3
    assert table[1].split()[:3] == ["1", "ReLU", "VECTOR"]
    assert "dense 42" in table[1]  # 6 * 6 + 6


def test_a_layer_with_one_output_is_a_layer():
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 1))
    assert [site.name for site in block_sites(model, torch.randn(2, 5))] == ["1", "3"]
    first = nn.Sequential(nn.Conv1d(1, 4, 1), nn.Conv1d(4, 4, 3), nn.Flatten(), nn.Linear(24, 3))
    assert [site.name for site in block_sites(first, torch.randn(2, 1, 8))] == ["0", "1"]


@pytest.mark.parametrize(
    "normed", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm]
)
def test_what_makes_weights_is_no_site(normed):
    layers = [normed(nn.Conv1d(1, 4, 3, padding=1)), normed(nn.Conv1d(4, 4, 3, padding=1))]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 3))
    assert [site.name for site in block_sites(model, torch.randn(4, 1, 8))] == ["0", "1"]


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize(
    ("reads_last_state", "expected"), [(True, ["mix"]), (False, ["rnn", "mix"])]
)
def test_a_recurrent_layer_is_a_site_where_its_first_output_is_used(
    layer, reads_last_state, expected
):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.mix, self.head = layer(5, 6), nn.Linear(6, 6), nn.Linear(6, 2)

        def forward(self, x):
            outputs, state = self.rnn(x.transpose(0, 1))
            state = state[0] if isinstance(state, tuple) else state
            return self.head(self.mix(state[-1] if reads_last_state else outputs[-1]))

    assert [site.name for site in block_sites(Recurrent(), torch.randn(3, 7, 5))] == expected


def test_a_layer_whose_output_is_not_read_is_no_site():
    class LastState(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.GRU(5, 8, batch_first=True), nn.Linear(8, 2)

        def forward(self, x):
            return self.head(self.rnn(x)[1][-1])

    trace = trace_sites(LastState(), torch.randn(3, 7, 5))
    with pytest.raises(ValueError, match="rnn: no layer with weights reads it"):
        trace.choose(None, ())


def test_a_model_of_skip_connections_offers_its_layers():
    class Dense(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.head = nn.Linear(5, 5), nn.Linear(10, 5), nn.Linear(15, 2)

        def forward(self, x):
            x = torch.cat((x, self.a(x)), 1)
            return self.head(torch.cat((x, self.b(x)), 1))

    assert [site.name for site in block_sites(Dense(), torch.randn(2, 5))] == ["a", "b"]


class Frozen(nn.Module):
    """Takes no gradients through its encoder, which pads."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        with torch.no_grad():
            hidden = self.encoder(x, src_key_padding_mask=x.new_tensor([[0, 0, 1]] * len(x)).bool())
        return self.head(self.body(hidden[:, 0]))


def test_nothing_grows_where_no_gradient_comes():
    trace = trace_sites(Frozen(), torch.randn(4, 3, 8))
    assert [site.name for site in trace.sites if site.pair is None] == ["body"]
    for name in ("encoder", "encoder.layers.1", "encoder.layers.1.norm1"):
        with pytest.raises(ValueError, match="calls it without gradients"):
            trace.choose([name], ())
    assert torch.backends.mha.get_fastpath_enabled()


def test_sites_are_keys_whatever_is_between_two_layers():
    class Dropping(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[1](nn.functional.dropout(self[0](x), p=0.1, training=self.training))

    sites = find_sites(Dropping(nn.Linear(4, 8), nn.Linear(8, 3)), torch.randn(2, 4))
    assert "0->1" in {site: site.name for site in sites}.values()


def test_pairs_of_one_width_are_different_sites():
    layers = [layer for _ in range(2) for layer in (nn.Linear(8, 8), nn.ReLU())]
    sites = find_sites(nn.Sequential(*layers, nn.Linear(8, 8)), torch.randn(2, 8))
    first, second = (site.pair for site in sites if site.pair is not None)
    assert first.width == second.width
    assert first != second
    assert len({first, second}) == 2

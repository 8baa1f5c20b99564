"""Recurrent layers: torch's own results for each option, and the casts of a linear layer in their products."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import lowprec as lp
from lowprec.linear import Spec, apply_linear

# tf32 rounds operands to 10 bits; with operands that have no more, its products are plain fp32 ones
EXACT = "tf32"
OPTIONS: list[tuple[type[nn.Module], dict[str, Any]]] = [
    (nn.LSTM, {}),
    (nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    (nn.LSTM, {"proj_size": 3, "num_layers": 2, "bias": False}),
    (nn.LSTM, {"proj_size": 3, "bidirectional": True}),
    (nn.GRU, {"num_layers": 2}),
    (nn.GRU, {"bidirectional": True, "batch_first": True}),
    (nn.RNN, {"nonlinearity": "relu"}),
    (nn.RNN, {"bidirectional": True, "num_layers": 2}),
]


def _pair(cls: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = cls(5, 6, **options)
    low = copy.deepcopy(plain)
    lp.apply(low, EXACT)
    assert type(low).__name__ == f"LowPrec{cls.__name__}" or cls.__name__ in [c.__name__ for c in type(low).__mro__]
    return plain, low


def _close(a: Any, b: Any) -> None:
    """Equal up to the 10 bits that tf32 leaves of inputs, states and weights."""
    if isinstance(a, tuple):
        for x, y in zip(a, b, strict=True):
            _close(x, y)
    else:
        assert a.shape == b.shape
        torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=4e-3)


@pytest.mark.filterwarnings("ignore:LSTM with projections")  # torch's own
@pytest.mark.parametrize(("cls", "options"), OPTIONS, ids=str)
def test_every_option_is_torchs(cls: Any, options: dict[str, Any]) -> None:
    plain, low = _pair(cls, options)
    x = torch.randn(4, 7, 5)
    y, z = plain(x), low(x)
    _close(y, z)
    y[0].square().sum().backward()
    z[0].square().sum().backward()
    for p, q in zip(plain.parameters(), low.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=0.02, atol=0.02 * float(p.grad.abs().max()))
    single = torch.randn(7, 5)
    _close(plain(single), low(single))
    _close(plain(x, y[1]), low(x, z[1]))


@pytest.mark.parametrize("enforce_sorted", [True, False])
@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU])
def test_packed_sequences(cls: Any, enforce_sorted: bool) -> None:
    plain, low = _pair(cls, {"num_layers": 2, "bidirectional": True})
    lengths = [7, 4, 1] if enforce_sorted else [4, 7, 1]
    packed = pack_padded_sequence(torch.randn(7, 3, 5), torch.tensor(lengths), enforce_sorted=enforce_sorted)
    y, z = plain(packed), low(packed)
    _close(pad_packed_sequence(y[0])[0], pad_packed_sequence(z[0])[0])
    _close(y[1], z[1])


@pytest.mark.parametrize("cls", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells(cls: Any) -> None:
    plain, low = _pair(cls, {})
    x = torch.randn(3, 5)
    y, z = plain(x), low(x)
    _close(y, z)
    _close(plain(x, y), low(x, z))
    _close(plain(x[0]), low(x[0]))


@pytest.mark.parametrize("name", ["fp8", "mxfp8", "int8", "fp16"])
def test_the_products_are_a_linear_layers(name: str) -> None:
    torch.manual_seed(0)
    low: Any = nn.LSTM(16, 16)
    x = torch.randn(3, 2, 16)
    lp.apply(low, name)
    y, (h, c) = low(x)
    recipe = lp.recipe(name)
    spec = Spec.of(recipe, "cpu")
    state, cell = torch.zeros(2, 16), torch.zeros(2, 16)
    ins = apply_linear(x.view(6, 16), low.weight_ih_l0, low.bias_ih_l0, spec).view(3, 2, 64)
    for t in range(3):
        gates = ins[t].float() + apply_linear(state, low.weight_hh_l0, low.bias_hh_l0, spec).float()
        i, f, g, o = gates.chunk(4, 1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        state = o.sigmoid() * cell.tanh()
    low_dtype = torch.float16 if name == "fp16" else torch.bfloat16
    assert y.dtype == h.dtype == low_dtype and c.dtype == torch.float32
    assert torch.equal(y[-1], state.to(low_dtype)) and torch.equal(c[0], cell)


def test_rnn_high_is_torchs_own_layer_in_fp32() -> None:
    plain = nn.LSTM(5, 6)
    low = copy.deepcopy(plain)
    lp.apply(low, "fp8 rnn=high")
    x = torch.randn(4, 2, 5)
    assert torch.equal(plain(x)[0], low(x)[0])
    assert "rnn=high" in lp.plan(plain, "bf16 rnn=high").row("").note


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8-delayed", "mxfp8", "int8", "nvfp4"])
def test_an_lstm_trains(name: str) -> None:
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(4, 16, batch_first=True)
            self.head = nn.Linear(16, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(x)[0][:, -1])

    model = lp.apply(Net(), name)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    x = torch.randn(64, 6, 4)
    target = (x.sum((1, 2)) > 0).long()
    losses = []
    for _ in range(30):
        loss = nn.functional.cross_entropy(model(x).float(), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.6 * losses[0]

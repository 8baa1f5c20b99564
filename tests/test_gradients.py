"""Gradients stored in low precision as they are produced."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowprec import gradients
from lowprec.optim import AdamW


def _sink(rows: int, cols: int, form: str = "fp8") -> gradients.Sink:
    return gradients.Sink(torch.zeros(rows, cols), form)


@pytest.mark.parametrize("form", ["fp8", "fp8-e5m2", "bf16", "fp16"])
def test_a_product_is_stored_to_the_formats_precision(form: str) -> None:
    torch.manual_seed(0)
    go, x = torch.randn(40, 30), torch.randn(40, 700)
    sink = _sink(30, 700, form)
    sink.add_product(go, x, 0.5)
    exact = 0.5 * go.t() @ x
    got = sink.dense()
    assert got is not None
    eps = {"fp8": 2.0**-4, "fp8-e5m2": 2.0**-3, "bf16": 2.0**-8, "fp16": 2.0**-11}[form]
    error, size = (got - exact).abs(), exact.abs().amax(1, keepdim=True)
    assert (error <= eps * exact.abs() * 1.01 + size * 1e-4).all()


def test_chunks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    go, x = torch.randn(16, 64), torch.randn(16, 300)
    whole = _sink(64, 300)
    whole.add_product(go, x, torch.rand(64, 1))
    scale = torch.rand(64, 1)
    results = []
    for chunk in (1 << 20, 300 * 7):
        monkeypatch.setattr(gradients, "CHUNK", chunk)
        sink = _sink(64, 300)
        for _ in range(3):
            sink.add_product(go, x, scale)
        results.append(sink.dense())
    assert torch.equal(results[0], results[1])


def test_accumulation_over_micro_batches_is_unbiased_and_never_saturates() -> None:
    torch.manual_seed(0)
    n, total, sink = 200, torch.zeros(4, 512), _sink(4, 512)
    for k in range(n):
        part = torch.randn(4, 512) * 1e-3 + 1e-2
        total += part
        sink.add(part) if k % 2 else sink.add_product(torch.eye(4), part)
    got = sink.dense()
    assert got is not None
    assert abs((got / total).mean().item() - 1) < 0.01  # small contributions to a large sum are not lost
    nearest = torch.zeros(4, 512)
    for _ in range(n):  # what rounding to nearest would do
        nearest = (nearest + 1e-2).to(torch.float8_e4m3fn).float()
    assert nearest.mean() < 0.5 * total.mean()


def test_stats_and_specials() -> None:
    sink = _sink(3, 512)
    assert sink.stats() == (0, 0, 0.0)
    g = torch.ones(3, 512)
    sink.add(g)
    assert sink.stats().sum_of_squares == pytest.approx(3 * 512, rel=1e-6)
    sink.zero()
    g[1, 5] = float("inf")
    sink.add(g)
    assert sink.stats().nan == 256  # the block that holds it
    sink.zero()
    sink.add(torch.zeros(3, 512))
    assert sink.stats() == (0, 0, 0.0)


def test_a_gradient_from_autograd_ends_in_the_store_and_updates_the_weight() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(512, 16, bias=False)
    (sink,) = gradients.install(layer.parameters())
    optimizer = AdamW(layer.parameters(), lr=0.1)
    optimizer.step()  # no gradient yet
    before = layer.weight.detach().clone()
    x = torch.randn(8, 512)
    layer(x).sum().backward()
    assert layer.weight.grad is None and sink.filled
    optimizer.step()
    moved = (layer.weight - before * (1 - 0.1 * 0.01)).detach()
    expected = -0.1 * torch.sign(x.sum(0)).expand(16, 512)
    assert (moved - expected).abs().median() < 1e-3
    optimizer.zero_grad()
    assert not sink.filled
    gradients.remove(layer.parameters())
    layer(x).sum().backward()
    assert layer.weight.grad is not None


def test_wrong_shapes_and_names() -> None:
    with pytest.raises(ValueError, match="did you mean 'fp8'"):
        gradients.install([nn.Parameter(torch.zeros(2, 2))], "fp9")
    with pytest.raises(ValueError, match="do not make"):
        _sink(3, 4).add_product(torch.zeros(2, 3), torch.zeros(2, 5))
    with pytest.raises(ValueError, match="shape"):
        _sink(3, 4).add(torch.zeros(4, 3))

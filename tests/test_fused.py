"""Fused attention, cross-entropy and norms: right against fp64, behind plain torch calls, eager and compiled."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowprec as lp
from lowprec import attention, policy
from lowprec.kernels import attention as kernel
from lowprec.recipes import recipe

HALF_BF16 = 2.0**-8  # relative error of one rounding to bf16, with room for the scores' own


def close(found: Tensor, expected: Tensor, bound: float) -> None:
    """Relative to the largest value of the whole: roundings of sums and probabilities are relative to those."""
    error = (found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-6)
    assert error < bound, float(error)


def grads(out: Tensor, inputs: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, inputs, grad.to(out.dtype))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (17, 17), (140, 140), (300, 300), (20, 33), (33, 20)])
@pytest.mark.parametrize("values", ["low", "high"])
def test_attention_against_fp64(queries: int, keys: int, causal: bool, values: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 16).bfloat16().requires_grad_() for n in (queries, keys, keys))
    wide = tuple(x.detach().double().requires_grad_() for x in (q, k, v))
    grad = torch.randn(2, 3, queries, 16)
    found = lp.scaled_dot_product_attention(q, k, v, is_causal=causal, values=values)
    expected = F.scaled_dot_product_attention(*wide, is_causal=causal)
    assert found.dtype == torch.bfloat16
    close(found, expected, 4 * HALF_BF16)
    for a, b in zip(grads(found, (q, k, v), grad), grads(expected, wide, grad)):
        assert a.dtype == torch.bfloat16
        close(a, b, 6 * HALF_BF16)


def test_fp16_attention_multiplies_exactly() -> None:
    q, k, v = (torch.randn(1, 2, 40, 8).half() for _ in range(3))
    found = lp.scaled_dot_product_attention(q, k, v, is_causal=True, compute="fp16")
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    assert found.dtype == torch.float16
    close(found, expected, 2.0**-10)


@pytest.mark.parametrize("kind", ["bool", "float", "head", "key"])
def test_attention_masks(kind: str) -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 4, n, 8).bfloat16() for n in (9, 21, 21))
    shape = {"bool": (9, 21), "float": (2, 4, 9, 21), "head": (1, 4, 9, 21), "key": (2, 1, 1, 21)}[kind]
    mask = torch.rand(shape) < 0.7
    mask[..., 0] = True
    if kind == "float":
        mask = torch.randn(shape)
    expected = F.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), mask if mask.dtype == torch.bool else mask.double()
    )
    close(lp.scaled_dot_product_attention(q, k, v, mask), expected, 4 * HALF_BF16)


def test_grouped_heads_and_small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_TILE_BYTES", 4096)
    monkeypatch.setattr(kernel, "_BACK_QUERIES", 16)
    q, k, v = (torch.randn(2, h, 50, 8).bfloat16().requires_grad_() for h in (6, 2, 2))
    wide = tuple(x.detach().double().requires_grad_() for x in (q, k, v))
    grad = torch.randn(2, 6, 50, 8)
    found = lp.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    expected = F.scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True)
    close(found, expected, 4 * HALF_BF16)
    for a, b in zip(grads(found, (q, k, v), grad), grads(expected, wide, grad)):
        close(a, b, 6 * HALF_BF16)


def test_what_attention_leaves_to_torch() -> None:
    q = torch.randn(1, 1, 4, 8).bfloat16()
    assert "dropout" in attention.why_not(q, q, q, dropout_p=0.5)
    assert "flash" in attention.why_not(q, q.expand(1, 1, 4, 8).repeat(1, 1, 500, 1), q)
    with pytest.raises(ValueError, match="already is a mask"):
        lp.scaled_dot_product_attention(q, q, q, torch.ones(4, 4, dtype=torch.bool), is_causal=True)
    long = torch.randn(1, 1, 1600, 8).bfloat16()
    close(lp.scaled_dot_product_attention(long, long, long), F.scaled_dot_product_attention(long, long, long), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("reduction", "smoothing"), list(itertools.product(["none", "mean", "sum"], [0.0, 0.1])))
def test_cross_entropy_against_fp64(reduction: str, smoothing: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(30, 77) * 4).to(dtype).requires_grad_()
    wide = logits.detach().double().requires_grad_()
    target = torch.randint(0, 77, (30,))
    target[3] = 5
    options = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": 5}
    found, expected = lp.cross_entropy(logits, target, **options), F.cross_entropy(wide, target, **options)
    assert found.dtype == torch.float32
    close(found, expected, 1e-6)
    grad = torch.randn_like(found)
    (a,), (b,) = grads(found, (logits,), grad), grads(expected, (wide,), grad)
    assert a.dtype == dtype
    close(a, b, {torch.float32: 1e-6, torch.bfloat16: HALF_BF16, torch.float16: 2.0**-10}[dtype])


def test_cross_entropy_leaves_the_rest_to_torch() -> None:
    logits, target = torch.randn(4, 5, 3), torch.randint(0, 5, (4, 3))
    assert torch.equal(lp.cross_entropy(logits, target), F.cross_entropy(logits, target))
    weight = torch.rand(5)
    assert torch.equal(
        lp.cross_entropy(logits[..., 0], target[:, 0], weight), F.cross_entropy(logits[..., 0], target[:, 0], weight)
    )
    with pytest.raises(ValueError, match="did you mean 'mean'"):
        lp.cross_entropy(logits, target, reduction="meen")


@pytest.mark.parametrize("rms", [False, True])
def test_norms_against_fp64(rms: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 50, 2, 20).add(1).requires_grad_()
    weight, bias = torch.randn(2, 20).requires_grad_(), torch.randn(2, 20).requires_grad_()
    wide = tuple(t.detach().double().requires_grad_() for t in (x, weight, bias))
    if rms:
        found = lp.rms_norm(x, (2, 20), weight, 1e-5)
        expected = F.rms_norm(wide[0], (2, 20), wide[1], 1e-5)
    else:
        found = lp.layer_norm(x, (2, 20), weight, bias)
        expected = F.layer_norm(wide[0], (2, 20), wide[1], wide[2])
    close(found, expected, 1e-6)
    n = 2 if rms else 3
    grad = torch.randn_like(found)
    for a, b in zip(grads(found, (x, weight, bias)[:n], grad), grads(expected, wide[:n], grad)):
        close(a, b, 1e-6)
    with pytest.raises(ValueError, match="normalized_shape"):
        lp.layer_norm(x, (3, 20))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.head = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 50)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(F.rms_norm(x + mixed, (32,))).flatten(0, 1), y.flatten())


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8"])
def test_behind_plain_calls_eager_and_compiled(name: str) -> None:
    torch.manual_seed(0)
    model, x, y = Small(), torch.randn(2, 24, 32), torch.randint(0, 50, (2, 24))
    exact = model(x, y)
    exact.backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    lp.apply(model, lp.plan(model, name))
    rows = {row.op: row for row in lp.trace_policy(model, {"x": x, "y": y}).rows}
    for op in ("scaled_dot_product_attention", "layer_norm", "rms_norm", "cross_entropy_loss"):
        assert "fused" in str(rows[op]), rows[op]
    loss = model(x, y)
    loss.backward()
    assert loss.dtype == torch.float32
    assert abs(float(loss.detach() - exact.detach())) < 0.02
    for p, e in zip(model.parameters(), expected):
        close(p.grad, e, 0.3 if name == "fp8" else 0.05)
    if name != "bf16":
        return  # tests of the linear layers compile those
    eager = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    again = torch.compile(model, fullgraph=True, backend="aot_eager")(x, y)
    again.backward()
    assert abs(float(again.detach() - loss.detach())) < 1e-5
    for p, e in zip(model.parameters(), eager):
        close(p.grad, e, 0.02)


def test_a_rule_of_ones_own_switches_the_fused_op_off() -> None:
    calls = []
    with policy.active(recipe("bf16"), "cpu"):
        x = F.layer_norm(torch.randn(4, 8), (8,))
        calls.append(x.dtype)
    assert calls == [torch.bfloat16]
    assert F.layer_norm(torch.randn(4, 8), (8,)).dtype == torch.float32

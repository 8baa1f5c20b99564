"""Convolutions: every product against the float64 convolution of operands cast here, independently and one by one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowprec as lp
from lowprec.kernels import scale as scale_kernels

BF16 = torch.bfloat16
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv2d": (lambda: nn.Conv2d(40, 24, 3, padding=1), (3, 40, 6, 5)),
    "stride": (lambda: nn.Conv2d(8, 40, 3, stride=2, dilation=2, padding=(2, 1), bias=False), (3, 8, 9, 8)),
    "groups": (lambda: nn.Conv2d(12, 18, 3, groups=3), (2, 12, 5, 6)),
    "depthwise": (lambda: nn.Conv2d(6, 12, 3, groups=6, padding=1), (2, 6, 5, 5)),
    "conv1d": (lambda: nn.Conv1d(40, 8, 5, padding="same"), (3, 40, 11)),
    "even": (lambda: nn.Conv1d(8, 8, 4, padding="same"), (3, 8, 11)),
    "reflect": (lambda: nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"), (2, 8, 5, 5)),
    "conv3d": (lambda: nn.Conv3d(4, 6, 2, stride=(1, 2, 1)), (2, 4, 4, 5, 4)),
    "transposed1d": (lambda: nn.ConvTranspose1d(8, 12, 4, stride=2, padding=1), (3, 8, 7)),
    "transposed2d": (
        lambda: nn.ConvTranspose2d(40, 12, 3, stride=2, padding=1, output_padding=1, groups=2),
        (3, 40, 4, 5),
    ),
    "transposed3d": (lambda: nn.ConvTranspose3d(4, 6, 2), (2, 4, 3, 3, 4)),
}
RECIPES = ["fp8", "fp8-rowwise", "fp8-block", "fp8-block-fp32", "msamp-O1", "mxfp8", "mxfp4", "mxint8", "nvfp4"]
RECIPES += ["int8", "int8-switchback", "int8-block", "int4-weight", "int1-weight", "fp16", "tf32"]


def _nearest(name: str) -> lp.Recipe:
    """The recipe with nothing drawn at random, under fp32 weights."""
    r = lp.recipe(name)
    plain = {
        role: lp.Gemm(*(None if c is None else c.replace(rounding="nearest") for c in (g.a, g.b)))
        for role, g in r.gemms.items()
    }
    return r.replace(weights="fp32", master=None, gradients="fp32", last_layer="same", high_last_fraction=0.0, **plain)


def _values(matrix: Tensor, cast: lp.Cast) -> Tensor:
    """A matrix cast along its last axis, as float64."""
    cast = cast.replace(hadamard=False)
    parts = scale_kernels.quantize(matrix.contiguous(), cast)
    return scale_kernels.dequantize(parts, cast, -1, torch.float32).double()


def _high(x: Tensor, compute: str) -> Tensor:
    if compute == "tf32":
        return lp.round_to(x.float(), "tf32").double()
    return x.to({"fp16": torch.float16, "bf16": BF16}[compute]).double()


def _data(x: Tensor, cast: lp.Cast | None, compute: str, positions: bool) -> Tensor:
    """The input or grad_output; positions: as grad_weight takes it, one channel after the other."""
    if cast is None:
        return _high(x, compute)
    if cast.scale == "tensor":
        return _values(x.reshape(1, -1), cast).view(x.shape)
    if not positions and cast.scale == "row":
        return torch.stack([_values(sample.reshape(1, -1), cast).view(sample.shape) for sample in x])
    if positions and cast.scale_format == "e4m3":  # one tensor scale above all blocks
        turned = x.movedim(1, 0)
        return _values(turned.reshape(x.shape[1], -1), cast).view(turned.shape).movedim(0, 1)
    if positions:
        channels = [_values(x[:, c].reshape(1, -1), cast).view(x[:, c].shape) for c in range(x.shape[1])]
        return torch.stack(channels, 1)
    return _values(x.movedim(1, -1).reshape(-1, x.shape[1]), cast).view(x.movedim(1, -1).shape).movedim(-1, 1)


def _weight(w: Tensor, cast: lp.Cast | None, compute: str, contracted: int, groups: int) -> Tensor:
    """The weight, summed over dimension `contracted` and the taps; each group and each tap on its own."""
    if cast is None:
        return _high(w, compute)
    if cast.scale == "tensor":
        return _values(w.reshape(1, -1), cast).view(w.shape)
    parts = []
    for part in w.chunk(groups):  # groups lie along dimension 0
        turned = part if contracted == 1 else part.transpose(0, 1)
        if cast.scale == "row":
            made = torch.stack([_values(row.reshape(1, -1), cast).view(row.shape) for row in turned])
        else:
            taps = turned.flatten(2)
            if cast.scale_format == "e4m3" and cast.block is not None:  # one tensor scale above all taps
                rows = len(taps) + -len(taps) % cast.block[0]
                apart = F.pad(taps, (0, 0, 0, 0, 0, rows - len(taps))).movedim(2, 0)
                every = _values(apart.reshape(-1, apart.shape[-1]), cast).view(apart.shape)[:, : len(taps)]
                parts.append(every.movedim(0, 2).reshape(turned.shape))
                parts[-1] = parts[-1] if contracted == 1 else parts[-1].transpose(0, 1)
                continue
            made = torch.stack([_values(taps[:, :, k], cast) for k in range(taps.shape[2])], 2).view(turned.shape)
        parts.append(made if contracted == 1 else made.transpose(0, 1))
    return torch.cat(parts)


def _tall_block(cast: lp.Cast | None, groups: int) -> bool:
    return cast is not None and cast.block is not None and cast.block[0] > 1 and groups > 1


def _magnitudes(shape: tuple[int, ...], seed: int) -> Tensor:
    """Values whose size differs from sample to sample and from channel to channel: a wrong axis shows."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g)
    sizes = [1] * len(shape)
    for axis in (0, 1):
        view = sizes.copy()
        view[axis] = shape[axis]
        x = x * 2.0 ** torch.randint(-3, 3, (shape[axis],), generator=g).view(view)
    return x


def _check(result: Tensor, expected: Tensor, size: Tensor, digits: int, bias: Tensor | None = None) -> None:
    """Within the result's rounding (before and after scaling; the bias too) and that of fp32 sums of 2^12 terms."""
    error = (result.double() - expected).abs().detach()
    rounded = expected.abs() if bias is None else (expected - bias).abs() + 2 * bias.abs()
    tiny = 2.0**-24 if digits == 11 else 1e-30  # fp16 underflows
    bound = (2.0 ** (1 - digits) * rounded + 2.0**-20 * size + tiny).detach()
    assert bool((error <= bound).all()), f"{float((error / bound).max())} of the bound"


@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("name", RECIPES)
def test_three_products(name: str, layer: str, channels_last: bool) -> None:
    make, shape = LAYERS[layer]
    if channels_last and (len(shape) != 4 or layer == "reflect"):
        pytest.skip("one layout")
    torch.manual_seed(0)
    recipe, module = _nearest(name), make()
    assert isinstance(module.weight, Tensor)
    module.weight.data = _magnitudes(tuple(module.weight.shape), 2)
    plain: Any = copy.deepcopy(module).double()
    groups, transposed = plain.groups, plain.transposed
    if any(_tall_block(c, groups) for c in recipe.casts.values()):
        pytest.skip("the expectation here does not let blocks span groups")
    x = _magnitudes(shape, 1).to(BF16 if recipe.compute == "bf16" else torch.float32)
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    lp.apply(module, recipe)
    x.requires_grad_()
    y = module(x)
    dy = _magnitudes(tuple(y.shape), 3).to(y.dtype)
    y.backward(dy)
    digits = {"bf16": 8, "fp16": 11, "tf32": 24}[recipe.compute]
    assert y.dtype == {"bf16": BF16, "fp16": torch.float16, "tf32": torch.float32}[recipe.compute]
    assert y.is_contiguous() != channels_last
    casts, compute = recipe.casts, recipe.compute
    weight, bias = module.weight.detach(), plain.bias
    padded = x.detach()
    if layer == "reflect":
        padded = F.pad(padded, (1, 1, 1, 1), mode="reflect")
    if layer == "even":
        padded = F.pad(padded, (1, 2))

    def run(data: Tensor, taps: Tensor, add: Tensor | None) -> Tensor:
        if transposed:
            extra = plain.output_padding
            call = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[len(shape) - 3]
            return call(data, taps, add, plain.stride, plain.padding, extra, groups, plain.dilation)
        window = 0 if layer in ("reflect", "even") else plain.padding
        return (F.conv1d, F.conv2d, F.conv3d)[len(shape) - 3](
            data, taps, add, plain.stride, window, plain.dilation, groups
        )

    def gradients(data: Tensor, taps: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        data, taps = data.clone().requires_grad_(), taps.clone().requires_grad_()
        got = torch.autograd.grad(run(data, taps, None), (data, taps), g)
        return got[0], got[1]

    one, other = (0, 1) if transposed else (1, 0)
    xo = _data(padded, casts["output.input"], compute, False)
    wo = _weight(weight, casts["output.weight"], compute, one, groups)
    added = None if bias is None else bias.view(-1, *[1] * (len(shape) - 2))
    _check(y, run(xo, wo, bias), run(xo.abs(), wo.abs(), None if bias is None else bias.abs()), digits, added)
    gi = _data(dy, casts["grad_input.grad_output"], compute, False)
    wi = _weight(weight, casts["grad_input.weight"], compute, other, groups)
    if layer not in ("reflect", "even"):
        expected = gradients(xo, wi, gi)[0]
        assert x.grad is not None
        _check(x.grad, expected, gradients(xo, wi.abs(), gi.abs())[0], min(digits, 8 if x.dtype == BF16 else 24))
    xw = _data(padded, casts["grad_weight.input"], compute, True)
    gw = _data(dy, casts["grad_weight.grad_output"], compute, True)
    grad = module.weight.grad
    assert grad is not None and grad.dtype == torch.float32
    _check(grad, gradients(xw, wo, gw)[1], gradients(xw.abs(), wo, gw.abs())[1], 8 if compute == "bf16" else 11)
    if bias is not None:
        assert isinstance(module.bias, Tensor) and module.bias.grad is not None
        torch.testing.assert_close(
            module.bias.grad.double(), dy.double().sum([0, *range(2, dy.dim())]), rtol=1e-5, atol=1e-3
        )


def test_an_image_without_a_batch_and_a_wanted_output_size() -> None:
    conv, up = nn.Conv2d(4, 4, 3), nn.ConvTranspose2d(4, 4, 3, stride=2)
    lp.apply(conv, "fp8")
    lp.apply(up, "fp8")
    x = torch.randn(4, 6, 6)
    assert conv(x).shape == (4, 4, 4) and torch.equal(conv(x), conv(x[None])[0])
    assert up(x[None], output_size=(14, 14)).shape == (1, 4, 14, 14)


def test_the_plan_says_what_is_left_out() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(4, 4))
    assert "Hadamard" in lp.plan(model, lp.recipe("nvfp4").replace(high_last_fraction=0.0)).row("0").note
    assert "accumulator" in lp.plan(model, "fp8 accumulate=hopper-fp8").row("0").note
    assert not lp.plan(model, "bf16").row("0").handler and "op policy" in lp.plan(model, "bf16").row("0").note
    assert lp.plan(model, "fp8").row("0").handler == "LowPrecConv2d"


def test_undo_and_keys() -> None:
    conv = nn.Conv2d(4, 4, 3)
    x, keys = torch.randn(2, 4, 6, 6), list(conv.state_dict())
    before = conv(x)
    lp.apply(conv, "fp8-delayed")
    assert list(conv.state_dict()) == keys and not torch.equal(conv(x).float(), before)
    lp.undo(conv)
    assert torch.equal(conv(x), before) and list(conv.state_dict()) == keys


def test_delayed_scales_follow_the_history() -> None:
    conv = nn.Conv2d(4, 4, 3, bias=False)
    lp.apply(conv, "fp8-delayed delayed=(history=4)")
    x = torch.randn(2, 4, 6, 6)
    conv(x).sum().backward()
    conv(x * 3).sum().backward()
    history = conv._buffers["_lowprec_scale"]
    assert history is not None
    assert float(history[0]) == pytest.approx(float(x.abs().max()) / 448, rel=1e-6)
    conv(x)
    assert float(history[0]) == pytest.approx(3 * float(x.abs().max()) / 448, rel=1e-6)


def test_kept_activations_are_codes() -> None:
    conv = nn.Conv2d(8, 8, 3, bias=False)
    lp.apply(conv, "fp8-rowwise")
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        conv(torch.randn(2, 8, 5, 6))
    assert any(t.dtype == torch.uint8 and t.numel() == 2 * 8 * 30 for t in kept)
    assert not any(t.numel() == 2 * 8 * 30 and t.dtype != torch.uint8 for t in kept)

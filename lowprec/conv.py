"""Convolutions and transposed convolutions: the three products of a linear layer, with a window.

    output[n, o, p]      = sum_{c, k} input[n, c, p + k]   weight[o, c, k]
    grad_input[n, c, q]  = sum_{o, k} grad_output[n, o, q - k] weight[o, c, k]
    grad_weight[o, c, k] = sum_{n, p} grad_output[n, o, p] input[n, c, p + k]

No patches are unfolded. Each operand is cast to values that bf16 holds exactly and torch's own direct convolution
(oneDNN on a CPU) multiplies them with fp32 sums; unfolding a 3 x 3 window would write and read nine times the data. So
a scale must be constant along everything that is summed, and in a convolution a value takes part in many sums:

    cast          of input and grad_output in            of weight                in grad_weight
                  output and grad_input
    tensor        one scale                              one scale                one scale
    row           one a sample                           one a result channel     one a channel
    blocks        along the channels of one position     along its channels,      along positions (n, y, x),
                                                         tap by tap               channel by channel

Block scales that are powers of two are part of the values; what else there is multiplies the result. fp32 scales in
blocks cannot be taken out, so those operands are dequantised and multiplied in fp32, as in `lowprec.products`.

Two things a linear layer has are left out, and the plan says so: the Hadamard transform on the operands of grad_weight
(a window shifts one operand's positions against the other's, so it would not cancel), and accumulator models (the order
of sums inside a direct convolution is not ours).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lowprec import scaling
from lowprec.handlers import ModuleState, Row, Site, handles
from lowprec.kernels import epilogue as epilogues
from lowprec.kernels import scale as scale_kernels
from lowprec.linear import _NOTHING, LowPrecLinear, Memory, Spec, _advance, _cast
from lowprec.products import Engine
from lowprec.recipe import Cast, Gemm, Recipe
from lowprec.spec import ROLES

__all__ = ["Geometry", "apply_conv", "conv_spec"]


class Geometry(NamedTuple):
    """The window: everything `torch.ops.aten.convolution` takes beside its tensors."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int


@functools.cache
def conv_spec(recipe: Recipe, device: str) -> Spec:
    """The spec of a recipe for convolutions: without Hadamard transforms and accumulator models."""

    def plain(gemm: Gemm) -> Gemm:
        return Gemm(*(None if c is None else c.replace(hadamard=False) for c in (gemm.a, gemm.b)))

    spec = Spec.of(recipe, device)
    products: dict[str, Any] = {role: plain(getattr(spec, role)) for role in ROLES}
    return dataclasses.replace(spec, accumulate="fp32", **products)


def _unit(spec: Spec, index: int) -> Engine:
    """What computes one of the products. int8 codes are carried as bf16 or fp32 values: exact, and one engine less."""
    unit = spec.units[index]
    if unit.kind != "int8":
        return unit
    bf16 = spec.compute == "bf16" and (spec.device != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return Engine("bf16" if bf16 else "fp32", "int8 codes as bf16 values, exact" if bf16 else "one fp32 product, exact")


# -- casts ---------------------------------------------------------------------------------------------------------


def _by_channel(cast: Cast | None, positions: bool) -> bool:
    """Whether a cast needs the channels last: blocks always, one scale a channel where positions are summed."""
    return cast is not None and (cast.scale in ("block", "column") or (positions and cast.scale == "row"))


def _as_matrix(x: Tensor, channels: bool) -> tuple[Tensor, bool]:
    """A data tensor as (positions, channels) or as (samples, everything else), and whether channels are last in it."""
    last = x.movedim(1, -1)
    if channels:
        return last.contiguous().view(-1, x.shape[1]), True
    if not x.is_contiguous() and last.is_contiguous():
        return last.view(x.shape[0], -1), True
    return x.contiguous().view(x.shape[0], -1), False


def _from_matrix(matrix: Tensor, shape: Sequence[int], channels_last: bool) -> Tensor:
    if not channels_last:
        return matrix.view(shape)
    return matrix.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1)


class _Part(NamedTuple):
    """An operand as the convolution eats it, and the factor left over: None, 0-d, or one a sample or channel."""

    values: Tensor
    scale: Tensor | None


def _cast_data(
    x: Tensor, cast: Cast | None, positions: bool, unit: Engine, spec: Spec, memory: Memory, role: int, index: int
) -> _Part:
    """Cast the input or grad_output; ``positions``: for grad_weight, whose sums run over samples and positions."""
    if cast is None:
        return _Part(_cast(x, None, -1, unit, spec, memory, role, index).values, None)
    channels = _by_channel(cast, positions)
    matrix, last = _as_matrix(x, channels)
    axis = -2 if positions and channels else -1
    made = _cast(matrix, cast, axis, unit, spec, memory, role, index)
    return _Part(_from_matrix(made.values, x.shape, last), made.scale)


def _arrange(weight: Tensor, cast: Cast, contracted: int, groups: int) -> tuple[Tensor, tuple[int, ...], int]:
    """The weight with what is summed last, the permutation that did it, and how many trailing axes that is.

    Seen as (group, dim 0 of a group, dim 1, taps); a group's own dim 0 is what is summed in the other direction.
    """
    first, second = weight.shape[:2]
    seen = weight.reshape(groups, first // groups, second, -1)
    if cast.scale in ("block", "column"):
        order = (0, 3, 1, 2) if contracted == 1 else (0, 3, 2, 1)
        return seen.permute(order), order, 1
    order = (0, 1, 2, 3) if contracted == 1 else (0, 2, 1, 3)
    return seen.permute(order), order, 2


def _cast_weight(
    weight: Tensor, cast: Cast | None, contracted: int, groups: int, unit: Engine, spec: Spec, memory: Memory, role: int
) -> _Part:
    """Cast the weight for sums over one of its first two axes and the taps."""
    if cast is None:
        return _Part(_cast(weight, None, -1, unit, spec, memory, role, scaling.WEIGHT).values, None)
    arranged, order, trailing = _arrange(weight, cast, contracted, groups)
    rows = arranged.shape[2]
    block = cast.block[0] if cast.block is not None else 1
    padded = arranged if trailing == 2 or rows % block == 0 else F.pad(arranged, (0, 0, 0, -rows % block))
    padded = padded.contiguous()
    columns = math.prod(padded.shape[-trailing:])
    made = _cast(padded.view(-1, columns), cast, -1, unit, spec, memory, role, scaling.WEIGHT)
    values = made.values.view(padded.shape)
    if padded.shape != arranged.shape:
        values = values[:, :, :rows]
    back = [order.index(i) for i in range(4)]
    return _Part(values.permute(back).reshape(weight.shape), made.scale)


# -- results -------------------------------------------------------------------------------------------------------


def _scaled(
    raw: Tensor, sample: Tensor | None, channel: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The convolution's result times the factors left over, with the bias, in the dtype wanted, in one pass."""
    if sample is None and channel is None and bias is None:
        return raw.to(dtype)
    n, channels, *space = raw.shape
    size = math.prod(space)
    last = raw.movedim(1, -1)
    sample = sample.reshape(-1) if sample is not None and sample.numel() == 1 else sample
    channel = channel.reshape(-1) if channel is not None and channel.numel() == 1 else channel
    if bias is not None or (last.is_contiguous() and not raw.is_contiguous()):
        row = sample if sample is None or sample.numel() == 1 else sample.repeat_interleave(size)
        made = epilogues.scaled(last.contiguous().view(-1, channels), row, channel, bias, dtype)
        return _from_matrix(made, raw.shape, True)
    parts = [f.expand(n, channels) for f in (None if sample is None else sample.view(-1, 1), channel) if f is not None]
    row = functools.reduce(torch.mul, parts).reshape(-1)
    return epilogues.scaled(raw.reshape(n * channels, size), row, None, None, dtype).view(raw.shape)


def _formatted(result: Tensor, like: Tensor) -> Tensor:
    """The memory format torch's own convolution would give: that of the input."""
    if like.is_contiguous():
        return result.contiguous()
    return result if result.movedim(1, -1).is_contiguous() else result.movedim(1, -1).contiguous().movedim(-1, 1)


# -- the three products --------------------------------------------------------------------------------------------


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    spec: Spec,
    memory: Memory,
    *,
    advance: bool,
    codes: bool,
) -> tuple[Tensor, list[Tensor | None]]:
    """The output, and what is kept of the input: itself, or the codes and scales of its cast for grad_weight."""
    gemm, unit = spec.output, _unit(spec, 0)
    if advance:
        if memory.step is not None:
            memory.step.add_(1)
        _advance(memory, spec, scaling.INPUT, gemm.a)
        _advance(memory, spec, scaling.WEIGHT, gemm.b)
    kept: list[Tensor | None] = [x, None, None]
    cast = spec.grad_weight.b
    if codes and cast is not None:
        matrix, _ = _as_matrix(x, _by_channel(cast, True))
        axis = -2 if _by_channel(cast, True) else -1
        delayed = memory.history is not None and cast.scale == "tensor"
        scale = memory.history.scale[scaling.INPUT].clone() if delayed and memory.history is not None else None
        parts = scale_kernels.quantize(matrix, cast, axis=axis, scale=scale)
        kept = [parts.codes, parts.scale, parts.tensor_scale]
    data = _cast_data(x, gemm.a, False, unit, spec, memory, 0, scaling.INPUT)
    contracted = 0 if geometry.transposed else 1
    taps = _cast_weight(weight, gemm.b, contracted, geometry.groups, unit, spec, memory, 1)
    plain = data.scale is None and taps.scale is None and unit.dtype == spec.dtype
    inside = bias.to(unit.dtype) if bias is not None and plain else None
    raw = torch.ops.aten.convolution(data.values, taps.values, inside, *geometry)
    output = _scaled(raw, data.scale, taps.scale, None if plain else bias, spec.dtype)
    return _formatted(output, x), kept


def backward(
    grad: Tensor,
    kept: Sequence[Tensor | None],
    like: Tensor,
    weight: Tensor,
    geometry: Geometry,
    spec: Spec,
    memory: Memory,
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The three gradients; ``like`` has the input's shape, format and dtype (its data is not read)."""
    gx = gw = gb = None
    _advance(memory, spec, scaling.OUTPUT_GRADIENT, spec.grad_input.a or spec.grad_weight.a)
    if needs[0]:
        unit = _unit(spec, 1)
        dy = _cast_data(grad, spec.grad_input.a, False, unit, spec, memory, 2, scaling.OUTPUT_GRADIENT)
        contracted = 1 if geometry.transposed else 0
        taps = _cast_weight(weight, spec.grad_input.b, contracted, geometry.groups, unit, spec, memory, 3)
        shape = torch.empty_like(like, dtype=unit.dtype)
        raw = torch.ops.aten.convolution_backward(dy.values, shape, taps.values, None, *geometry, [True, False, False])[
            0
        ]
        gx = _formatted(_scaled(raw, dy.scale, taps.scale, None, like.dtype), like)
    if needs[1]:
        unit = _unit(spec, 2)
        dy = _cast_data(grad, spec.grad_weight.a, True, unit, spec, memory, 4, scaling.OUTPUT_GRADIENT)
        data = _kept_input(kept, like, unit, spec, memory)
        shape = torch.empty_like(weight, dtype=unit.dtype)
        raw = torch.ops.aten.convolution_backward(dy.values, data.values, shape, None, *geometry, [False, True, False])[
            1
        ]
        gw = _scaled_weight(raw, dy.scale, data.scale, geometry, weight.dtype)
    if needs[2]:
        gb = grad.sum([0, *range(2, grad.dim())], dtype=torch.float32)
    return gx, gw, gb


def _kept_input(kept: Sequence[Tensor | None], like: Tensor, unit: Engine, spec: Spec, memory: Memory) -> _Part:
    values, scale, tensor_scale = kept
    cast = spec.grad_weight.b
    assert values is not None
    if values.is_floating_point():  # the input itself, not codes
        return _cast_data(values, cast, True, unit, spec, memory, 5, scaling.INPUT)
    assert cast is not None
    channels = _by_channel(cast, True)
    axis = -2 if channels else -1
    parts = scale_kernels.QuantizedParts(values, scale, tensor_scale, None, None)
    last = channels or (not like.is_contiguous() and like.movedim(1, -1).is_contiguous())
    if unit.kind == "dequantised":
        made = scale_kernels.dequantize(parts, cast, axis, torch.float32)
        return _Part(_from_matrix(made, like.shape, last), None)
    carried = scale_kernels.carrier_from_codes(parts, cast, axis=axis, dtype=unit.dtype)
    left = None if carried.scale is None else carried.scale.reshape(-1)
    return _Part(_from_matrix(carried.values, like.shape, last), left)


def _scaled_weight(raw: Tensor, dy: Tensor | None, x: Tensor | None, geometry: Geometry, dtype: torch.dtype) -> Tensor:
    """grad_weight times one factor a channel of grad_output and of the input (which lie along different axes)."""
    if dy is None and x is None:
        return raw.to(dtype).contiguous()
    seen = raw.float().reshape(geometry.groups, raw.shape[0] // geometry.groups, raw.shape[1], -1)
    first, second = (x, dy) if geometry.transposed else (dy, x)
    for factor, axis in ((first, 1), (second, 2)):
        if factor is not None:
            shape = [1, 1, 1, 1]
            if factor.numel() > 1:
                shape[0], shape[axis] = geometry.groups, seen.shape[axis]
            seen = seen * factor.reshape(shape)
    return seen.reshape(raw.shape).to(dtype)


# -- autograd and modules --------------------------------------------------------------------------------------------


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        geometry: Geometry,
        spec: Spec,
        memory: Memory,
        advance: bool,
        sink: Any,
    ) -> Tensor:
        codes = ctx.needs_input_grad[1] and spec.keep == "codes"
        with torch._C._DisableAutocast():
            output, kept = forward(x, weight, bias, geometry, spec, memory, advance=advance, codes=codes)
        ctx.save_for_backward(weight, *(kept if ctx.needs_input_grad[1] else (None, None, None)))
        ctx.like = (x.shape, x.stride(), x.dtype, x.device)
        ctx.geometry, ctx.spec, ctx.memory, ctx.sink = geometry, spec, memory, sink
        ctx.bias_dtype = None if bias is None else bias.dtype
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        weight, *kept = ctx.saved_tensors
        shape, stride, dtype, device = ctx.like
        like = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        needs = ctx.needs_input_grad[:3]
        with torch._C._DisableAutocast():
            gx, gw, gb = backward(grad, kept, like, weight, ctx.geometry, ctx.spec, ctx.memory, needs)
        if gw is not None and ctx.sink is not None:
            ctx.sink.add(gw)
            gw = None
        return gx, gw, None if gb is None else gb.to(ctx.bias_dtype), None, None, None, None, None


def apply_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    spec: Spec,
    memory: Memory = _NOTHING,
    advance: bool = True,
    sink: Any = None,
) -> Tensor:
    """A convolution by a spec (see `conv_spec`); shapes as `torch.nn.functional.conv2d` and its kin have them."""
    batched = x.dim() == weight.dim()
    data = x if batched else x.unsqueeze(0)
    advance = advance and not scaling.repeating()
    output: Tensor = _Conv.apply(data, weight, bias, geometry, spec, memory, advance, sink)  # type: ignore[no-untyped-call]
    return output if batched else output.squeeze(0)


class _Mixin:
    """What all six classes share; the scaling state is a linear layer's."""

    _lowprec: ModuleState
    lowprec_products = True
    lowprec_setup = LowPrecLinear.lowprec_setup
    lowprec_teardown = LowPrecLinear.lowprec_teardown

    def _run(self, input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
        from lowprec import gradients

        state, module = self._lowprec, self
        assert isinstance(module, nn.Module)
        spec = conv_spec(state.recipe, input.device.type)
        memory = Memory(scaling.of_module(module), state.extra["seed"], state.extra["step"], state.observer)
        sink = gradients.sink(weight)
        return apply_conv(input, weight, bias, geometry, spec, memory, module.training, sink)


def _plan(site: Site, handler: type[nn.Module]) -> Row | str:
    """The plan's row of a convolution."""
    spec, recipe = conv_spec(site.recipe, site.device.type), site.recipe
    if recipe.compute in ("fp32",) and not recipe.quantized:
        return f"no cast to make: runs in {recipe.compute} by the op policy"
    if not recipe.quantized and recipe.compute == "bf16":
        return "no cast to make: runs in bf16 by the op policy"
    words = list(dict.fromkeys(_unit(spec, i).words.replace("product", "convolution") for i in range(3)))
    notes = []
    if any(cast is not None and cast.hadamard for cast in recipe.casts.values()):
        notes.append("without the Hadamard transform, which a window does not let cancel")
    if recipe.accumulator is not None:
        notes.append("sums in fp32: accumulator models are for linear layers")
    return site.row(handler, carrier="; ".join(words), note="; ".join(notes))


class _Conv_(_Mixin):
    """The forward pass of the three plain convolutions."""

    def _conv_forward(self: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        dims = weight.dim() - 2
        padding = self.padding
        if self.padding_mode != "zeros":
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = (0,) * dims
        elif isinstance(padding, str):
            totals = [0] * dims
            if padding == "same":
                totals = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size)]
            if any(t % 2 for t in totals):
                input = F.pad(input, [side for t in reversed(totals) for side in (t // 2, t - t // 2)])
                totals = [0] * dims
            padding = tuple(t // 2 for t in totals)
        geometry = Geometry(self.stride, padding, self.dilation, False, (0,) * dims, self.groups)
        output: Tensor = self._run(input, weight, bias, geometry)
        return output


class _Transposed(_Mixin):
    """The forward pass of the three transposed convolutions."""

    def forward(self: Any, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        dims = self.weight.dim() - 2
        extra = self._output_padding(
            input, output_size, self.stride, self.padding, self.kernel_size, dims, self.dilation
        )
        geometry = Geometry(self.stride, self.padding, self.dilation, True, tuple(extra), self.groups)
        output: Tensor = self._run(input, self.weight, self.bias, geometry)
        return output


def _class(name: str, mixin: type, base: type[nn.Module]) -> type[nn.Module]:
    made: Any = type(name, (mixin, base), {"__module__": __name__, "__doc__": f"`nn.{base.__name__}` with casts."})
    made.lowprec_plan = staticmethod(lambda site: _plan(site, made))
    handler: type[nn.Module] = handles(base)(made)
    return handler


LowPrecConv1d = _class("LowPrecConv1d", _Conv_, nn.Conv1d)
LowPrecConv2d = _class("LowPrecConv2d", _Conv_, nn.Conv2d)
LowPrecConv3d = _class("LowPrecConv3d", _Conv_, nn.Conv3d)
LowPrecConvTranspose1d = _class("LowPrecConvTranspose1d", _Transposed, nn.ConvTranspose1d)
LowPrecConvTranspose2d = _class("LowPrecConvTranspose2d", _Transposed, nn.ConvTranspose2d)
LowPrecConvTranspose3d = _class("LowPrecConvTranspose3d", _Transposed, nn.ConvTranspose3d)

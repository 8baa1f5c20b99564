"""Linear layers: one autograd function, three products, six casts.

    output[t, o]      = sum_i input[t, i]       weight[o, i]      both contract over their last axis
    grad_input[t, i]  = sum_o grad_output[t, o] weight[o, i]      weight contracts over its first axis
    grad_weight[o, i] = sum_t grad_output[t, o] input[t, i]       both contract over their first axis

Each operand of each product is cast for itself, from the original values and along its own contraction; where a cast
has the same result in both directions (one scale a tensor, square blocks) it is made once. `lowprec.products` says what
then computes the sum.

What is kept for the backward pass: the input as it came (16 bits wide), or its cast for grad_weight where that is
cheaper to keep: as 8-bit codes with their scales where the recipe says ``saved="codes"``, or as the operand itself
where the forward product has made it already. The weight is kept as it is, and its cast too where both directions share
it.

Casts of weights are found once a pass and, with few tokens (where they weigh), kept until the weight changes: its
version counter and a sample of its values say whether it has.
"""

from __future__ import annotations

import functools
import importlib
import zlib
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lowprec import scaling
from lowprec.formats import format as find_format
from lowprec.handlers import ModuleState, Row, Site, describe_gemm, handles
from lowprec.kernels import cast as cast_kernels
from lowprec.kernels import norm as norm_kernels
from lowprec.kernels import scale as scale_kernels
from lowprec.products import Engine, Operand, least_exponent, orientation_free, prepare, product
from lowprec.recipe import Cast
from lowprec.spec import ROLES, Spec
from lowprec.units import DTYPES
from lowprec.units import quantize as quantize_fp8

__all__ = ["LinearLike", "LowPrecLinear", "Memory", "Spec", "apply_linear", "plan_linear", "stored"]

_FEW_TOKENS = 512  # below this many, casts of weights weigh enough to be kept


class Memory(NamedTuple):
    """What a module brings to a pass beside its parameters: scaling history, random stream, statistics, cast cache."""

    history: scaling.History | None = None
    seed: int = 0
    step: Tensor | None = None
    observer: Any = None
    cache: dict[Any, Any] | None = None

    def rng(self, cast: Cast | None, role: int) -> cast_kernels.Rng | None:
        """The random bits of one cast in this step."""
        if cast is None or cast.rounding != "stochastic":
            return None
        return cast_kernels.Rng(self.seed, 0 if self.step is None else int(self.step), role)


_NOTHING = Memory()


def _cast(
    x: Tensor, cast: Cast | None, axis: int, unit: Engine, spec: Spec, memory: Memory, role: int, index: int
) -> Operand:
    """Cast one operand, with the module's delayed scale where it has one, and tell the statistics."""
    scale = None
    delayed = memory.history is not None and cast is not None and cast.scale == "tensor"
    if delayed:
        assert memory.history is not None
        scale = memory.history.scale[index].clone()
    wanted = delayed or memory.observer is not None
    operand, counters = prepare(
        x, cast, axis, unit, spec.compute, scale=scale, rng=memory.rng(cast, role), counters=wanted and cast is not None
    )
    if counters is not None:
        if delayed:
            assert memory.history is not None
            memory.history.record(index, counters)
        if memory.observer is not None:
            memory.observer.add(role, counters, x.numel(), operand.scale)
    return operand


def _advance(memory: Memory, spec: Spec, index: int, cast: Cast | None) -> None:
    if memory.history is not None and spec.delayed is not None and cast is not None:
        memory.history.advance(index, find_format(cast.format).max, spec.delayed)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, spec: Spec, memory: Memory, *, advance: bool, keep: bool
) -> tuple[Tensor, list[Tensor | None], Operand]:
    """The output, what is to be kept of the input (values, scale, tensor scale), and the weight's operand."""
    spec = spec.fitting(*x.shape, weight.shape[0])
    gemm, unit = spec.output, spec.units[0]
    if advance:
        if memory.step is not None:
            memory.step.add_(1)
        _advance(memory, spec, scaling.INPUT, gemm.a)
        _advance(memory, spec, scaling.WEIGHT, gemm.b)
    kept: list[Tensor | None] = [None, None, None]
    mode = spec.keep if keep else ""
    shared = mode == "codes" and gemm.a == spec.grad_weight.b and orientation_free(gemm.a) and unit.kind != "int8"
    if mode == "codes" and not shared:
        kept = _codes(x, spec, memory, None)
    operand = _cast(x, gemm.a, -1, unit, spec, memory, 0, scaling.INPUT)
    if shared and unit.kind == "fp8":
        kept = [operand.values.view(torch.uint8), operand.scale, None]
    elif shared:
        kept = _codes(x, spec, memory, operand.scale)
    elif mode == "operand":
        kept = [operand.values, operand.scale, None]
    elif mode == "input":
        kept = [x, None, None]
    right = _weight(weight, spec, memory, few=x.shape[0] < _FEW_TOKENS, backward=False)
    return product(operand, right, unit, spec.dtype, bias, spec.accumulate), kept, right


def _codes(x: Tensor, spec: Spec, memory: Memory, known: Tensor | None) -> list[Tensor | None]:
    """The input cast for grad_weight, as codes and scales; `known` is its scale where the forward cast has found it."""
    cast = spec.grad_weight.b
    assert cast is not None
    scale = known if cast.scale == "tensor" else None
    if scale is None and memory.history is not None and cast.scale == "tensor":
        scale = memory.history.scale[scaling.INPUT].clone()
    if spec.units[2].kind == "fp8" and memory.observer is None:
        codes, used = quantize_fp8(x, cast, -2, scale)
        return [codes.view(torch.uint8), used if used.dim() == 0 else used.reshape(1, -1), None]
    if spec.units[2].kind == "int8" and memory.observer is None:
        operand, _ = prepare(x, cast, -2, spec.units[2], spec.compute, scale=scale)
        assert operand.scale is not None
        shape = (1, -1) if cast.scale == "row" else ()
        return [operand.values.view(torch.uint8), operand.scale.reshape(shape), None]
    watched = memory.observer is not None and known is None
    parts = scale_kernels.quantize(x, cast, axis=-2, scale=scale, counters=watched)
    if watched and parts.counters is not None:
        memory.observer.add(5, parts.counters, x.numel(), None)
    return [parts.codes, parts.scale, parts.tensor_scale]


def _weight(weight: Tensor, spec: Spec, memory: Memory, *, few: bool, backward: bool) -> Operand:
    """The weight's operand for output or grad_input, from the cache where it may be used."""
    gemm, unit, axis, role = (
        (spec.grad_input, spec.units[1], -2, 3) if backward else (spec.output, spec.units[0], -1, 1)
    )
    cacheable = few and memory.cache is not None and memory.history is None and memory.observer is None
    cacheable = cacheable and weight.is_contiguous()
    cacheable = cacheable and gemm.b is not None and gemm.b.rounding != "stochastic" and not weight.is_inference()
    if not cacheable:
        return _cast(weight, gemm.b, axis, unit, spec, memory, role, scaling.WEIGHT)
    assert memory.cache is not None
    flat = weight.detach().reshape(-1)
    sample = flat[:: max(1, flat.numel() // 61)]
    known = memory.cache.get((role, spec))
    if known is not None:
        version, values, operand = known
        if version == weight._version and values.shape == sample.shape and torch.equal(values, sample):
            return operand  # type: ignore[no-any-return]
    operand = _cast(weight, gemm.b, axis, unit, spec, memory, role, scaling.WEIGHT)
    memory.cache[role, spec] = (weight._version, sample.clone(), operand)
    return operand


def backward(
    grad: Tensor,
    kept: tuple[Tensor | None, ...],
    weight: Tensor,
    weight_operand: Operand | None,
    spec: Spec,
    memory: Memory,
    needs: tuple[bool, bool, bool],
    input_dtype: torch.dtype,
    sink: Any = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The three gradients (None where not needed)."""
    spec = spec.fitting(*grad.shape, weight.shape[1])
    grad_input = grad_weight = grad_bias = None
    need_input, need_weight, need_bias = needs
    _, unit_i, unit_w = spec.units
    _advance(memory, spec, scaling.OUTPUT_GRADIENT, spec.grad_input.a or spec.grad_weight.a)
    for_input = for_weight = None
    if need_input:
        for_input = _cast(grad, spec.grad_input.a, -1, unit_i, spec, memory, 2, scaling.OUTPUT_GRADIENT)
    if need_weight:
        if for_input is not None and spec.one_gradient:
            for_weight = for_input.turned()
        else:
            for_weight = _cast(grad, spec.grad_weight.a, -2, unit_w, spec, memory, 4, scaling.OUTPUT_GRADIENT)
    if for_input is not None:
        right = (
            weight_operand.turned()
            if weight_operand is not None
            else _weight(weight, spec, memory, few=grad.shape[0] < _FEW_TOKENS, backward=True)
        )
        grad_input = product(for_input, right, unit_i, input_dtype, None, spec.accumulate)
    if for_weight is not None:
        right = _kept_input(kept, spec, memory)
        grad_weight = _grad_weight(for_weight, right, unit_w, weight, spec, sink)
    if need_bias:
        grad_bias = norm_kernels.column_sum(grad)
    return grad_input, grad_weight, grad_bias


def _kept_input(kept: tuple[Tensor | None, ...], spec: Spec, memory: Memory) -> Operand:
    """The input's operand for grad_weight from what was kept of it."""
    values, scale, tensor_scale = kept
    cast, unit = spec.grad_weight.b, spec.units[2]
    assert values is not None
    if spec.keep == "operand":
        return Operand(values, -2, scale)
    if spec.keep == "input":
        return _cast(values, cast, -2, unit, spec, memory, 5, scaling.INPUT)
    assert cast is not None and scale is not None
    if unit.kind == "int8":
        return Operand(values.view(torch.int8), -2, scale.reshape(-1))
    if unit.kind == "fp8":
        return Operand(values.view(DTYPES[cast.format]), -2, scale if scale.dim() == 0 else scale.reshape(-1))
    parts = scale_kernels.QuantizedParts(values, scale, tensor_scale, None, None)
    if unit.kind == "dequantised":
        return Operand(scale_kernels.dequantize(parts, cast, -2, torch.float32), -2)
    made = scale_kernels.carrier_from_codes(parts, cast, axis=-2, dtype=unit.dtype)
    left = None if made.scale is None else made.scale.reshape(-1)
    return Operand(made.values, -2, left, least_exponent(cast))


def _grad_weight(a: Operand, b: Operand, unit: Engine, weight: Tensor, spec: Spec, sink: Any) -> Tensor | None:
    """The weight's gradient, or None where a gradient store took it in."""
    if sink is None:
        return product(a, b, unit, weight.dtype, None, spec.accumulate)
    by_row = b.scale is None or b.scale.numel() == 1
    if unit.kind in ("int8", "fp8") or spec.accumulate != "fp32" or not by_row:
        dtype = torch.bfloat16 if unit.kind == "bf16" else torch.float32
        sink.add(product(a, b, unit, dtype, None, spec.accumulate))
    else:
        scales = [s for s in (a.scale, b.scale) if s is not None]
        sink.add_product(a.values, b.values, functools.reduce(torch.mul, scales) if scales else None)
    return None


class _Linear(torch.autograd.Function):
    """The three products as torch's autograd sees them."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, spec: Spec, memory: Memory, advance: bool
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        need_weight = ctx.needs_input_grad[1]
        sink = getattr(weight, "_lowprec_sink", None)
        with torch._C._DisableAutocast():
            output, kept, operand = forward(flat, stored(weight), bias, spec, memory, advance=advance, keep=need_weight)
        hold = spec.one_weight and spec.output.b is not None and ctx.needs_input_grad[0]
        ctx.operand_scale = operand.scale if hold else None
        ctx.save_for_backward(*kept, weight, operand.values if hold else None)
        ctx.spec, ctx.memory, ctx.sink = spec, memory, sink
        ctx.weight_scale = getattr(weight, "_lowprec_scale", None)
        ctx.shape, ctx.dtype = x.shape, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return output.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        *kept, weight, carried = ctx.saved_tensors
        if ctx.weight_scale is not None:  # activation checkpointing hands back a detached weight, without attributes
            weight._lowprec_scale = ctx.weight_scale
        held = None if carried is None else Operand(carried, -1, ctx.operand_scale)
        flat = grad.reshape(-1, weight.shape[0])
        needs = ctx.needs_input_grad[:3]
        with torch._C._DisableAutocast():
            values = stored(weight)
            sink = ctx.sink if needs[1] else None
            gx, gw, gb = backward(flat, tuple(kept), values, held, ctx.spec, ctx.memory, needs, ctx.dtype, sink)
        gx = None if gx is None else gx.view(ctx.shape)
        gb = None if gb is None else gb.to(ctx.bias_dtype)
        return gx, gw, gb, None, None, None


def apply_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, spec: Spec, memory: Memory = _NOTHING, advance: bool = True
) -> Tensor:
    """A linear layer by a spec; shapes as in `torch.nn.functional.linear`."""
    return _Linear.apply(input, weight, bias, spec, memory, advance and not scaling.repeating())  # type: ignore[no-any-return, no-untyped-call]


def stored(weight: Tensor) -> Tensor:
    """A weight's values: itself, or what its 8-bit storage stands for."""
    if weight.element_size() > 1:
        return weight
    return cast(Tensor, importlib.import_module("lowprec.storage").operand(weight))


def plan_linear(site: Site, handler: type[Any]) -> Row | str:
    """The plan's row of a layer with the three products of this module."""
    recipe = site.recipe
    spec = Spec.of(recipe, site.device.type)
    casts = any(g.a is not None or g.b is not None for g in (spec.output, spec.grad_input, spec.grad_weight))
    special = recipe.compute in ("fp16", "tf32") or recipe.weights == "fp8" or recipe.gradients == "fp8"
    if not casts and not special and recipe.accumulate == "fp32":
        return f"no cast to make: runs in {recipe.compute} by the op policy"
    if site.strict:
        _refuse_emulation(site, spec)
    words = [spec.unit(role).words for role in ROLES]
    carrier = words[0] if len(set(words)) == 1 else "; ".join(f"{r}: {w}" for r, w in zip(ROLES, words))
    return site.row(handler, carrier=carrier)


def _refuse_emulation(site: Site, spec: Spec) -> None:
    """Raise if a product would be emulated on this device."""
    for role, gemm, unit in zip(ROLES, spec.gemms, spec.units):
        cast_any = gemm.a is not None or gemm.b is not None
        slow_16 = site.device.type == "cpu" and spec.compute in ("fp16", "tf32")
        if unit.kind not in ("int8", "fp8") and (cast_any or slow_16 or spec.accumulate != "fp32"):
            raise ValueError(
                f"{site.name or 'the model'} ({role}): {site.device.type} here cannot compute "
                f"{describe_gemm(gemm, spec.compute)} itself. Leave strict off to have it emulated, or pass "
                f"skip=[{site.name!r}]."
            )


class LinearLike:
    """What modules with the three products of a linear layer share; mixed into a handler before its module class."""

    _lowprec: ModuleState
    lowprec_products = True

    @classmethod
    def lowprec_plan(cls, site: Site) -> Row | str:
        """The row of the layer."""
        return plan_linear(site, cls)

    def lowprec_setup(self) -> None:
        """Scaling history, random stream, and what a compiled graph takes as constants."""
        state, module = self._lowprec, cast(nn.Module, self)
        device = next((p.device for p in module.parameters(recurse=False)), torch.device("cpu"))
        if state.recipe.delayed is not None:
            scaling.create(module, state.recipe.delayed, device)
        state.extra["seed"] = zlib.crc32(state.name.encode())
        state.extra["step"] = torch.zeros((), dtype=torch.int64)
        spec = Spec.of(state.recipe, device.type)
        state.extra["compiled"] = (spec.text, spec.keep == "input", spec.one_weight and spec.output.b is not None)

    def lowprec_teardown(self) -> None:
        """Take the buffers away again."""
        module = cast(nn.Module, self)
        for name in scaling.BUFFERS:
            module._buffers.pop(name, None)
            module._non_persistent_buffers_set.discard(name)

    def lowprec_linear(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The layer's products, under the module's recipe."""
        state, module = self._lowprec, cast(nn.Module, self)
        if not state.enabled:
            return nn.functional.linear(input, stored(weight).to(input.dtype), bias)
        if torch.compiler.is_compiling():
            return _compiled(module, state, input, weight, bias)
        spec = Spec.of(state.recipe, input.device.type)
        history = scaling.of_module(module)
        memory = Memory(history, state.extra["seed"], state.extra["step"], state.observer, state.cache)
        return apply_linear(input, weight, bias, spec, memory, advance=module.training)


def _compiled(module: nn.Module, state: ModuleState, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The forward pass as torch.compile traces it: everything it decides is a constant of the graph."""
    from lowprec.linear_ops import CompiledLinear

    text, keeps_input, one_weight = state.extra["compiled"]
    tensors = (*(module._buffers.get(name) for name in scaling.BUFFERS), state.extra["step"])
    grad = torch.is_grad_enabled()
    needs = (
        grad and input.requires_grad,
        grad and weight.requires_grad,
        grad and bias is not None and bias.requires_grad,
    )
    flat = input.reshape(-1, input.shape[-1])
    arguments = (state.extra["seed"], text, module.training, needs, keeps_input, one_weight and needs[0])
    output = CompiledLinear.apply(flat, weight, bias, tensors, *arguments)  # type: ignore[no-untyped-call]
    return output.view(*input.shape[:-1], weight.shape[0])  # type: ignore[no-any-return]


@handles(nn.Linear)
class LowPrecLinear(LinearLike, nn.Linear):
    """`nn.Linear` with the casts of its recipe."""

    def forward(self, input: Tensor) -> Tensor:
        return self.lowprec_linear(input, self.weight, self.bias)

"""The linear function as ops that torch.compile sees as one node a direction.

The same code as in eager mode runs inside; only what it takes and returns is flattened to tensors: what eager keeps as
None is an empty tensor here, and the spec travels as a string. Statistics and the cache of weight casts are for eager
mode; a compiled graph keeps neither. Delayed scaling state is an argument that the ops write to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowprec import scaling
from lowprec.formats import format as find_format
from lowprec.kernels import library
from lowprec.kernels import scale as scale_kernels
from lowprec.kernels.cast import code_dtype
from lowprec.linear import Memory, backward, forward
from lowprec.products import Engine, Operand
from lowprec.recipe import Cast
from lowprec.spec import Spec

__all__ = ["CompiledLinear"]


def _memory(scale: Tensor | None, amax: Tensor | None, passes: Tensor | None, step: Tensor | None, seed: int) -> Any:
    history = None
    if scale is not None and amax is not None and passes is not None:
        history = scaling.History(scale, amax, passes)
    return Memory(history, seed, step)


def _full(tensor: Tensor | None) -> Tensor:
    return torch.empty(0) if tensor is None else tensor


def _none(tensor: Tensor) -> Tensor | None:
    return None if tensor.dim() == 1 and tensor.numel() == 0 else tensor


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    amax: Tensor | None,
    passes: Tensor | None,
    step: Tensor | None,
    seed: int,
    text: str,
    advance: bool,
    keep: bool,
    hold: bool,
) -> tuple[Tensor, ...]:
    spec = Spec.parse(text)
    memory = _memory(scale, amax, passes, step, seed)
    with torch._C._DisableAutocast():
        output, kept, operand = forward(x, weight, bias, spec, memory, advance=advance, keep=keep)
    if spec.keep == "input":
        kept = [None, None, None]
    held = (operand.values, operand.scale) if hold else (None, None)
    return (output, *(_full(t) for t in (*kept, *held)))


def _operand_scale(cast: Cast, shape: tuple[int, ...], axis: int, unit: Engine) -> tuple[int, ...] | None:
    """The shape of an operand's scale, or None where it has none."""
    plan = scale_kernels.plan_of(cast)
    if cast.scale_format == "e4m3" or (cast.scale == "tensor" and not plan.power_of_two):
        return ()
    if unit.kind == "dequantised" or plan.power_of_two or cast.scale == "none":
        return None
    return (shape[axis + 1],) if axis == -1 else (shape[-1],)


def _forward_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    amax: Tensor | None,
    passes: Tensor | None,
    step: Tensor | None,
    seed: int,
    text: str,
    advance: bool,
    keep: bool,
    hold: bool,
) -> tuple[Tensor, ...]:
    spec = Spec.parse(text)
    nothing = [x.new_empty(0, dtype=torch.float32) for _ in range(5)]
    output = x.new_empty(x.shape[0], weight.shape[0], dtype=spec.dtype)
    cast = spec.grad_weight.b
    if keep and spec.keep == "codes" and cast is not None:
        nothing[0] = torch.empty_like(x, dtype=code_dtype(find_format(cast.format)))
        codes = cast.scale_format in ("e8m0", "e4m3")
        if cast.scale != "none":
            shape = scale_kernels.scale_shape(cast, x.shape, -2)  # type: ignore[arg-type]
            nothing[1] = x.new_empty(shape, dtype=torch.uint8 if codes else torch.float32)
        if cast.scale_format == "e4m3":
            nothing[2] = x.new_empty((), dtype=torch.float32)
    if keep and spec.keep == "operand" and spec.output.a is not None:
        nothing[:2] = _fake_operand(x, spec.output.a, spec.units[0], nothing[1])
    if hold and spec.output.b is not None:
        nothing[3:] = _fake_operand(weight, spec.output.b, spec.units[0], nothing[4])
    return (output, *nothing)


def _fake_operand(x: Tensor, cast: Cast, unit: Engine, nothing: Tensor) -> list[Tensor]:
    shape = _operand_scale(cast, tuple(x.shape), -1, unit)
    return [
        torch.empty_like(x, dtype=unit.dtype),
        nothing if shape is None else x.new_empty(shape, dtype=torch.float32),
    ]


def _backward(
    grad: Tensor,
    kept: list[Tensor],
    held: list[Tensor],
    weight: Tensor,
    scale: Tensor | None,
    amax: Tensor | None,
    passes: Tensor | None,
    step: Tensor | None,
    seed: int,
    text: str,
    needs: list[bool],
    input_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    spec = Spec.parse(text)
    values = _none(held[0])
    operand = None if values is None else Operand(values, -1, _none(held[1]))
    three = needs[0], needs[1], needs[2]
    with torch._C._DisableAutocast():
        made = backward(
            grad.contiguous(),
            tuple(_none(t) for t in kept),
            weight,
            operand,
            spec,
            _memory(scale, amax, passes, step, seed),
            three,
            input_dtype,
        )
    return _full(made[0]), _full(made[1]), _full(made[2])


def _backward_fake(
    grad: Tensor,
    kept: list[Tensor],
    held: list[Tensor],
    weight: Tensor,
    scale: Tensor | None,
    amax: Tensor | None,
    passes: Tensor | None,
    step: Tensor | None,
    seed: int,
    text: str,
    needs: list[bool],
    input_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    def made(wanted: bool, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return grad.new_empty(shape if wanted else (0,), dtype=dtype if wanted else torch.float32)

    out, features = weight.shape
    return (
        made(needs[0], (grad.shape[0], features), input_dtype),
        made(needs[1], (out, features), weight.dtype),
        made(needs[2], (out,), torch.float32),
    )


_STATE = "Tensor(a!)? scale, Tensor(b!)? amax, Tensor(c!)? passes, Tensor(d!)? step, int seed, str text"
_forward_op = library.define(
    f"linear_forward(Tensor x, Tensor weight, Tensor? bias, {_STATE}, bool advance, bool keep, bool hold) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
)
_backward_op = library.define(
    f"linear_backward(Tensor grad, Tensor[] kept, Tensor[] held, Tensor weight, {_STATE}, bool[] needs, "
    "ScalarType input_dtype) -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)


class CompiledLinear(torch.autograd.Function):
    """The autograd function that dynamo traces; everything but the two ops is plain bookkeeping."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
        seed: int,
        text: str,
        advance: bool,
        needs: tuple[bool, bool, bool],
        keeps_input: bool,
        hold: bool,
    ) -> Tensor:
        output, *kept = _forward_op(x, weight, bias, *state, seed, text, advance, needs[1], hold)
        if keeps_input and needs[1]:
            kept[0] = x
        ctx.save_for_backward(weight, *kept)
        ctx.state, ctx.seed, ctx.text, ctx.needs, ctx.dtype = state, seed, text, needs, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return output  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        weight, *kept = ctx.saved_tensors
        needs = ctx.needs
        gx, gw, gb = _backward_op(
            grad, kept[:3], kept[3:], weight, *ctx.state, ctx.seed, ctx.text, list(needs), ctx.dtype
        )
        gb = gb.to(ctx.bias_dtype) if needs[2] else None
        return gx if needs[0] else None, gw if needs[1] else None, gb, *(None,) * 7

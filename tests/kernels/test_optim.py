"""The native optimizer kernels against the reference, bit for bit, on every CPU path."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lowprec import kernels
from lowprec.kernels import optim
from lowprec.kernels.stores import STORES, Batch, Program, Slot

SHAPES = [(3, 512), (5, 300), (2, 3, 129), (1, 1500), (700,)]
# coefficients: factor, l2, keep, the rule's own
ADAM = [0.5, 0.0, 0.999, 1e-2, 0.1, 0.95, 0.05, 3.0, 1e-8]
SGD = [-1.0, 0.01, 1.0, 1e-2, 0.9, 0.7]
LION = [1.0, 0.0, 0.99, 1e-3, 0.9, 0.1, 0.99, 0.01]
FIRST = ["fp32", "bf16", "fp16-block", "e4m3-block", "e5m2-block", "8bit", "4bit"]
SECOND = ["fp32", "bf16", "fp16-block+", "e4m3-root", "e5m2-root", "8bit-root", "4bit-root"]


def _programs() -> list[tuple[Program, list[float]]]:
    out = []
    for m, v in zip(FIRST, SECOND, strict=True):
        for rounding in ("nearest", "stochastic"):
            out.append((Program("adam", "fp32", "fp32", states=(m, v), state_rounding=rounding), ADAM))
        out.append((Program("adam", "bf16", "bf16", states=(m, v, v), rounding="stochastic"), ADAM))
        out.append((Program("sgd", "fp32", "fp16", states=(m,), nesterov=True), SGD))
        out.append((Program("lion", "fp16", "fp32", states=(m,), state_rounding="stochastic"), LION))
    for weight in ("fp32", "bf16", "fp16", "e4m3-row", "e5m2-row"):
        for rounding in ("nearest", "stochastic"):
            out.append((Program("sgd", weight, "bf16", rounding=rounding), SGD))
            for master in ("fp32", "fp16-block"):
                states = ("e4m3-block", "fp16-block+")
                program = Program("adam", weight, "e4m3-block", master, None, states, rounding, "stochastic")
                out.append((program, ADAM))
        for residue in ("bf16", "fp16", "fp32"):
            out.append((Program("adam", weight, "fp32", residue=residue, states=("bf16", "bf16")), ADAM))
    out.append((Program("adam", "bf16", "bf16", "remainder16", None, ("8bit", "8bit-root"), "stochastic"), ADAM))
    return out


def _tensor(name: str, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    codes, scale = optim.encode(values, name)
    return codes, scale


def _batch(program: Program, seed: int) -> Batch:
    torch.manual_seed(seed)
    slots = []
    for number, shape in enumerate(SHAPES):
        if len(shape) < 2 and (program.weight.endswith("row")):
            continue
        w = torch.randn(shape) * 0.05
        spread = torch.exp(torch.randn(shape) * 3)
        values = [torch.randn(shape) * spread * 1e-3, (torch.randn(shape) * spread * 1e-3) ** 2]
        values.append(values[1] * 2)
        parts = [_tensor(s, x) for s, x in zip(program.states, values, strict=False)]
        weight, weight_scale = _tensor(program.weight, w)
        slot = Slot(weight, weight_scale, stream=number, offset=1000 * number)
        if program.master == "remainder16":
            slot.master = torch.randint(-(2**15), 2**15, shape).to(torch.int16)
        elif program.master is not None:
            slot.master, slot.master_scale = _tensor(program.master, w)
        if program.residue is not None:
            slot.residue, _ = _tensor(program.residue, w * 1e-3)
        slot.states, slot.scales = [p[0] for p in parts], [p[1] for p in parts]
        grad = torch.randn(shape) * spread * 1e-3
        grad.view(-1)[::97] = 0.0
        slot.grad, slot.grad_scale = _tensor(program.grad, grad)
        slots.append(slot)
    return Batch(program, slots)


def _results(batch: Batch) -> list[dict[str, Any]]:
    out = []
    for s in batch.slots:
        named = {"weight": s.weight, "weight_scale": s.weight_scale, "master": s.master, "master_scale": s.master_scale}
        named |= {"residue": s.residue, **{f"state{k}": t for k, t in enumerate(s.states)}}
        named |= {f"scale{k}": t for k, t in enumerate(s.scales)}
        out.append({k: t for k, t in named.items() if t is not None} | {"nonfinite": torch.tensor(s.nonfinite)})
    return out


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8) if t.ndim else t.reshape(1).view(torch.uint8)


def _equal(a: Batch, b: Batch) -> None:
    for number, (x, y) in enumerate(zip(_results(a), _results(b), strict=True)):
        for name in x:
            wrong = (_bits(x[name]) != _bits(y[name])).sum().item()
            assert wrong == 0, f"{a.program}: {name} of tensor {number} {tuple(x[name].shape)}: {wrong} bytes differ"


@contextmanager
def _cpu(isa: str, threads: int) -> Iterator[None]:
    core = kernels.native_core()
    before, count = core.isa(), torch.get_num_threads()
    assert core.set_isa(isa)
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        core.set_isa(before)
        torch.set_num_threads(count)


native = pytest.mark.skipif(not kernels.available("native")[0], reason="no compiled core")


def _both(program: Program, coefficients: list[float], isas: list[tuple[str, int]]) -> None:
    start = _batch(program, 0)
    expected = copy.deepcopy(start)
    with kernels.use("reference"):
        for step in (1, 2):
            optim.update(expected, coefficients, 7, step)
    for isa, threads in isas:
        got = copy.deepcopy(start)
        with _cpu(isa, threads):
            for step in (1, 2):
                optim.update(got, coefficients, 7, step)
        _equal(got, expected)


@native
@pytest.mark.parametrize(("program", "coefficients"), _programs(), ids=lambda x: "" if isinstance(x, list) else None)
def test_native_equals_reference(program: Program, coefficients: list[float]) -> None:
    best = kernels.native_core().isas()
    _both(program, coefficients, [(isa, 1 + k % 2) for k, isa in enumerate(best)])


@native
@pytest.mark.parametrize("name", [n for n in STORES if n != "remainder16"])
def test_stored_rows_equal_the_reference(name: str) -> None:
    for shape in SHAPES[:4]:
        torch.manual_seed(1)
        values = [torch.randn(shape).abs() * torch.exp(torch.randn(shape) * 2) for _ in range(2)]
        made = []
        for backend in ("native", "reference"):
            with kernels.use(backend):
                codes, scale = optim.empty(name, shape, torch.device("cpu"))
                rows, cols = optim.matrix(shape)
                for k, x in enumerate(values):
                    optim.store_rows(x.reshape(rows, cols), codes, scale, name, shape, 0, add=k > 0, seed=3, step=k)
                made.append(
                    (
                        codes,
                        scale,
                        optim.decode(codes, scale, name, shape),
                        optim.store_stats(codes, scale, name, shape),
                    )
                )
        (a, a_scale, x, s), (b, b_scale, y, t) = made
        assert torch.equal(_bits(a), _bits(b)) and torch.equal(_bits(x), _bits(y))
        assert a_scale is None or torch.equal(a_scale, b_scale)
        assert s[:2] == t[:2] and s[2] == pytest.approx(t[2], rel=1e-12)

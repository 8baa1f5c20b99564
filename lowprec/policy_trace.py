"""What each op of a forward pass computes in, and which rule decided it.

    print(lp.trace_policy(model, batch))

Two witnesses write down what they see. The policy's own kernels know an op as the model called it, before any cast, and
the rule they followed. A dispatch mode sits below autocast and sees what was really computed: the dtypes there are the
compute dtype, whatever the rule says, and ops that no rule concerns appear only there. Modules that a recipe converted
are one row each, with the casts of their product: what happens inside them is their recipe's, not the op policy's.

The pass runs in eval mode and without gradients, so that it changes no statistics and no scaling history.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from lowprec import policy as op_policy

__all__ = ["PolicyTrace", "TraceRow", "trace"]

_SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
_QUIET = frozenset(
    ("detach", "_to_copy", "clone", "copy_", "empty_like", "empty", "zeros", "ones", "full", "arange", "lift_fresh")
)


@dataclass(frozen=True)
class TraceRow:
    """One op, or the same op several times in a row.

    Args:
        module: qualified name of the innermost module that called it.
        op: aten name, or the class of a converted module.
        inputs: dtypes it was called with.
        compute: what it computed in.
        output: dtypes of its result.
        rule: what decided.
        count: how many calls this row stands for.
    """

    module: str
    op: str
    inputs: str
    compute: str
    output: str
    rule: str
    count: int = 1


@dataclass(frozen=True)
class PolicyTrace:
    """The rows of one forward pass, in order."""

    rows: tuple[TraceRow, ...]

    def of(self, op: str) -> tuple[TraceRow, ...]:
        """The rows of one op."""
        return tuple(row for row in self.rows if row.op == op)

    def to_dict(self) -> dict[str, Any]:
        """The trace as plain values, for JSON."""
        return {"rows": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        lines = [("module", "op", "inputs", "compute", "output", "rule")]
        for row in self.rows:
            times = f" x{row.count}" if row.count > 1 else ""
            lines.append((row.module or "(model)", row.op + times, row.inputs, row.compute, row.output, row.rule))
        widths = [max(len(line[i]) for line in lines) for i in range(5)]
        return "\n".join(" ".join([*(c.ljust(w) for c, w in zip(line, widths)), line[5]]) for line in lines)


def _dtypes(value: Any) -> list[str]:
    """The float dtypes among the tensors of a nested value, each once, in order."""
    found: list[str] = []
    for tensor in _tensors(value):
        if tensor.is_floating_point():
            found.append(_SHORT.get(tensor.dtype, str(tensor.dtype).removeprefix("torch.")))
    return list(dict.fromkeys(found))


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


class _Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Both witnesses and the stack of modules they stand in."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = {id(module): name for name, module in model.named_modules()}
        self.rows: list[TraceRow] = []
        self.modules: list[str] = []
        self.quiet = 0  # inside an op or a converted module that has its own row
        self.computed: list[str] = []

    def add(self, op: str, inputs: list[str], compute: str, output: list[str], rule: str) -> None:
        module = self.modules[-1] if self.modules else ""
        self.rows.append(TraceRow(module, op, " ".join(inputs), compute, " ".join(output), rule))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        given = _dtypes((args, kwargs))
        if view or name in _QUIET or not given or func.namespace == "lowprec_policy":
            return result
        if self.quiet:
            self.computed += given
        else:
            self.add(name, given, " ".join(given), _dtypes(result), "no rule: runs in the dtypes it is given")
        return result

    def record(self, policy: op_policy.Policy, op: Any, name: str, rule: str, who: str, args: Any, kwargs: Any) -> Any:
        """Stands in the place of the policy's own `_compute` while a trace runs."""
        outer, self.computed = self.computed, []
        self.quiet += 1
        try:
            result, fused = op_policy._compute(policy, op, name, rule, who, args, kwargs)
        finally:
            self.quiet -= 1
            seen, self.computed = self.computed, outer
        compute = (sorted(set(seen), key=seen.index) or ["-"])[0]
        if rule == "inside" or (fused and rule == "fp32"):
            compute = "fp32 inside"
        elif compute == "fp32" and rule == "low" and policy.compute == "fp16":
            compute = "fp16 as fp32"
        self.add(name, _dtypes((args, kwargs)), compute, _dtypes(result), f"{rule}: {who}{', fused' if fused else ''}")
        return result

    def enter(self, module: nn.Module, inputs: Any) -> None:
        self.modules.append(self.names.get(id(module), type(module).__name__))
        if hasattr(module, "_lowprec"):
            self.quiet += 1

    def leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if hasattr(module, "_lowprec"):
            self.quiet -= 1
            state: Any = module._lowprec
            recipe = state.recipe
            casts = " * ".join(recipe.compute if c is None else str(c) for c in (recipe.output.a, recipe.output.b))
            self.add(type(module).__name__, _dtypes(inputs), casts, _dtypes(output), f"module: recipe {recipe.name}")
        self.modules.pop()


def trace(model: nn.Module, batch: Any) -> PolicyTrace:
    """`lowprec.trace_policy`."""
    tracer = _Tracer(model)
    training = {module: module.training for module in model.modules()}
    handles = [
        register_module_forward_pre_hook(tracer.enter),
        register_module_forward_hook(tracer.leave),
    ]
    before = op_policy._recorder
    op_policy._recorder = tracer.record
    try:
        model.eval()
        with torch.no_grad(), tracer:
            if isinstance(batch, Mapping):
                model(**batch)
            elif isinstance(batch, tuple):
                model(*batch)
            else:
                model(batch)
    finally:
        op_policy._recorder = before
        for handle in handles:
            handle.remove()
        for module, mode in training.items():
            module.training = mode
    return PolicyTrace(_merge(tracer.rows))


def _merge(rows: list[TraceRow]) -> tuple[TraceRow, ...]:
    """Equal rows that follow each other become one."""
    merged: list[TraceRow] = []
    for row in rows:
        last = merged[-1] if merged else None
        if last is not None and TraceRow(**{**asdict(last), "count": 1}) == row:
            merged[-1] = TraceRow(**{**asdict(last), "count": last.count + 1})
        else:
            merged.append(row)
    return tuple(merged)

"""The op policy at work: `lowprec.op_table` installed as autocast kernels, the same on CPU and GPU.

    with policy.active(recipe, "cpu"):
        ...             # plain torch code: F.softmax computes in fp32, F.linear in the recipe's compute dtype

torch's autocast is a dispatch key: an op called while it is on goes to that key's kernel first, which casts
operands and calls the op again below. Its lists are torch's; ours are set by registering kernels of our own for the
same key. They act only while a lowprec policy is active and hand everything else to torch's kernel, or to no kernel
where torch has none. Nothing is patched, the kernels work in eager code and under torch.compile(fullgraph=True), and
backward follows from the casts as usual.

How a policy is found: `active` pushes it on a stack. Activation checkpointing runs a block again outside that stack,
but with autocast's own state restored; so `active` turns autocast's weight cache off, and autocast without its cache
and without a policy on the stack means the policy last active for that dtype. (Two models with different switches in
one process, checkpointed, and run backward in turn would see the later one's switches; their dtypes are always right.)

Fused kernels take the place of an op behind code that calls plain `torch.nn.functional`: see `register`.

fp16 on a CPU: torch multiplies fp16 matrices there a hundred times slower than fp32 ones. The products compute in fp32
on operands rounded to fp16 and round the result to fp16, which is what fp16 tensor cores do, at the speed of fp32.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from lowprec import notation
from lowprec.op_table import TABLE, OpRule, families, rule_of
from lowprec.recipe import Recipe

__all__ = ["Policy", "active", "current", "key", "register", "trace_policy", "unregister"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_LOW = (torch.bfloat16, torch.float16)
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_KEYS = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}
_PRODUCTS = frozenset(
    op for rule, name, ops in families() if name in ("products", "convolutions", "attention") for op in ops
)
_NORMS = frozenset(op for op, rule in TABLE.items() if rule == "inside")


@dataclass(frozen=True)
class Policy:
    """What the op kernels need to know of a recipe; it prints as, and parses from, one line.

    Args:
        compute: "bf16" or "fp16".
        uniform: every op in the compute dtype, but for the sums inside normalisation layers.
        attention_pv, rnn, ops: the recipe's switches and rules of one's own.
    """

    compute: str = "bf16"
    uniform: bool = False
    attention_pv: str = "low"
    rnn: str = "low"
    ops: tuple[OpRule, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return _DTYPES[self.compute]

    def rule(self, op: str) -> tuple[str, str]:
        """The rule of an op by its aten name, and who made it.

        >>> Policy().rule("softmax"), Policy(uniform=True).rule("softmax")
        (('fp32', 'op table'), ('given', 'uniform'))
        """
        rule, who = rule_of(op, self.ops)
        if self.uniform and who == "op table" and op not in _NORMS:
            return ("low" if op in _PRODUCTS else "given"), "uniform"
        return rule, who


def key(recipe: Recipe) -> str:
    """The policy of a recipe as one line of text ("" for a recipe that computes in fp32 or tf32).

    >>> from lowprec.recipes import recipe
    >>> key(recipe("fp8")), key(recipe("bf16-true ops=softmax->fp32")), key(recipe("fp32"))
    ('compute=bf16', 'compute=bf16 uniform=true ops=softmax->fp32', '')
    """
    if recipe.compute not in ("bf16", "fp16"):
        return ""
    text = f"compute={recipe.compute}"
    if recipe.policy == "uniform":
        text += " uniform=true"
    if recipe.attention_pv != "low":
        text += f" attention_pv={recipe.attention_pv}"
    if recipe.rnn != "low":
        text += f" rnn={recipe.rnn}"
    if recipe.ops:
        text += " ops=" + "|".join([f"{rule.op}->{rule.rule}" for rule in recipe.ops])
    return text


@cache
def _policy(text: str) -> Policy:
    return Policy(**notation.read_fields(Policy, text.split()))


# -- which policy is on --------------------------------------------------------------------------------------------


class _Active(threading.local):
    def __init__(self) -> None:
        self.stack: list[Policy] = []


_active = _Active()
_last: dict[torch.dtype, Policy] = {}


# The policy travels as text, through two ops without tensors: torch.compile keeps these calls in its graph, runs them
# while it traces the ops in between, and two processes mean the same by them.
_library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
_switch = torch.library.Library("lowprec_policy", "DEF")  # type: ignore[no-untyped-call]
_switch.define("push(str text) -> ()")  # type: ignore[no-untyped-call]
_switch.define("pop() -> ()")  # type: ignore[no-untyped-call]


def _push(text: str) -> None:
    policy = _policy(text)
    _active.stack.append(policy)
    _last[policy.dtype] = policy


def _pop() -> None:
    _active.stack.pop()


_switch.impl("push", _push, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_switch.impl("pop", _pop, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
push, pop = torch.ops.lowprec_policy.push.default, torch.ops.lowprec_policy.pop.default


@contextmanager
def _entered(text: str, device: str) -> Iterator[None]:
    push(text)
    try:
        with torch.autocast(device, dtype=torch.bfloat16 if "=bf16" in text else torch.float16, cache_enabled=False):
            yield
    finally:
        pop()


@contextmanager
def active(recipe: Recipe | str, device: str) -> Iterator[None]:
    """Run torch ops under a recipe's op policy within a block.

    Args:
        recipe: a Recipe, or its policy as `key` gives it (which is what compiled code should pass).
        device: "cpu" or "cuda".

    >>> x = torch.randn(4, 4)
    >>> with active("compute=bf16", "cpu"):
    ...     (x @ x).dtype, torch.softmax(x @ x, -1).dtype
    (torch.bfloat16, torch.float32)
    """
    text = recipe if isinstance(recipe, str) else key(recipe)
    if text:
        with _entered(text, device):
            yield
    else:
        yield


def current() -> Policy | None:
    """The policy that ops run under here and now, or None."""
    if _active.stack:
        return _active.stack[-1]
    if torch.is_autocast_cache_enabled():
        return None
    return _last.get(torch.get_autocast_dtype("cpu" if torch.is_autocast_enabled("cpu") else "cuda"))


# -- the kernels ---------------------------------------------------------------------------------------------------

Fused = Callable[..., Any]
_fused: dict[torch._ops.OpOverload, Fused] = {}
_recorder: Callable[..., Any] | None = None


def register(op: torch._ops.OpOverload, fn: Fused) -> None:
    """Put a fused implementation in the place of an op, wherever a policy is active.

    Args:
        op: an overload, as in ``torch.ops.aten.softmax.int``.
        fn: called as ``fn(policy, *args, **kwargs)`` with the op's own arguments, before any cast, autocast off.
            It returns the result, or NotImplemented where it does not apply (device, dtype, options); then the op
            table's rule is followed. It is not asked where a user's own rule speaks for the op.

    Raises:
        ValueError: if the op has a fused implementation already.
    """
    if op in _fused and getattr(_fused[op], "__qualname__", "") != getattr(fn, "__qualname__", None):
        raise ValueError(f"{op} has a fused implementation already")
    _install(op)
    _fused[op] = fn


def unregister(op: torch._ops.OpOverload) -> None:
    """Take a fused implementation out again (for tests)."""
    _fused.pop(op)


def _run(policy: Policy, op: torch._ops.OpOverload, name: str, below: Any, args: Any, kwargs: Any) -> Any:
    """One op under a policy: the fused implementation if there is one, else the rule."""
    rule, who = policy.rule(name)
    with torch._C._ExcludeDispatchKeyGuard(below):
        if _recorder is not None:
            return _recorder(policy, op, name, rule, who, args, kwargs)
        return _compute(policy, op, name, rule, who, args, kwargs)[0]


def _compute(policy: Policy, op: Any, name: str, rule: str, who: str, args: Any, kwargs: Any) -> tuple[Any, bool]:
    """The result of an op, and whether a fused implementation gave it."""
    fused = _fused.get(op)
    if fused is not None and who != "your rule" and rule != "given":
        result = fused(policy, *args, **kwargs)
        if result is not NotImplemented:
            return result, True
    if name == "scaled_dot_product_attention" and policy.attention_pv == "high":
        return _attention_pv_high(policy, *args, **kwargs), False
    return _RULES[rule](policy, op, name, args, kwargs), False


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Tensors of 16 and 32 bit floats in another dtype; lists of them too; everything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype in _FLOATS and value.dtype != dtype else value
    if isinstance(value, list | tuple):
        return type(value)(_cast(item, dtype) for item in value)
    return value


def _cast_all(args: Any, kwargs: Any, dtype: torch.dtype) -> tuple[list[Any], dict[str, Any]]:
    return [_cast(a, dtype) for a in args], {k: _cast(v, dtype) for k, v in kwargs.items()}


def _low(policy: Policy, op: Any, name: str, args: Any, kwargs: Any) -> Any:
    args, kwargs = _cast_all(args, kwargs, policy.dtype)
    if policy.dtype == torch.float16 and name in _PRODUCTS and args[0].device.type == "cpu":
        args, kwargs = _cast_all(args, kwargs, torch.float32)
        return _cast(op(*args, **kwargs), torch.float16)
    return op(*args, **kwargs)


def _fp32(policy: Policy, op: Any, name: str, args: Any, kwargs: Any) -> Any:
    args, kwargs = _cast_all(args, kwargs, torch.float32)
    return op(*args, **kwargs)


def _given(policy: Policy, op: Any, name: str, args: Any, kwargs: Any) -> Any:
    return op(*args, **kwargs)


def _inside(policy: Policy, op: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Normalisation. On a CPU torch takes 16 bits in with fp32 parameters and computes in fp32 by itself."""
    x = args[0]
    if x.dtype not in _FLOATS:
        return op(*args, **kwargs)
    statistics = (
        [a for a in args[3:5] if isinstance(a, torch.Tensor)] if name in ("batch_norm", "instance_norm") else []
    )
    if any(s.dtype in _LOW for s in statistics):  # running statistics are written to: they cannot be cast
        return op(x.to(statistics[0].dtype), *args[1:], **kwargs).to(policy.dtype)
    mixed = x.dtype == policy.dtype and (x.device.type == "cpu" or name == "batch_norm") and name != "rms_norm"
    others, kwargs = _cast_all(args[1:], kwargs, torch.float32)
    return op(x if mixed else x.to(torch.float32), *others, **kwargs).to(policy.dtype)


_RULES = {"low": _low, "fp32": _fp32, "given": _given, "inside": _inside}


def _attention_pv_high(
    policy: Policy,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention whose probabilities stay fp32 in the product with V; the scores are a product in the compute dtype."""
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    low = query.to(policy.dtype), key.to(policy.dtype).transpose(-2, -1)
    wide = torch.float32 if query.device.type == "cpu" and policy.dtype == torch.float16 else policy.dtype
    scores = torch.matmul(low[0].to(wide), low[1].to(wide)).to(policy.dtype).float()
    scores = scores * (query.size(-1) ** -0.5 if scale is None else scale)
    if is_causal:
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~keep, float("-inf"))
    if attn_mask is not None:
        bias = attn_mask.dtype != torch.bool
        scores = scores + attn_mask.float() if bias else scores.masked_fill(~attn_mask, float("-inf"))
    probabilities = torch.dropout(torch.softmax(scores, -1), dropout_p, dropout_p > 0)
    return torch.matmul(probabilities, value.to(policy.dtype).float()).to(policy.dtype)


# -- installing ----------------------------------------------------------------------------------------------------

_installed: set[torch._ops.OpOverload] = set()


def _install(op: torch._ops.OpOverload) -> None:
    """Register our kernel for one overload under the autocast keys."""
    if op in _installed:
        return
    name = op._schema.name.removeprefix("aten::")
    qualified = str(op).removesuffix(".default").replace("aten.", "aten::", 1)
    for dispatch_key in _KEYS.values():
        default = None
        if torch._C._dispatch_has_kernel_for_dispatch_key(qualified, dispatch_key.name):
            default = torch.library.get_kernel(op, dispatch_key.name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns once that a kernel of its own is replaced
            kernel = _kernel(op, name, dispatch_key, default)
            _library.impl(op, kernel, dispatch_key.name, with_keyset=True)  # type: ignore[no-untyped-call]
    _installed.add(op)


def _kernel(op: torch._ops.OpOverload, name: str, dispatch_key: Any, default: Any) -> Callable[..., Any]:
    below = torch._C.DispatchKeySet(dispatch_key)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        policy = current()
        if policy is not None:
            return _run(policy, op, name, below, args, kwargs)
        if default is not None:
            return default.call_boxed(keyset, *args, **kwargs)
        return op.redispatch(keyset - below, *args, **kwargs)

    return kernel


def _install_table() -> None:
    for name in TABLE:
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            op = getattr(packet, overload)
            schema = op._schema
            writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
            types = [str(a.type) for a in schema.arguments]
            named = any("Dimname" in t for t in types)
            if "Tensor" in types[0] and not named and not writes:
                _install(op)


_install_table()


def trace_policy(model: torch.nn.Module, batch: Any) -> Any:
    """What every op of one forward pass computes in, and why.

    Args:
        model: a model, with a recipe applied or not.
        batch: its input: a tensor, a tuple of arguments or a dict of keyword arguments.

    Returns:
        A `lowprec.policy_trace.PolicyTrace`: print it, or read its ``rows``.
    """
    from lowprec.policy_trace import trace

    return trace(model, batch)

"""Handlers: which class of module is replaced by which, and what every replaced module remembers.

A module is converted in place by changing its class: ``module.__class__ = LowPrecLinear``. It stays the same object,
with the same parameters, hooks, ties and state_dict keys, and one assignment undoes it. So a handler *is* the class
that takes over, a subclass of the class it handles:

    @lp.handles(nn.Linear)
    class LowPrecLinear(nn.Linear):
        def forward(self, input): ...           # self._lowprec is the ModuleState

Optional parts of that class, all looked up by name:

* ``lowprec_plan(site) -> Row | str`` (staticmethod): what would be done with this module, or the sentence why not.
  Without it a module is converted whenever its recipe casts something.
* ``lowprec_products``: True where the module computes a matrix product (first and last layer rules count these).
* ``lowprec_setup(self)`` and ``lowprec_teardown(self)``: called after the class was changed, and before it is undone.

Exact classes are replaced by the handler itself. A subclass that does not override ``forward`` (torch's own
NonDynamicallyQuantizableLinear, the classes that parametrizations make) gets a class made of the handler and itself;
one that does override ``forward`` is left alone and the plan says so: what it computes is not known here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from lowprec.recipe import Cast, Gemm, Recipe

__all__ = [
    "ModuleState",
    "Row",
    "Site",
    "describe_cast",
    "describe_gemm",
    "handles",
    "join",
    "lookup",
    "swap",
    "unswap",
]

_T = TypeVar("_T", bound=type[nn.Module])

# handled class -> the class that takes over
_HANDLERS: dict[type[nn.Module], type[nn.Module]] = {}
# (handler, subclass) -> the class made of both
_JOINED: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


@dataclass
class ModuleState:
    """What a converted module remembers beside its parameters; picklable, copied with the module.

    Args:
        name: the module's qualified name in the model that was applied.
        recipe: the recipe of this module, after rules.
        original: the class to go back to.
        enabled: False within `lowprec.disabled` where the class cannot simply be changed back.
        cache: casts that may be reused (of weights); never copied or pickled.
        observer: where statistics go while `lowprec.observe` is on.
        extra: whatever else a handler wants to remember.
    """

    name: str
    recipe: Recipe
    original: type[nn.Module]
    enabled: bool = True
    cache: dict[Any, Any] = field(default_factory=dict)
    observer: Any = None
    extra: dict[str, Any] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "cache": {}, "observer": None}


@dataclass(frozen=True)
class Row:
    """One module in a plan: what happens to it, as plain data.

    Args:
        name: qualified name of the module.
        cls: its class.
        handler: the class that takes over, or "" where the module stays as it is.
        recipe: the recipe of this module, or None.
        output, grad_input, grad_weight: the casts of the three products' operands, in words.
        carrier: what computes them: "one bf16 product, exact (oneDNN)", "partial fp32 products a block of K", ...
        note: why the module is skipped and what to do, or what else is worth knowing.
    """

    name: str
    cls: str
    handler: str = ""
    recipe: Recipe | None = None
    output: str = ""
    grad_input: str = ""
    grad_weight: str = ""
    carrier: str = ""
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The row as plain strings, for JSON."""
        row = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**row, "recipe": self.recipe.name if self.recipe else None}


@dataclass(frozen=True)
class Site:
    """A module as a handler's ``lowprec_plan`` sees it: the module, its name, and the recipe resolved for it."""

    name: str
    module: nn.Module
    recipe: Recipe
    device: torch.device
    strict: bool = False

    def row(self, handler: type[nn.Module] | str, carrier: str = "", note: str = "", **casts: str) -> Row:
        """A row that converts the module; the casts' words follow from the recipe unless given."""
        words = {role: describe_gemm(getattr(self.recipe, role), self.recipe.compute) for role in _ROLES}
        words.update(casts)
        name = handler if isinstance(handler, str) else handler.__name__
        return Row(self.name, type(self.module).__name__, name, self.recipe, carrier=carrier, note=note, **words)

    def skipped(self, note: str) -> Row:
        """A row that leaves the module as it is, with the sentence why."""
        return Row(self.name, type(self.module).__name__, note=note)


_ROLES = ("output", "grad_input", "grad_weight")


def describe_cast(cast: Cast | None, compute: str) -> str:
    """A cast in a few characters.

    >>> describe_cast(Cast("e4m3", scale="block", block=(1, 128), scale_format="e8m0"), "bf16")
    'e4m3[1x128 e8m0]'
    >>> describe_cast(None, "bf16")
    'bf16'
    """
    if cast is None:
        return compute
    if cast.scale == "none":
        return cast.format
    where = f"{cast.block[0]}x{cast.block[1]}" if cast.block is not None else str(cast.scale)
    words = [where] if cast.scale_format == "fp32" and cast.rule == "amax" else [where, cast.scale_format]
    if cast.rounding != "nearest":
        words.append({"stochastic": "sr"}.get(cast.rounding, cast.rounding))
    if cast.hadamard:
        words.append("rht")
    return f"{cast.format}[{' '.join(words)}]"


def describe_gemm(gemm: Gemm, compute: str) -> str:
    """Both casts of a product.

    >>> describe_gemm(Gemm(Cast("e4m3"), None), "bf16")
    'e4m3[tensor] x bf16'
    """
    return f"{describe_cast(gemm.a, compute)} x {describe_cast(gemm.b, compute)}"


def handles(*classes: type[nn.Module]) -> Callable[[_T], _T]:
    """Register a class that takes over from modules of the given classes (a decorator).

    Args:
        classes: the classes to handle; the decorated class must be a subclass of each.

    Returns:
        The decorator; it returns the class unchanged.

    Raises:
        ValueError: if a class has a handler already.
        TypeError: if the decorated class is not a subclass of a class it is to handle.
    """

    def register(handler: _T) -> _T:
        for cls in classes:
            if not issubclass(handler, cls):
                raise TypeError(f"{handler.__name__} must be a subclass of {cls.__name__} to take over from it")
            known = _HANDLERS.get(cls)
            if known is not None and known.__qualname__ != handler.__qualname__:
                raise ValueError(f"{cls.__name__} has a handler already: {known.__name__}")
            _HANDLERS[cls] = handler
        return handler

    return register


def lookup(module: nn.Module) -> tuple[type[nn.Module] | None, str]:
    """The class that would take over from a module, or None with the reason (empty: no handler is concerned)."""
    cls: Any = type(module)
    if cls in _HANDLERS:
        return _HANDLERS[cls], ""
    base: Any
    for base in cls.__mro__[1:]:
        handler = _HANDLERS.get(base)
        if handler is None:
            continue
        if cls.forward is not base.forward:
            return None, (
                f"{cls.__name__} overrides the forward of {base.__name__}, so what it computes is not known: "
                f"register a class for it with @lowprec.handles({cls.__name__})."
            )
        return join(handler, cls), ""
    return None, ""


def join(handler: type[nn.Module], cls: type[nn.Module]) -> type[nn.Module]:
    """The class that computes as the handler does and is a `cls` otherwise; a ``lowprec_body`` adds to it."""
    if (handler, cls) not in _JOINED:
        body: dict[str, Any] = {
            "__reduce_ex__": _reduce_joined,
            "_lowprec_parts": (handler, cls),
            "__module__": handler.__module__,
        }
        more = getattr(handler, "lowprec_body", None)
        if more is not None:
            body.update(more(cls))
        _JOINED[handler, cls] = type(body.pop("__name__", f"{handler.__name__}_{cls.__name__}"), (handler, cls), body)
    return _JOINED[handler, cls]


def _reduce_joined(self: nn.Module, protocol: Any) -> Any:
    parts: list[type[nn.Module]] = []
    cls = type(self)
    while "_lowprec_parts" in cls.__dict__:
        handler, cls = cls._lowprec_parts  # type: ignore[attr-defined]
        parts.append(handler)
    return _rebuild_joined, (*parts, cls), dict(self.__dict__)


def _rebuild_joined(*parts: type[nn.Module]) -> nn.Module:
    made = functools.reduce(lambda cls, handler: join(handler, cls), reversed(parts))
    return made.__new__(made)


def swap(module: nn.Module, handler: type[nn.Module], name: str, recipe: Recipe) -> None:
    """Convert one module in place."""
    module._lowprec = ModuleState(name, recipe, type(module))  # type: ignore[assignment]
    module.__class__ = handler
    setup = getattr(module, "lowprec_setup", None)
    if setup is not None:
        setup()


def unswap(module: nn.Module) -> None:
    """Give a converted module its own class back."""
    state = module._lowprec
    assert isinstance(state, ModuleState)
    teardown = getattr(module, "lowprec_teardown", None)
    if teardown is not None:
        teardown()
    module.__class__ = state.original
    del module._lowprec

"""lowprec: every training precision, on the machine you have.

Only names live here, each loaded from its module on first use: `import lowprec` loads no torch. Some public functions
are named as the module they come from (``lowprec.formats()``); importing such a module must not hide the function, so
this package does not take submodules of those names as attributes. Write ``from lowprec.formats import Format``.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

# public name -> module
_PUBLIC: dict[str, str] = {
    "Coverage": "lowprec.coverage",
    "coverage": "lowprec.coverage",
    "observe": "lowprec.observe.statistics",
    "linear": "lowprec.functional",
    "matmul": "lowprec.functional",
    "Plan": "lowprec.apply",
    "applied": "lowprec.apply",
    "apply": "lowprec.apply",
    "disabled": "lowprec.apply",
    "plan": "lowprec.apply",
    "undo": "lowprec.apply",
    "handles": "lowprec.handlers",
    "scaled_dot_product_attention": "lowprec.attention",
    "cross_entropy": "lowprec.losses",
    "layer_norm": "lowprec.norms",
    "rms_norm": "lowprec.norms",
    "keep_heap": "lowprec.heap",
    "cast": "lowprec.casts",
    "casts": "lowprec.casts",
    "Format": "lowprec.formats",
    "format": "lowprec.formats",
    "formats": "lowprec.formats",
    "register_format": "lowprec.formats",
    "GradScaler": "lowprec.grad_scaler",
    "Guard": "lowprec.training",
    "PreparedOptimizer": "lowprec.training",
    "StepReport": "lowprec.training",
    "TrainingStoppedError": "lowprec.training",
    "export": "lowprec.training",
    "follow": "lowprec.training",
    "load": "lowprec.training",
    "load_state_dict": "lowprec.training",
    "prepare": "lowprec.training",
    "Quantized": "lowprec.quantize",
    "Rng": "lowprec.quantize",
    "decode": "lowprec.quantize",
    "encode": "lowprec.quantize",
    "pack": "lowprec.quantize",
    "quantize": "lowprec.quantize",
    "round_to": "lowprec.quantize",
    "unpack": "lowprec.quantize",
    "save": "lowprec.training",
    "state_dict": "lowprec.training",
    "LowprecWarning": "lowprec.errors",
    "Accumulator": "lowprec.recipe",
    "Cast": "lowprec.recipe",
    "Delayed": "lowprec.recipe",
    "Gemm": "lowprec.recipe",
    "LossScale": "lowprec.recipe",
    "OpRule": "lowprec.op_table",
    "Recipe": "lowprec.recipe",
    "Rule": "lowprec.recipe",
    "recipe": "lowprec.recipes",
    "recipes": "lowprec.recipes",
    "register_recipe": "lowprec.recipes",
    "trace_policy": "lowprec.policy",
}

__all__ = sorted(_PUBLIC)


class _Package(ModuleType):
    """A package where a public name wins over the module of the same name (`apply`, `formats`, `linear`, ...).

    Importing ``lowprec.apply`` would otherwise bind the module over the function ``lp.apply``.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _PUBLIC and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'lowprec' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})

"""Everything the next step depends on, as one plain dict; and back.

    model        state_dict of the model, and what lowprec keeps beside its parameters (scales of fp8 weights)
    scaling      delayed scaling histories and random counters of converted modules
    optimizer    states, masters, residues, step counts, hyperparameters
    training     loss scales, report of the last step, guard statistics, what has gathered since the last step
    gradients    in the middle of an accumulation: gradients, fp32 accumulators, stored codes
    random       torch's, Python's and numpy's generators

With several models or optimizers the entries are lists, in the order given. Loading checks first and writes then, so an
error (which names the key) leaves everything as it was.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import nn

from lowprec import loss_scale as scaling
from lowprec.errors import unknown_name
from lowprec.gradients import sink
from lowprec.handlers import ModuleState
from lowprec.recipe import Recipe
from lowprec.training.report import StepReport
from lowprec.training.step import PreparedOptimizer
from lowprec.training.window import Window

__all__ = ["load_state_dict", "state_dict"]

VERSION = 1
_SCALE = "lowprec:scale:"
_OTHER_MODEL = "is it the checkpoint of another model or recipe?"
_SINK = ("codes", "scale", "filled", "draws")


def state_dict(model: Any, optimizer: Any = None, *, rng: bool = True) -> dict[str, Any]:
    """Everything that a run goes on from: tensors, numbers, strings, lists and dicts only.

    Args:
        model: the model, or several.
        optimizer: what `lowprec.prepare` returned, or several; None for the model alone. A plain torch optimizer's
            own state is taken too.
        rng: whether the random generators of torch, Python and numpy are part of it.

    Returns:
        The state. Its tensors are those in use, not copies: save it, or copy it, before the next step.
    """
    models, optimizers = _listed(model), _listed(optimizer)
    state: dict[str, Any] = {
        "format": "lowprec",
        "version": VERSION,
        "model": [_model_state(m) for m in models],
        "scaling": [dict(_scaling(m)) for m in models],
        "optimizer": [o.state_dict() for o in optimizers],
        "training": [_training_state(o) for o in optimizers],
        "gradients": [_gradient_state(o) for o in optimizers],
    }
    if rng:
        state["random"] = _random_state()
    return state


def load_state_dict(model: Any, optimizer: Any, state: Mapping[str, Any], *, rng: bool = True) -> None:
    """Go on from a state.

    Args:
        model: the model, or several, prepared as when it was saved.
        optimizer: its optimizer, or several; None to load the model alone.
        state: what `state_dict` returned.
        rng: whether to set the random generators too.

    Raises:
        ValueError: if the state is not lowprec's, of a newer version, or does not fit; the sentence names the key.
    """
    models, optimizers = _listed(model), _listed(optimizer)
    _check_whole(state, models, optimizers)
    for i, (each, saved, scales) in enumerate(zip(models, state["model"], state["scaling"])):
        if not optimizers:
            continue
        _check_model(each, saved, f"model{f'.{i}' if len(models) > 1 else ''}")
        _check_tensors(dict(_scaling(each)), scales, "scaling", "was the model prepared with another recipe?")
    for i, each in enumerate(optimizers):
        _check_training(each, state["training"][i])
    for i, each in enumerate(optimizers):
        each.load_state_dict(state["optimizer"][i])
    with torch.no_grad():
        for each, saved, scales in zip(models, state["model"], state["scaling"]):
            if not optimizers:
                _load_alone(each, saved)
                continue
            each.load_state_dict({k: v for k, v in saved.items() if not k.startswith(_SCALE)})
            for name, scale in _weight_scales(each):
                scale.copy_(saved[name])
            for name, tensor in _scaling(each):
                tensor.copy_(scales[name])
    for i, each in enumerate(optimizers):
        if isinstance(each, PreparedOptimizer):
            _load_gradients(each, state["gradients"][i])
            _load_training(each, state["training"][i])
    if rng and "random" in state:
        _load_random(state["random"])


# -- the model -----------------------------------------------------------------------------------------------------


def _model_state(model: nn.Module) -> dict[str, Any]:
    return {**model.state_dict(), **dict(_weight_scales(model))}


def _weight_scales(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The scales that fp8 weights carry."""
    for name, param in model.named_parameters():
        scale = getattr(param, "_lowprec_scale", None)
        if isinstance(scale, torch.Tensor):
            yield _SCALE + name, scale


def _load_alone(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Load weights whatever they were stored in, into a model under another recipe or none."""
    plain = {k: v for k, v in saved.items() if not k.startswith(_SCALE)}
    for name, value in list(plain.items()):
        scale = saved.get(_SCALE + name)
        if scale is not None:
            plain.pop(f"{name}_scale", None)  # the same scale, as the module's buffer
            plain[name] = value.float() * scale.reshape(-1, *[1] * (value.ndim - 1))
    own = model.state_dict()
    _check_tensors(own, {k: v.to(own[k].dtype) if k in own else v for k, v in plain.items()}, "model", _OTHER_MODEL)
    if any(True for _ in _weight_scales(model)):
        raise ValueError("this model stores its weights in fp8: load them before lowprec.prepare.")
    model.load_state_dict(plain)


def _scaling(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What converted modules keep for themselves: histories, counters of random draws."""
    for prefix, module in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        for name, buffer in module._buffers.items():
            if name.startswith("_lowprec") and buffer is not None:
                yield dot + name, buffer
        own = getattr(module, "_lowprec", None)
        for name, value in own.extra.items() if isinstance(own, ModuleState) else ():
            if isinstance(value, torch.Tensor):
                yield f"{dot}_lowprec.{name}", value


def _check_model(model: nn.Module, saved: Mapping[str, Any], where: str) -> None:
    _check_tensors(_model_state(model), saved, where, _OTHER_MODEL)


def _check_tensors(wanted: Mapping[str, Any], saved: Mapping[str, Any], where: str, hint: str) -> None:
    """Raise for the first key that is missing, unknown, or of another shape or dtype."""
    for key, value in wanted.items():
        if key not in saved:
            raise ValueError(f"the checkpoint has no key {where}.{key}: {hint}")
        other = saved[key]
        if isinstance(value, torch.Tensor):
            if not isinstance(other, torch.Tensor):
                raise ValueError(f"key {where}.{key} of the checkpoint is a {type(other).__name__}, not a tensor.")
            if other.shape != value.shape or other.dtype != value.dtype:
                raise ValueError(
                    f"key {where}.{key} of the checkpoint is {_kind(other)}, and {_kind(value)} is needed: {hint}"
                )
    for key in saved:
        if key not in wanted:
            raise ValueError(f"the checkpoint has a key {where}.{key} that this model has not: {hint}")


def _kind(t: torch.Tensor) -> str:
    return f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}"


# -- the step ------------------------------------------------------------------------------------------------------


def _training_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    if not isinstance(optimizer, PreparedOptimizer):
        return {}
    return {
        "recipe": str(optimizer.recipe) if optimizer.recipe is not None else "",
        "scales": {name: scaling.to_dict(s) for name, s in optimizer.scales.items()},
        "last_step": optimizer.last_step.to_dict(),
        "lost": optimizer.lost,
        "window": dataclasses.asdict(optimizer.window),
        "guard": optimizer.guard.to_dict() if optimizer.guard is not None else None,
    }


def _check_training(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    if not isinstance(optimizer, PreparedOptimizer):
        return
    for key in _training_state(optimizer):
        if key not in saved:
            raise ValueError(f"the checkpoint has no key training.{key}: it was saved without a prepared optimizer.")
    if saved["recipe"] and optimizer.recipe is not None and Recipe.parse(saved["recipe"]) != optimizer.recipe:
        raise ValueError(
            f"key training.recipe: the checkpoint was made with recipe {Recipe.parse(saved['recipe']).name} and this "
            f"optimizer is prepared with {optimizer.recipe.name}; load the model alone (optimizer=None) to change it."
        )
    if (saved["guard"] is None) != (optimizer.guard is None):
        raise ValueError("key training.guard: the checkpoint was made with guard, and prepare without, or the reverse.")
    known = {f.name for f in dataclasses.fields(Window)}
    for key in saved["window"]:
        if key not in known:
            raise unknown_name("key training.window", key, known)
    for state in saved["scales"].values():
        scaling.from_dict(state)


def _load_training(optimizer: PreparedOptimizer, saved: Mapping[str, Any]) -> None:
    optimizer.scales = {name: scaling.from_dict(s) for name, s in saved["scales"].items()}
    optimizer.last_step = StepReport.from_dict(dict(saved["last_step"]))
    optimizer.lost = saved["lost"]
    optimizer.window = Window(**saved["window"])
    if optimizer.guard is not None:
        optimizer.guard.load(saved["guard"])
    optimizer.gradients.remember()


def _gradient_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Gradients that have gathered and wait for a step, and how many random draws each store has made."""
    if not isinstance(optimizer, PreparedOptimizer):
        return {"grads": {}, "sums": {}, "sinks": {}}
    waiting = bool(optimizer.window.micro) and not optimizer.window.stepped
    params = list(enumerate(optimizer.gradients.params()))
    sums = optimizer.gradients.sums
    stores = [(str(i), store) for i, p in params if (store := sink(p)) is not None]
    return {
        "grads": {str(i): p.grad for i, p in params if waiting and p.grad is not None},
        "sums": {str(i): sums[p] for i, p in params if waiting and p in sums},
        "sinks": {
            i: {name: getattr(s, name) for name in _SINK}
            if waiting and s.filled
            else {"codes": None, "scale": None, "filled": False, "draws": s.draws}
            for i, s in stores
        },
    }


def _load_gradients(optimizer: PreparedOptimizer, saved: Mapping[str, Any]) -> None:
    grads = optimizer.gradients
    optimizer.zero_grad()
    for i, param in enumerate(grads.params()):
        key = str(i)
        if key in saved["grads"]:
            param.grad = saved["grads"][key].detach().to(param.device, copy=True)
        if key in saved["sums"]:
            grads.sums[param] = saved["sums"][key].detach().to(param.device, copy=True)
        store = sink(param)
        if store is not None and key in saved["sinks"]:
            for name in _SINK:
                value = saved["sinks"][key][name]
                setattr(store, name, value.to(param.device, copy=True) if isinstance(value, torch.Tensor) else value)


# -- random generators ---------------------------------------------------------------------------------------------


def _random_state() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(numpy.asarray(keys, dtype=numpy.int64).copy()),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def _load_random(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"].cpu())
    python, array = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    keys = array["keys"].numpy().astype(numpy.uint32)
    numpy.random.set_state((array["name"], keys, array["position"], array["has_gauss"], array["cached"]))
    if "cuda" in state and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


# -- the whole -----------------------------------------------------------------------------------------------------


def _listed(given: Any) -> list[Any]:
    if given is None:
        return []
    values = given.values() if isinstance(given, Mapping) else given
    return list(values) if isinstance(given, (list, tuple, Mapping)) else [given]


def _check_whole(state: Any, models: list[Any], optimizers: list[Any]) -> None:
    if not isinstance(state, Mapping) or state.get("format") != "lowprec":
        keys = ", ".join(map(str, list(state)[:6])) if isinstance(state, Mapping) else type(state).__name__
        raise ValueError(f"this is no state of lowprec: key 'format' is missing (it has {keys}).")
    if not isinstance(state.get("version"), int) or state["version"] > VERSION:
        raise ValueError(
            f"key 'version' of the checkpoint is {state.get('version')!r}, and this lowprec reads up to {VERSION}: "
            f"update lowprec."
        )
    needed = ["model", "scaling"] + (["optimizer", "training", "gradients"] if optimizers else [])
    for key in needed:
        if key not in state:
            raise ValueError(f"the checkpoint has no key {key!r}.")
        want = len(models) if key in ("model", "scaling") else len(optimizers)
        if len(state[key]) != want:
            raise ValueError(f"key {key!r} of the checkpoint holds {len(state[key])} of them, and {want} were given.")

"""Loss scaling as immutable values: `adjust` answers what the scale of the next step is.

fp16 holds nothing below 6e-8, and much of a gradient lies there. Multiplying the loss by a scale S multiplies every
gradient by S; the optimizer divides it out again in fp32. The largest S that does not overflow is not known before, so
a dynamic scale looks for it:

    gradients finite        the step is taken; after ``window`` such steps in a row the scale grows:  S <- S * growth
    Inf or NaN among them   the step is skipped and the scale backs off:                              S <- S * backoff

Five systems publish such a rule and differ in the details, which are fields here: a ``floor`` and a ``cap``; a
``hysteresis`` (only the n-th overflow since the last growth backs off; once the allowance is spent every overflow
does); a ``lead`` (DeepSpeed counts its window from the second clean step); what happens at the floor (DeepSpeed stops
there). Numbers are kept as fp32 would keep them, and a growth to infinity is not taken, as in torch.

Why values and not an object with an ``update`` method: a state can be compared, stored, put back and tested against a
published sequence with no optimizer near it, and nothing else can hold a reference to it and change it.

What none of the five does is come back. A burst of bad batches takes the scale down a factor of two a step, and at one
doubling in 2000 steps it needs a month for what it lost in a minute. So a state also remembers the scale of the last
clean step: `collapsed` says that overflow cannot be the cause any more, and `recover` gives the state with the scale
that last worked. This module imports no torch.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lowprec.errors import unknown_name
from lowprec.recipe import LossScale

__all__ = [
    "DynamicScale",
    "LossScaleCollapseError",
    "NoScale",
    "ScaleState",
    "StaticScale",
    "from_apex",
    "from_dict",
    "from_torch",
    "preset",
    "resolve",
    "to_apex",
    "to_dict",
    "to_torch",
]

# A scale this far below the last one that worked (or below 1, when none has) was not too large: look elsewhere.
COLLAPSE_FACTOR = 2.0**-16
# As many skipped steps in a row when the scale cannot move.
COLLAPSE_SKIPS = 10


class LossScaleCollapseError(ValueError):
    """The loss scale went down as far as it may and gradients are still not finite."""


def _fp32(value: float) -> float:
    """The value as fp32 holds it, infinity where it does not fit."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.inf


def _key(state: Mapping[str, Any], key: str, origin: str) -> Any:
    if not isinstance(state, Mapping) or key not in state:
        known = ", ".join(map(str, state)) if isinstance(state, Mapping) and state else "nothing"
        raise ValueError(f"this is not a state dict of {origin}: key {key!r} is missing, it has {known}.")
    return state[key]


def _check(state: ScaleState, *rules: tuple[str, bool, str]) -> None:
    """Raise for the first field whose rule does not hold; a rule is (field, holds, what it must be)."""
    for field, holds, must in rules:
        if not holds:
            raise ValueError(f"loss scale: {field} must be {must}, got {getattr(state, field)!r}")


@dataclass(frozen=True)
class NoScale:
    """No loss scaling; gradients are still checked.

    >>> NoScale().adjust(found_inf=True)
    NoScale(skipped=1)
    """

    skipped: int = 0

    @property
    def scale(self) -> float:
        """The factor of the loss: 1."""
        return 1.0

    @property
    def collapsed(self) -> bool:
        """Whether so many steps in a row were skipped that waiting will not help."""
        return self.skipped >= COLLAPSE_SKIPS

    def adjust(self, found_inf: bool) -> NoScale:
        """The state after a step whose gradients were finite or not."""
        return NoScale(self.skipped + 1 if found_inf else 0)

    def recover(self) -> NoScale:
        """The state to go on from after a collapse."""
        return NoScale()


@dataclass(frozen=True)
class StaticScale:
    """A scale that never moves.

    >>> StaticScale(128.0).adjust(found_inf=True).scale
    128.0
    """

    scale: float = 1.0
    skipped: int = 0

    def __post_init__(self) -> None:
        _check(self, ("scale", 0.0 < self.scale < math.inf, "positive and finite"))

    @property
    def collapsed(self) -> bool:
        """Whether so many steps in a row were skipped that waiting will not help."""
        return self.skipped >= COLLAPSE_SKIPS

    def adjust(self, found_inf: bool) -> StaticScale:
        """The state after a step whose gradients were finite or not."""
        return dataclasses.replace(self, skipped=self.skipped + 1 if found_inf else 0)

    def recover(self) -> StaticScale:
        """The state to go on from after a collapse."""
        return dataclasses.replace(self, skipped=0)


@dataclass(frozen=True)
class DynamicScale:
    """A scale that grows while gradients are finite and backs off when they are not.

    Args:
        scale: the factor of the loss now; values below 1 are allowed.
        growth: factor at the end of a window of clean steps.
        backoff: factor after an overflow.
        window: clean steps in a row before the scale grows.
        floor: smallest scale, or None.
        cap: largest scale, or None.
        hysteresis: how many overflows since the last growth before the scale backs off.
        lead: clean steps after the start and after an overflow that do not count for the window.
        refill: whether any clean step gives the whole hysteresis back, or only a growth.
        strict: raise `LossScaleCollapseError` on an overflow at the floor.
        clean: clean steps counted in this window.
        spent: overflows counted against the hysteresis.
        skipped: steps skipped in a row up to now.
        last_good: scale of the last clean step, or None before the first.

    >>> state = DynamicScale(scale=8.0, window=2)
    >>> [(state := state.adjust(bad)).scale for bad in (True, False, False, False)]
    [4.0, 4.0, 8.0, 8.0]
    """

    scale: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    window: int = 2000
    floor: float | None = None
    cap: float | None = None
    hysteresis: int = 1
    lead: int = 0
    refill: bool = False
    strict: bool = False
    clean: int | None = None
    spent: int = 0
    skipped: int = 0
    last_good: float | None = None

    def __post_init__(self) -> None:
        _check(
            self,
            ("scale", 0.0 <= self.scale < math.inf, "a finite number, not negative"),
            ("growth", 1.0 < self.growth < math.inf, "above 1"),
            ("backoff", 0.0 < self.backoff < 1.0, "between 0 and 1"),
            ("window", self.window >= 1, "at least 1"),
            ("floor", self.floor is None or 0.0 < self.floor < math.inf, "a positive number or None"),
            (
                "cap",
                self.cap is None or (self.floor or 5e-324) <= self.cap < math.inf,
                "not below the floor, or None",
            ),
            ("hysteresis", self.hysteresis >= 1, "at least 1"),
            ("lead", self.lead >= 0, "0 or more"),
        )
        object.__setattr__(self, "scale", _fp32(self.scale))
        if self.clean is None:
            object.__setattr__(self, "clean", -self.lead)

    @property
    def collapsed(self) -> bool:
        """Whether the last step was skipped at a scale where overflow cannot be the reason."""
        if not self.skipped:
            return False
        if self.floor is not None and self.scale <= self.floor and self.skipped > self.hysteresis:
            return True
        return self.scale <= COLLAPSE_FACTOR * (1.0 if self.last_good is None else self.last_good)

    def adjust(self, found_inf: bool) -> DynamicScale:
        """The state after a step whose gradients were finite or not.

        Args:
            found_inf: whether an Inf or NaN was among the gradients.

        Returns:
            The state of the next step.

        Raises:
            LossScaleCollapseError: on an overflow at the floor, with ``strict``.
        """
        return self._overflowed() if found_inf else self._stepped()

    def _overflowed(self) -> DynamicScale:
        spent = min(self.spent + 1, self.hysteresis)
        scale = self.scale
        if spent >= self.hysteresis:
            if self.strict and self.floor is not None and scale <= self.floor:
                raise LossScaleCollapseError(
                    f"the loss scale is at its floor {self.floor:g} and gradients are still not finite: look for the "
                    f"cause in the model or the data, or lower the floor."
                )
            scale = max(_fp32(scale * self.backoff), self.floor or 0.0)
        return dataclasses.replace(self, scale=scale, clean=-self.lead, spent=spent, skipped=self.skipped + 1)

    def _stepped(self) -> DynamicScale:
        assert self.clean is not None
        scale, clean, spent = self.scale, self.clean + 1, 0 if self.refill else self.spent
        if clean >= self.window:
            scale, clean, spent = self._grown(), 0, 0
        return dataclasses.replace(self, scale=scale, clean=clean, spent=spent, skipped=0, last_good=self.scale)

    def _grown(self) -> float:
        scale = _fp32(self.scale * self.growth)
        if not math.isfinite(scale):
            return self.scale
        return scale if self.cap is None else min(scale, self.cap)

    def recover(self) -> DynamicScale:
        """The state to go on from after a collapse: the last scale that worked, or 1 when none has.

        The scale it was left at becomes the last good one, so that a recovery which fails is not tried again.
        """
        target = 1.0 if self.last_good is None else self.last_good
        target = max(target, self.scale, self.floor or 0.0)
        return dataclasses.replace(
            self, scale=target, clean=-self.lead, spent=0, skipped=0, last_good=self.scale or None
        )


ScaleState = NoScale | StaticScale | DynamicScale

# The published rules. torch: torch.amp.GradScaler. Apex: amp.scaler.LossScaler. Keras: LossScaleOptimizer.
# DeepSpeed: DynamicLossScaler with the defaults of its "fp16" section. Megatron: DynamicGradScaler and its arguments.
_PRESETS: dict[str, ScaleState] = {
    "none": NoScale(),
    "torch": DynamicScale(),
    "apex": DynamicScale(cap=2.0**24),
    "keras": DynamicScale(scale=2.0**15),
    "deepspeed": DynamicScale(window=1000, floor=1.0, hysteresis=2, lead=1, strict=True),
    "megatron": DynamicScale(scale=2.0**32, window=1000, floor=1.0, hysteresis=2),
}


def preset(name: str, **changes: Any) -> ScaleState:
    """The scaler of another system: "none", "torch", "apex", "keras", "deepspeed", "megatron".

    Args:
        name: the system.
        **changes: fields of `DynamicScale` to set differently.

    Returns:
        The state before the first step.

    >>> preset("megatron").scale == 2.0**32, preset("torch", window=100).window
    (True, 100)
    """
    if name not in _PRESETS:
        raise unknown_name("loss scale preset", name, _PRESETS)
    return dataclasses.replace(_PRESETS[name], **changes)


def resolve(value: ScaleState | LossScale | str | float | None) -> ScaleState:
    """The scaler state that a recipe's entry, a preset's name or a number stands for.

    >>> resolve(128.0), resolve(None)
    (StaticScale(scale=128.0, skipped=0), NoScale(skipped=0))
    """
    if value is None:
        return NoScale()
    if isinstance(value, (NoScale, StaticScale, DynamicScale)):
        return value
    if isinstance(value, str):
        return preset(value)
    if isinstance(value, LossScale):
        return _from_recipe(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return StaticScale(float(value))
    raise TypeError(f"a loss scale is a number, a preset's name, a LossScale or a scaler state, got {value!r}")


def _from_recipe(entry: LossScale) -> ScaleState:
    if entry.kind == "none":
        return NoScale()
    if entry.kind == "static":
        return StaticScale(entry.init)
    if entry.kind != "dynamic":
        raise unknown_name("kind of loss scale", entry.kind, ["none", "static", "dynamic"])
    shared = {f.name for f in dataclasses.fields(DynamicScale)} & {f.name for f in dataclasses.fields(entry)}
    return DynamicScale(scale=entry.init, **{name: getattr(entry, name) for name in shared})


# -- exchange ----------------------------------------------------------------------------------------------------

_KINDS: dict[str, type[NoScale] | type[StaticScale] | type[DynamicScale]] = {
    "none": NoScale,
    "static": StaticScale,
    "dynamic": DynamicScale,
}


def to_dict(state: ScaleState) -> dict[str, Any]:
    """A plain dict of a state, for a checkpoint.

    >>> to_dict(StaticScale(2.0))
    {'kind': 'static', 'scale': 2.0, 'skipped': 0}
    """
    kind = next(name for name, cls in _KINDS.items() if type(state) is cls)
    return {"kind": kind, **dataclasses.asdict(state)}


def from_dict(state: Mapping[str, Any]) -> ScaleState:
    """The state that `to_dict` wrote.

    >>> from_dict(to_dict(DynamicScale(scale=4.0))) == DynamicScale(scale=4.0)
    True
    """
    kind = state.get("kind")
    if kind not in _KINDS:
        raise unknown_name("kind of loss scale", kind, _KINDS)
    known = {f.name for f in dataclasses.fields(_KINDS[kind])}
    for key in state:
        if key != "kind" and key not in known:
            raise unknown_name(f"key of a {kind} loss scale", key, known)
    return _KINDS[kind](**{key: value for key, value in state.items() if key != "kind"})


def from_torch(state: Mapping[str, Any]) -> DynamicScale:
    """A `torch.amp.GradScaler` state dict as a scaler state.

    >>> from_torch({"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 10,
    ...             "_growth_tracker": 3}).clean
    3
    """
    return DynamicScale(
        scale=float(_key(state, "scale", "a torch GradScaler")),
        growth=float(_key(state, "growth_factor", "a torch GradScaler")),
        backoff=float(_key(state, "backoff_factor", "a torch GradScaler")),
        window=int(_key(state, "growth_interval", "a torch GradScaler")),
        clean=int(_key(state, "_growth_tracker", "a torch GradScaler")),
    )


def to_torch(state: ScaleState) -> dict[str, Any]:
    """A scaler state as `torch.amp.GradScaler.load_state_dict` takes it.

    What torch has no name for (floor, cap, hysteresis) is left out.
    """
    if isinstance(state, NoScale):
        return {}
    if isinstance(state, StaticScale):
        state = DynamicScale(scale=state.scale, window=2**31 - 1)
    return {
        "scale": state.scale,
        "growth_factor": state.growth,
        "backoff_factor": state.backoff,
        "growth_interval": state.window,
        "_growth_tracker": max(state.clean or 0, 0),
    }


def from_apex(state: Mapping[str, Any]) -> list[DynamicScale]:
    """An Apex ``amp.state_dict()`` as scaler states, one for each loss.

    >>> from_apex({"loss_scaler0": {"loss_scale": 256.0, "unskipped": 7}})[0].scale
    256.0
    """
    scalers: list[DynamicScale] = []
    while (name := f"loss_scaler{len(scalers)}") in state:
        entry = state[name]
        base = _PRESETS["apex"]
        assert isinstance(base, DynamicScale)
        scale = float(_key(entry, "loss_scale", f"Apex amp, {name}"))
        clean = int(_key(entry, "unskipped", f"Apex amp, {name}"))
        scalers.append(dataclasses.replace(base, scale=scale, clean=clean))
    if not scalers:
        _key(state, "loss_scaler0", "Apex amp")
    return scalers


def to_apex(states: ScaleState | list[ScaleState]) -> dict[str, Any]:
    """Scaler states, one for each loss, as ``apex.amp.load_state_dict`` takes them."""
    listed = states if isinstance(states, list) else [states]
    return {
        f"loss_scaler{i}": {"loss_scale": s.scale, "unskipped": max(getattr(s, "clean", 0) or 0, 0)}
        for i, s in enumerate(listed)
    }

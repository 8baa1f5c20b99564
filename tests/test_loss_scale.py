"""Loss scale states against torch's scaler and against the published rules of the others."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch

from lowprec import loss_scale
from lowprec.loss_scale import DynamicScale, LossScaleCollapseError, NoScale, StaticScale
from lowprec.recipe import LossScale

# -- torch ---------------------------------------------------------------------------------------------------------


def _torch_sequence(start: DynamicScale, pattern: list[bool]) -> list[tuple[float, int]]:
    """What torch's own update makes of a pattern: its op on its own tensors."""
    scale = torch.full((), start.scale)
    tracker = torch.full((), 0, dtype=torch.int32)
    seen = []
    for bad in pattern:
        found = torch.full((), float(bad))
        torch._amp_update_scale_(scale, tracker, found, start.growth, start.backoff, start.window)
        seen.append((scale.item(), int(tracker.item())))
    return seen


def test_torch_sequence_over_10000_random_patterns() -> None:
    draw = random.Random(0)
    for _ in range(10_000):
        start = DynamicScale(
            scale=2.0 ** draw.randint(-20, 120) * draw.choice([1.0, 1.3]),
            growth=draw.choice([2.0, 1.5, 4.0]),
            backoff=draw.choice([0.5, 0.1, 0.7]),
            window=draw.choice([1, 2, 3, 7]),
        )
        share = draw.choice([0.0, 0.05, 0.3, 0.7, 1.0])
        pattern = [draw.random() < share for _ in range(30)]
        state, seen = start, []
        for bad in pattern:
            state = state.adjust(bad)
            assert state.clean is not None
            seen.append((state.scale, state.clean))
        assert seen == _torch_sequence(start, pattern)


# -- the published rules, each written from its description, with its own state -----------------------------------


def _apex(pattern: list[bool], window: int) -> list[float]:
    scale, unskipped, out = 2.0**16, 0, []
    for bad in pattern:
        scale, unskipped = (scale / 2, 0) if bad else (scale, unskipped + 1)
        if unskipped == window:
            scale, unskipped = min(2.0**24, scale * 2), 0
        out.append(scale)
    return out


def _keras(pattern: list[bool], window: int) -> list[float]:
    scale, counter, out = 2.0**15, 0, []
    for bad in pattern:
        if bad:
            scale, counter = scale / 2, 0
        elif counter == window - 1:
            scale, counter = scale * 2, 0
        else:
            counter += 1
        out.append(scale)
    return out


def _deepspeed(pattern: list[bool], window: int, consecutive: bool = False) -> list[float]:
    scale, last, left, out = 2.0**16, -1, 2, []
    for i, bad in enumerate(pattern):
        if bad:
            if left == 1:
                if scale == 1.0:
                    out.append(math.nan)  # the run ends here
                    return out
                scale = max(scale / 2, 1.0)
            else:
                left -= 1
            last = i
        else:
            if consecutive:
                left = 2
            stable = i - last - 1
            if stable > 0 and stable % window == 0:
                left, scale = 2, scale * 2
        out.append(scale)
    return out


def _megatron(pattern: list[bool], window: int) -> list[float]:
    scale, good, left, out = 2.0**32, 0, 2, []
    for bad in pattern:
        if bad:
            good, left = 0, left - 1
            if left <= 0:
                scale = max(scale * 0.5, 1.0)
        else:
            good += 1
            if good == window:
                good, left, scale = 0, 2, scale * 2
        out.append(scale)
    return out


def _run(state: loss_scale.ScaleState, pattern: list[bool]) -> list[float]:
    out = []
    for bad in pattern:
        try:
            state = state.adjust(bad)
        except LossScaleCollapseError:
            return [*out, math.nan]
        out.append(state.scale)
    return out


RULES = {"apex": _apex, "keras": _keras, "deepspeed": _deepspeed, "megatron": _megatron}


@pytest.mark.parametrize("name", RULES)
def test_published_sequence(name: str) -> None:
    draw = random.Random(1)
    for _ in range(1000):
        window = draw.choice([1, 2, 3, 5, 10])
        share = draw.choice([0.0, 0.02, 0.2, 0.5, 0.9])
        pattern = [draw.random() < share for _ in range(60)]
        expected = RULES[name](pattern, window)
        seen = _run(loss_scale.preset(name, window=window), pattern)
        assert str(seen) == str(expected), (window, pattern)


def test_deepspeed_consecutive_hysteresis() -> None:
    draw = random.Random(2)
    for _ in range(300):
        pattern = [draw.random() < 0.4 for _ in range(50)]
        seen = _run(loss_scale.preset("deepspeed", window=3, refill=True), pattern)
        assert str(seen) == str(_deepspeed(pattern, 3, consecutive=True))


def test_sequences_by_hand() -> None:
    # hysteresis 2: the first overflow is forgiven, the second and every later one backs off until a growth
    assert _run(loss_scale.preset("megatron"), [True, True, True])[-1] == 2.0**30
    # DeepSpeed's first window is one step longer than its later ones
    grown = _run(loss_scale.preset("deepspeed"), [False] * 2001)
    assert [grown.index(2.0**17), grown.index(2.0**18)] == [1000, 2000]
    # Apex stops at its cap, torch does not
    assert _run(loss_scale.preset("apex", window=1), [False] * 10)[-1] == 2.0**24
    assert _run(loss_scale.preset("torch", window=1), [False] * 10)[-1] == 2.0**26
    assert _run(loss_scale.preset("keras"), [False] * 2000)[-2:] == [2.0**15, 2.0**16]


def test_preset_defaults_are_the_published_ones() -> None:
    table = {
        "torch": (2.0**16, 2000, None, None, 1),
        "apex": (2.0**16, 2000, None, 2.0**24, 1),
        "keras": (2.0**15, 2000, None, None, 1),
        "deepspeed": (2.0**16, 1000, 1.0, None, 2),
        "megatron": (2.0**32, 1000, 1.0, None, 2),
    }
    for name, row in table.items():
        s = loss_scale.preset(name)
        assert isinstance(s, DynamicScale)
        assert (s.scale, s.window, s.floor, s.cap, s.hysteresis) == row
        assert (s.growth, s.backoff) == (2.0, 0.5)


# -- behaviour -----------------------------------------------------------------------------------------------------


def test_states_are_immutable_and_hashable() -> None:
    state = DynamicScale()
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.scale = 1.0  # type: ignore[misc]
    assert state.adjust(True) != state
    assert hash(state) == hash(DynamicScale())


def test_growth_to_infinity_is_not_taken() -> None:
    state = DynamicScale(scale=2.0**127, window=1)
    assert state.adjust(False).scale == 2.0**127


def test_scale_below_one() -> None:
    state = DynamicScale(scale=1.0)
    for _ in range(3):
        state = state.adjust(True)
    assert state.scale == 0.125 and not state.collapsed


def test_collapse_and_the_way_back() -> None:
    state = DynamicScale(scale=1024.0).adjust(False)
    steps = 0
    while not state.collapsed:
        state, steps = state.adjust(True), steps + 1
    assert steps == 16 and state.scale == 2.0**-6
    back = state.recover()
    assert back.scale == 1024.0 and not back.collapsed
    # the same again straight after: the low scale is what works, so it is not raised a second time
    again = back
    for _ in range(16):
        again = again.adjust(True)
    assert again.adjust(False).recover().scale == again.scale


def test_a_scale_of_zero_can_recover() -> None:
    state = DynamicScale()
    for _ in range(200):
        state = state.adjust(True)
    assert state.scale == 0.0 and state.collapsed
    assert state.recover().scale == 1.0
    with_history = DynamicScale().adjust(False)
    for _ in range(200):
        with_history = with_history.adjust(True)
    assert with_history.recover().scale == 65536.0


def test_calibration_is_no_collapse() -> None:
    state = loss_scale.preset("megatron")
    for _ in range(25):
        state = state.adjust(True)
        assert not state.collapsed
    assert not state.adjust(False).collapsed


@pytest.mark.parametrize("state", [NoScale(), StaticScale(8.0)])
def test_fixed_scales(state: NoScale | StaticScale) -> None:
    start = state.scale
    for _ in range(10):
        assert not state.collapsed
        state = state.adjust(True)
    assert state.scale == start and state.collapsed and not state.adjust(False).collapsed


def test_strict_floor_raises() -> None:
    state = DynamicScale(scale=2.0, floor=1.0, strict=True).adjust(True)
    with pytest.raises(LossScaleCollapseError, match="at its floor 1 and gradients are still not finite"):
        state.adjust(True)


# -- construction and exchange -------------------------------------------------------------------------------------


def test_resolve() -> None:
    entry = LossScale("dynamic", init=512.0, window=10, floor=1.0, hysteresis=3)
    assert loss_scale.resolve(entry) == DynamicScale(scale=512.0, window=10, floor=1.0, hysteresis=3)
    assert loss_scale.resolve(LossScale("static", init=4.0)) == StaticScale(4.0)
    assert loss_scale.resolve(LossScale()) == NoScale()
    assert loss_scale.resolve("apex") == loss_scale.preset("apex")
    assert loss_scale.resolve(2) == StaticScale(2.0)
    with pytest.raises(ValueError, match="did you mean 'megatron'"):
        loss_scale.resolve("megatrn")
    with pytest.raises(TypeError, match="a loss scale is a number"):
        loss_scale.resolve([1])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "bad",
    [
        {"scale": -1.0},
        {"scale": math.inf},
        {"scale": math.nan},
        {"growth": 1.0},
        {"backoff": 1.0},
        {"window": 0},
        {"floor": 0.0},
        {"cap": 0.5, "floor": 1.0},
        {"hysteresis": 0},
        {"lead": -1},
    ],
)
def test_bad_fields(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"loss scale: {next(iter(bad))} must be"):
        DynamicScale(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["none", "torch", "apex", "keras", "deepspeed", "megatron"])
def test_dict_round_trip(name: str) -> None:
    state = loss_scale.preset(name)
    for bad in (False, True, False):
        state = state.adjust(bad)
    assert loss_scale.from_dict(loss_scale.to_dict(state)) == state


def test_dict_errors_name_the_key() -> None:
    with pytest.raises(ValueError, match=r"unknown key of a dynamic loss scale 'scael'; did you mean 'scale'"):
        loss_scale.from_dict({"kind": "dynamic", "scael": 1.0})
    with pytest.raises(ValueError, match="unknown kind of loss scale None"):
        loss_scale.from_dict({"scale": 1.0})


def test_torch_state_dict_both_ways() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=7)
    scaler.scale(torch.ones(()))
    assert scaler._scale is not None and scaler._growth_tracker is not None
    scaler._growth_tracker.fill_(5)
    state = loss_scale.from_torch(scaler.state_dict())
    assert state == DynamicScale(scale=512.0, window=7, clean=5)
    assert loss_scale.to_torch(state) == scaler.state_dict()
    with pytest.raises(ValueError, match="key 'growth_factor' is missing, it has scale"):
        loss_scale.from_torch({"scale": 1.0})


def test_apex_state_dict_both_ways() -> None:
    published = {
        "loss_scaler0": {"loss_scale": 1024.0, "unskipped": 11},
        "loss_scaler1": {"loss_scale": 2.0, "unskipped": 0},
    }
    states = loss_scale.from_apex(published)
    assert [s.scale for s in states] == [1024.0, 2.0] and states[0].clean == 11 and states[0].cap == 2.0**24
    assert loss_scale.to_apex(list(states)) == published
    with pytest.raises(ValueError, match="key 'loss_scaler0' is missing"):
        loss_scale.from_apex({"scale": 1})

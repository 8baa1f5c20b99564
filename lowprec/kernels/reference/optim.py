"""Reference of the optimizer kernels: what every store, rounding and update rule means, in pure torch.

All arithmetic is fp32, one rounded operation at a time (never fused multiply-add), in the order written here.
Coefficients are rounded to fp32 first. With f = gradient factor (its sign turns for maximize), g = f * gradient:

    every rule   g = g + l2 * w                    where l2 != 0   (weight decay inside the gradient)
                 w = w * keep                      where keep != 1 (decoupled weight decay: keep = 1 - lr * decay)
    sgd          m = m * momentum + g * dampen;    d = g + m * momentum (nesterov) or m;   w = w - lr * d
    adam         m = m + (g - m) * (1 - b1);       v = v * b2 + (g * (1 - b2)) * g
                 x = max(x, v) (amsgrad);          w = w - rate * (m / (sqrt(v or x) * correction + eps))
    lion         d = sign(m * b1 + g * (1 - b1));  m = m * b2 + g * (1 - b2);              w = w - lr * d

An element whose new weight or state would not be finite keeps its weight and states, and is counted.

The gradient with coupled decay uses w before it is decayed; both are never on together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from lowprec.kernels.stores import STORES, Batch, Program, Rounding, Slot, Store, blocks, matrix

__all__ = [
    "Draw",
    "decode",
    "encode",
    "halves",
    "philox",
    "read_weight",
    "store_rows",
    "store_stats",
    "update",
    "words",
    "write_weight",
]


class Draw(NamedTuple):
    """Key and counters of the stochastic draws of one tensor in one step."""

    seed: int
    step: int
    stream: int
    offset: int


# -- draws ---------------------------------------------------------------------------------------------------------


def _mul32(a: torch.Tensor, m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low half of the 64-bit product of 32-bit numbers held in int64."""
    low, high = a & 0xFFFF, a >> 16
    p0, p1 = low * m, high * m
    total = (p1 & 0xFFFFFFFFFFFF) + (p0 >> 16)
    return (total >> 16) & 0xFFFFFFFF, ((total & 0xFFFF) << 16) | (p0 & 0xFFFF)


def philox(block: torch.Tensor, draw: Draw) -> torch.Tensor:
    """Four 32-bit words for each block number (int64), by Philox4x32-10; shape (blocks, 4)."""
    c0, c1 = block & 0xFFFFFFFF, (block >> 32) & 0xFFFFFFFF
    c2, c3 = torch.full_like(c0, draw.step & 0xFFFFFFFF), torch.full_like(c0, draw.stream & 0xFFFFFFFF)
    k0, k1 = draw.seed & 0xFFFFFFFF, (draw.seed >> 32) & 0xFFFFFFFF
    for _ in range(10):
        h0, l0 = _mul32(c0, 0xD2511F53)
        h1, l1 = _mul32(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return torch.stack([c0, c1, c2, c3], dim=-1)


def halves(n: int, draw: Draw, device: torch.device) -> torch.Tensor:
    """16 random bits for each of n elements: element i takes half-word i % 8 of block i // 8."""
    index = torch.arange(draw.offset, draw.offset + n, dtype=torch.int64, device=device)
    first, last = draw.offset // 8, (draw.offset + max(n, 1) - 1) // 8
    w = philox(torch.arange(first, last + 1, dtype=torch.int64, device=device), draw)
    h = torch.stack([w & 0xFFFF, w >> 16], dim=-1).reshape(-1)
    return h[index - 8 * first]


def words(n: int, draw: Draw, device: torch.device) -> torch.Tensor:
    """32 random bits for each of n elements: element i takes word i % 4 of block i // 4."""
    index = torch.arange(draw.offset, draw.offset + n, dtype=torch.int64, device=device)
    first, last = draw.offset // 4, (draw.offset + max(n, 1) - 1) // 4
    return philox(torch.arange(first, last + 1, dtype=torch.int64, device=device), draw).reshape(-1)[index - 4 * first]


_GROUP = 256
_STATE_KEY = 0x6C6F777072656373


def dither(n: int, draw: Draw, state: int, device: torch.device) -> torch.Tensor:
    """32 random bits for each element of a state: those of its place in a fixed group of 256, shifted by a word
    that is drawn for the group. Each is uniform; neighbours differ by what they always differ by."""
    index = torch.arange(draw.offset, draw.offset + n, dtype=torch.int64, device=device)
    base = philox(torch.arange(_GROUP // 4, dtype=torch.int64, device=device), Draw(0, 0, 0, 0)).reshape(-1)
    first, last = draw.offset // _GROUP, (draw.offset + max(n, 1) - 1) // _GROUP
    groups = torch.arange(first, last + 1, dtype=torch.int64, device=device)
    shift = philox(groups, Draw(draw.seed ^ _STATE_KEY, draw.step, draw.stream, 0))[:, state]
    return (base[index % _GROUP] + shift[index // _GROUP - first]) & 0xFFFFFFFF


def encode_state(
    x: torch.Tensor, s: Store, rounding: Rounding, draw: Draw, state: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`encode`, with the dither as random numbers: 16 bits of it for bf16, all 32 else."""
    if rounding == "nearest" or s.element == "fp32":
        return encode(x, s)
    random = dither(x.numel(), draw, state, x.device).reshape(x.shape)
    return encode(x, s, random >> 16, 16) if s.element == "bf16" else encode(x, s, random, 32, dithered=True)


def encode_weight(
    x: torch.Tensor, s: Store, rounding: Rounding, draw: Draw
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`encode`, with a draw for every element: 16 bits where they decide exactly (bf16), else 32."""
    if rounding == "nearest" or s.element == "fp32":
        return encode(x, s)
    bits = 16 if s.element == "bf16" else 32
    random = (halves if bits == 16 else words)(x.numel(), draw, x.device).reshape(x.shape)
    return encode(x, s, random, bits)


# -- rounding fp32 to a float format ---------------------------------------------------------------------------------

# element -> mantissa bits, exponent of the smallest normal
_GRID = {"bf16": (7, -126), "fp16": (10, -14), "e4m3": (3, -6), "e5m2": (2, -14), "e2m1": (1, 0)}
_TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def _stochastic(y: torch.Tensor, element: str, random: torch.Tensor, bits: int) -> torch.Tensor:
    """Values of y on the grid of a format, rounded up in magnitude with the probability of what is cut off."""
    mantissa, lowest = _GRID[element]
    magnitude = y.abs().double()
    exponent = torch.clamp(torch.frexp(magnitude)[1] - 1, min=lowest) - mantissa
    scaled = torch.ldexp(magnitude, -exponent)
    floor = scaled.floor()
    threshold = torch.floor((scaled - floor) * 2.0**bits + 0.5)
    rounded = torch.ldexp(floor + (random < threshold), exponent).float()
    return torch.where(torch.isfinite(y), torch.copysign(rounded, y), y)


def _round(y: torch.Tensor, element: str, random: torch.Tensor | None, bits: int) -> torch.Tensor:
    """Codes (as a torch dtype) of y, which the caller has clamped where the format must not overflow."""
    if random is not None:
        y = _stochastic(y, element, random, bits)
    return y.to(_TORCH[element])


def root(x: torch.Tensor) -> torch.Tensor:
    """The correctly rounded square root (a device's own fp32 root may be an ulp off; through fp64 none is)."""
    return x.double().sqrt().float()


# -- stores ----------------------------------------------------------------------------------------------------------


class Dynamic(NamedTuple):
    """A dynamic map: code c >= 1 lies in decade d = floor(log2 c), value = c * slope[d] + start[d].

    ``into`` and ``shift`` are the inverse, c = floor(y * into[d] + shift[d]). A decade is three binades wide.
    """

    slope: torch.Tensor
    start: torch.Tensor
    into: torch.Tensor
    shift: torch.Tensor

    @property
    def decades(self) -> int:
        """How many decades."""
        return len(self.slope)


def dynamic(decades: int) -> Dynamic:
    """The map with that many decades, the highest one [1/8, 1)."""
    unit = torch.tensor([8.0 ** (d - decades + 1) for d in range(decades)], dtype=torch.float64)
    n = torch.tensor([2.0**d for d in range(decades)], dtype=torch.float64)
    step = 0.875 * unit / n
    return Dynamic(*(x.float() for x in (step, 0.5 * step - 0.75 * unit, 1.0 / step, n * 6.0 / 7.0)))


MAPS = {"8bit": dynamic(7), "8bit-root": dynamic(8)}


def top(s: Store) -> float:
    """The largest value of a code: amax is scaled to it."""
    if s.name in MAPS:
        m = MAPS[s.name]
        return float((2.0**m.decades - 1) * m.slope[-1] + m.start[-1])
    return s.top


def _dynamic_value(c: torch.Tensor, name: str) -> torch.Tensor:
    m = MAPS[name]
    d = torch.clamp(torch.frexp(c)[1] - 1, min=0).long()
    return torch.where(c > 0, c * m.slope.to(c.device)[d] + m.start.to(c.device)[d], torch.zeros_like(c))


def _dynamic_code(y: torch.Tensor, name: str, random: torch.Tensor | None) -> torch.Tensor:
    """Magnitude codes of y >= 0; zero stays zero."""
    m = MAPS[name]
    exponent = torch.where(y > 0, torch.frexp(y)[1], -1000)  # y in [2^(exponent - 1), 2^exponent)
    d = torch.clamp(m.decades - 1 - torch.div(-exponent, 3, rounding_mode="floor"), 0, m.decades - 1)
    position = y * m.into.to(y.device)[d] + m.shift.to(y.device)[d]
    if random is not None:
        position = position + centred(random)
    c = torch.clamp(torch.floor(position), max=2.0**m.decades - 1)
    return torch.where(y > 0, c, torch.zeros_like(c))


def centred(random: torch.Tensor) -> torch.Tensor:
    """The upper 23 of 32 random bits as a number in [-1/2, 1/2)."""
    return (random >> 9).float() * 2.0**-23 - 0.5


# magnitudes of the 4-bit code of a first moment: e2m1
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _scale(amax: torch.Tensor, s: Store) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale of a block and what values are multiplied by."""
    if s.pow2:
        f, e = torch.frexp(amax)
        f_top, e_top = math.frexp(s.top)
        e = torch.clamp(e - e_top + (f > f_top), min=-126)
        scale, inverse = torch.ldexp(torch.ones_like(amax), e), torch.ldexp(torch.ones_like(amax), -e)
    else:
        limit = float(torch.tensor(top(s)) * 2.0**-126)
        scale = torch.clamp(amax, min=limit) / top(s)
        inverse = torch.ones_like(scale) / scale
    zero = torch.zeros_like(scale) if s.name == "4bit-root" else torch.ones_like(scale)
    scale = torch.where(amax > 0, scale, zero)
    inverse = torch.where(amax > 0, inverse, torch.ones_like(inverse))
    bad = ~torch.isfinite(amax)
    return torch.where(bad, torch.full_like(scale, torch.nan), scale), torch.where(
        bad, torch.zeros_like(scale), inverse
    )


def _blocked(x: torch.Tensor, s: Store) -> torch.Tensor:
    """x as (rows, blocks, block), padded with zeros."""
    rows, cols = matrix(x.shape)
    size = cols if s.block < 0 else s.block
    n = blocks(s, cols)
    return torch.nn.functional.pad(x.reshape(rows, cols), (0, n * size - cols)).reshape(rows, n, size)


def encode(
    x: torch.Tensor, s: Store, random: torch.Tensor | None = None, bits: int = 16, dithered: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Codes and scales of fp32 values.

    Args:
        x: values.
        s: how to store them.
        random: random numbers of `bits` bits to round stochastically with; None rounds to nearest.
        bits: 16 or 32.
        dithered: floats under a scale add a share of their quantum and round to nearest.
    """
    x = x.contiguous()
    if not s.block:
        return (x.clone() if s.element == "fp32" else _round(x, s.element, random, bits)), None
    if s.root:
        x = root(x)
    rows, cols = matrix(x.shape)
    amax = _blocked(x, s).abs().amax(-1)
    scale, inverse = _scale(amax, s)
    y = _blocked(x, s) * inverse[..., None]
    y = y.reshape(rows, -1)[:, :cols].reshape(x.shape)
    y = torch.where(torch.isfinite(y), y, torch.zeros_like(y))
    positive = y > 0
    if dithered and random is not None and s.element in _GRID:
        y, random = _moved(y, s.element, centred(random)), None
    codes = _codes(y, s, random, bits)
    if not s.signed and s.name != "4bit-root":  # nothing positive becomes zero
        raw = codes.view(torch.uint8 if codes.itemsize == 1 else torch.int16)
        codes = torch.where((raw == 0) & positive, torch.ones_like(raw), raw).view(s.dtype)
    return (_pack(codes) if s.bits == 4 else codes), scale


def _moved(y: torch.Tensor, element: str, share: torch.Tensor) -> torch.Tensor:
    """y with a share of its quantum added to its magnitude; its sign is kept (-0 included)."""
    mantissa, lowest = _GRID[element]
    quantum = torch.ldexp(torch.ones_like(y), torch.clamp(torch.frexp(y.abs())[1] - 1, min=lowest) - mantissa)
    magnitude = y.abs() + quantum * share
    # rounded in the binade that y had, as the sum of y and its share is
    rounded = torch.round(magnitude.double() / quantum).clamp(min=0) * quantum
    return torch.copysign(rounded.float(), y)


def _codes(y: torch.Tensor, s: Store, random: torch.Tensor | None, bits: int) -> torch.Tensor:
    if s.element in ("fp16", "e4m3", "e5m2"):
        return _round(torch.clamp(y, -s.top, s.top), s.element, random, bits).view(s.dtype)
    if s.name == "4bit-root":
        position = y * 16.0 - 0.5
        position = position if random is None else position + centred(random)
        return torch.clamp(torch.floor(position), 0, 15).to(torch.uint8)
    sign = torch.signbit(y).to(torch.uint8) << (s.bits - 1)
    if s.name == "4bit":
        magnitude = torch.clamp(y.abs(), max=s.top)
        magnitude = _stochastic(magnitude, "e2m1", random, bits) if random is not None else _e2m1(magnitude)
        magnitude = torch.clamp(magnitude, max=s.top)
        return torch.bucketize(magnitude, _E2M1.to(y.device)).to(torch.uint8) | sign
    c = _dynamic_code(y.abs(), s.name, random).to(torch.uint8)
    return c | sign if s.signed else c


def _e2m1(y: torch.Tensor) -> torch.Tensor:
    """Magnitudes rounded to e2m1, nearest with ties to even."""
    quantum = torch.ldexp(torch.ones_like(y), torch.clamp(torch.frexp(y)[1] - 1, min=0) - 1)
    return torch.round(y / quantum) * quantum


def _pack(codes: torch.Tensor) -> torch.Tensor:
    rows, cols = matrix(codes.shape)
    c = torch.nn.functional.pad(codes.reshape(rows, cols), (0, cols % 2))
    return c[:, 0::2] | (c[:, 1::2] << 4)


def _unpack(packed: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    rows, cols = matrix(shape)
    return torch.stack([packed & 15, packed >> 4], dim=-1).reshape(rows, -1)[:, :cols].reshape(tuple(shape))


def decode(codes: torch.Tensor, scale: torch.Tensor | None, s: Store, shape: Sequence[int]) -> torch.Tensor:
    """fp32 values of codes (the squares of what is stored, for a root store)."""
    if not s.block:
        return codes.float()
    assert scale is not None
    if s.bits == 4:
        codes = _unpack(codes, shape)
    if s.name == "4bit-root":
        x = (codes.float() + 1.0) * 0.0625
    elif s.name == "4bit":
        x = torch.where(codes > 7, -1.0, 1.0) * _E2M1.to(codes.device)[(codes & 7).long()]
    elif s.name in MAPS:
        sign = 1 << (s.bits - 1)
        x = _dynamic_value((codes & (sign - 1) if s.signed else codes).float(), s.name)
        x = torch.where((codes & sign) > 0, -x, x) if s.signed else x
    else:
        x = codes.view(_TORCH[s.element]).float()
    rows, cols = matrix(shape)
    y = _blocked(x.reshape(tuple(shape)), s) * scale[..., None]
    x = y.reshape(rows, -1)[:, :cols].reshape(tuple(shape))
    return x * x if s.root else x


def store_rows(
    chunk: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor | None,
    s: Store,
    shape: Sequence[int],
    first: int,
    add: bool,
    key: tuple[int, int, int],
) -> None:
    """Encode rows of a stored tensor in place, or add to what they hold."""
    rows, cols = matrix(shape)
    part = codes.reshape(rows, -1)[first : first + chunk.shape[0]]
    part_scale = None if scale is None else scale[first : first + chunk.shape[0]]
    x = chunk + decode(part, part_scale, s, chunk.shape) if add else chunk
    draw = Draw(key[0], key[1], key[2], first * cols)
    new, new_scale = encode_state(x, s, "stochastic" if add else "nearest", draw, 0)
    _write(new, new_scale, part, part_scale)


def store_stats(
    codes: torch.Tensor, scale: torch.Tensor | None, s: Store, shape: Sequence[int]
) -> tuple[int, int, float]:
    """Number of Inf, number of NaN and the sum of squares (of the finite) of a stored tensor, a row at a time."""
    x = decode(codes, scale, s, shape).double()
    inf, nan = torch.isinf(x), torch.isnan(x)
    return int(inf.sum()), int(nan.sum()), float(torch.where(inf | nan, 0.0, x).square().sum())


# -- weights: what is read and written as one value --------------------------------------------------------------------


def read_weight(slot: Slot, program: Program) -> torch.Tensor:
    """The fp32 value of a weight: the master where there is one, else the weight and its residue."""
    shape = slot.weight.shape
    if program.master == "remainder16":
        assert slot.master is not None
        high = slot.weight.view(torch.int16).to(torch.int32) << 16
        return (high + slot.master.to(torch.int32)).view(torch.float32)
    if program.master is not None:
        assert slot.master is not None
        return decode(slot.master, slot.master_scale, STORES[program.master], shape)
    w = decode(slot.weight, slot.weight_scale, STORES[program.weight], shape)
    if program.residue is not None:
        assert slot.residue is not None
        w = w + decode(slot.residue, slot.residue_scale, STORES[program.residue], shape)
    return w


def _write(codes: torch.Tensor, scale: torch.Tensor | None, to: torch.Tensor, to_scale: torch.Tensor | None) -> None:
    to.copy_(codes) if to.dtype == codes.dtype else to.view(codes.dtype).copy_(codes)
    if to_scale is not None:
        assert scale is not None
        to_scale.copy_(scale.reshape(to_scale.shape))


def write_weight(w: torch.Tensor, slot: Slot, program: Program, draw: Draw) -> None:
    """Round and store a value as master, weight and residue."""
    shape, s = slot.weight.shape, STORES[program.weight]
    rounding = program.rounding
    if program.master == "remainder16":
        assert slot.master is not None
        bits = w.view(torch.int32)
        special = (bits & 0x7F800000) == 0x7F800000
        high = torch.where(special, bits >> 16, (bits + 0x8000) >> 16)
        high = torch.where(torch.isnan(w), high | 0x40, high)
        slot.weight.view(torch.int16).copy_(high.to(torch.int16))
        slot.master.copy_(torch.where(special, torch.zeros_like(bits), bits).to(torch.int16))
        return
    if program.master is not None:
        assert slot.master is not None
        m = STORES[program.master]
        codes, scale = encode_weight(w, m, rounding, draw)
        _write(codes, scale, slot.master, slot.master_scale)
        w, rounding = decode(codes, scale, m, shape), "nearest"
    codes, scale = encode_weight(w, s, rounding, draw)
    _write(codes, scale, slot.weight, slot.weight_scale)
    if program.residue is not None:
        assert slot.residue is not None
        rest = w - decode(codes, scale, s, shape)
        codes, scale = encode(rest, STORES[program.residue])
        _write(codes, scale, slot.residue, slot.residue_scale)


# -- rules -------------------------------------------------------------------------------------------------------------


def _sgd(w: torch.Tensor, g: torch.Tensor, x: list[torch.Tensor], c: Sequence[float], p: Program) -> torch.Tensor:
    lr, momentum, dampen = c[3:6]
    if x:
        x[0] = x[0] * momentum + g * dampen
        g = g + x[0] * momentum if p.nesterov else x[0]
    return w - g * lr


def _adam(w: torch.Tensor, g: torch.Tensor, x: list[torch.Tensor], c: Sequence[float], p: Program) -> torch.Tensor:
    rate, b1c, b2, b2c, correction, eps = c[3:9]
    x[0] = x[0] + (g - x[0]) * b1c
    x[1] = x[1] * b2 + (g * b2c) * g
    if len(x) == 3:
        x[2] = torch.maximum(x[2], x[1])
    return w - (x[0] / (root(x[-1]) * correction + eps)) * rate


def _lion(w: torch.Tensor, g: torch.Tensor, x: list[torch.Tensor], c: Sequence[float], p: Program) -> torch.Tensor:
    lr, b1, b1c, b2, b2c = c[3:8]
    d = x[0] * b1 + g * b1c
    x[0] = x[0] * b2 + g * b2c
    return w - torch.where(torch.isnan(d), d, torch.sign(d)) * lr


_RULES = {"sgd": _sgd, "adam": _adam, "lion": _lion}


def update(batch: Batch, coefficients: Sequence[float], seed: int, step: int) -> None:
    """Update every parameter of a batch; coefficients are (factor, l2, keep, then the rule's own)."""
    p = batch.program
    c = [float(torch.tensor(value, dtype=torch.float64).float()) for value in coefficients]
    for slot in batch.slots:
        assert slot.grad is not None
        shape, draw = slot.weight.shape, Draw(seed, step, slot.stream, slot.offset)
        w = read_weight(slot, p)
        g = decode(slot.grad, slot.grad_scale, STORES[p.grad], shape) * c[0]
        states = [
            decode(t, scale, STORES[name], shape)
            for t, scale, name in zip(slot.states, slot.scales, p.states, strict=True)
        ]
        old, old_states = w, list(states)
        if c[1] != 0:
            g = g + w * c[1]
        if c[2] != 1:
            w = w * c[2]
        w = _RULES[p.rule](w, g, states, c, p)
        good = torch.isfinite(w)
        for value in states:
            good &= torch.isfinite(value)
        slot.nonfinite = int(good.numel() - good.sum())
        if slot.nonfinite:
            w = torch.where(good, w, old)
            states = [torch.where(good, value, before) for value, before in zip(states, old_states, strict=True)]
        for k, (value, t, scale, name) in enumerate(zip(states, slot.states, slot.scales, p.states, strict=True)):
            codes, new_scale = encode_state(value, STORES[name], p.state_rounding, draw, k)
            _write(codes, new_scale, t, scale)
        write_weight(w, slot, p, draw)

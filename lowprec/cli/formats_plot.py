"""The picture of `lowprec formats --plot`: every format's bits, its range, and the values of the small ones.

Three panels over the same idea, that a format spends its bits on range or on precision. Left: the fields of a code.
Right of it: the range on a logarithmic axis, normal numbers dark, subnormal ones light, with a tick for every value of
the formats that have few enough. Below: the values from 0 to 8 on a linear axis, where the spacing shows.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from lowprec.errors import missing_extra
from lowprec.formats import Format, format, formats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

SIGN, EXPONENT, MANTISSA, INTEGER = "#d1495b", "#edae49", "#30638e", "#5b8e7d"
INK, SOFT = "#222222", "#9a9a9a"
_LINEAR = ("e8m0", "int4", "e2m1", "e3m2", "e2m3", "e5m2", "e4m3", "e3m4", "mxint8")
_LINEAR_TOP = 8.0


def draw(path: str, value: float | None = None) -> None:
    """Write the picture; `value`, if given, is marked in it.

    Raises:
        MissingExtraError: without matplotlib.
        ValueError: if the file's ending names no kind of picture.
    """
    try:
        import matplotlib
    except ImportError:
        raise missing_extra("matplotlib", "plot", "the plot of formats") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    if not path.lower().endswith((".png", ".svg", ".pdf")):
        raise ValueError(f"the plot is written as .png, .svg or .pdf, got {path!r}.")
    every = [format(name) for name in formats()]
    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": SOFT}
    with pyplot.rc_context(style):  # type: ignore[arg-type]
        linear = [f for f in every if f.name in _LINEAR]
        heights = [len(every), len(linear)]
        figure = pyplot.figure(figsize=(13, 0.36 * sum(heights) + 2.0))
        grid = figure.add_gridspec(2, 2, height_ratios=heights, width_ratios=[1.0, 1.55], hspace=0.22, wspace=0.12)
        layout, ranges = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
        _layouts(layout, every)
        _ranges(ranges, every, value)
        _spacings(figure.add_subplot(grid[1, :]), linear, value)
        figure.savefig(path, dpi=150, bbox_inches="tight", facecolor="white")
        pyplot.close(figure)


def _bare(axes: Axes, names: list[str], title: str) -> None:
    axes.set_ylim(len(names) - 0.45, -0.75)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_title(title, loc="left", fontsize=10, color=INK)


def _fields(f: Format) -> list[tuple[int, str]]:
    if f.kind == "float":
        return [(1, SIGN), (f.exponent_bits, EXPONENT), (f.mantissa_bits, MANTISSA)]
    if f.kind == "scale":
        return [(f.exponent_bits, EXPONENT)]
    return [(1, SIGN)] if f.kind == "binary" else [(f.bits, INTEGER)]


def _layouts(axes: Axes, every: list[Format]) -> None:
    """One box a bit up to 19 bits; wider fields are drawn at a fixed width with their count in them."""
    for row, f in enumerate(every):
        x = 0.0
        for count, colour in _fields(f):
            if f.bits <= 19:
                for i in range(count):
                    axes.barh(row, 0.86, left=x + i, height=0.62, color=colour)
                x += count
            else:
                width = 19 * count / f.bits if count > 1 else 1.0
                axes.barh(row, width - 0.14, left=x, height=0.62, color=colour)
                if count > 1:
                    axes.text(x + width / 2, row, str(count), color="white", ha="center", va="center", fontsize=8)
                x += width
    _bare(axes, [f"{f.name}  {f.bits}" for f in every], "bits: ")
    key = (("sign", SIGN), ("exponent", EXPONENT), ("mantissa", MANTISSA), ("integer", INTEGER))
    for i, (word, colour) in enumerate(key):
        at = (0.09, 0.2, 0.43, 0.65)[i]
        axes.text(at, 1.012, word, color=colour, transform=axes.transAxes, fontsize=10, va="bottom", fontweight="bold")
    axes.set_xlim(-0.2, 19.6)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)


def _ranges(axes: Axes, every: list[Format], value: float | None) -> None:
    low, high = -160.0, 136.0
    for row, f in enumerate(every):
        colour = _fields(f)[-1][1] if f.kind != "float" else MANTISSA
        bottom, normal, top = (math.log2(v) for v in (f.min_subnormal, f.min_normal, f.max))
        if f.kind == "binary":
            axes.plot([0], [row], marker="|", color=SIGN, markersize=9)
            continue
        start, end = max(bottom, low), min(top, high)
        axes.barh(row, max(normal, low) - start, left=start, height=0.62, color=colour, alpha=0.25, linewidth=0)
        axes.barh(row, end - max(normal, low), left=max(normal, low), height=0.62, color=colour, alpha=0.6, linewidth=0)
        if f.bits <= 8:
            ticks = [math.log2(v) for _, v in f.values() if v > 0 and math.isfinite(v)]
            axes.vlines(ticks, row - 0.31, row + 0.31, color=colour, linewidth=0.35)
        if f.bits == 64:
            axes.text(low, row, "◂ 2^-1074", ha="left", va="center", fontsize=8, color="white")
            axes.text(high, row, "2^1024 ▸", ha="right", va="center", fontsize=8, color="white")
    _bare(axes, ["" for _ in every], "range (positive values; subnormals light)")
    axes.set_xlim(low, high)
    ticks = list(range(-150, 130, 25))
    axes.set_xticks(ticks, [f"$2^{{{t}}}$" if t else "1" for t in ticks])
    axes.grid(axis="x", color=SOFT, alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    if value is not None and math.isfinite(value) and value != 0:
        axes.axvline(math.log2(abs(value)), color=SIGN, linewidth=1)


def _spacings(axes: Axes, small: list[Format], value: float | None) -> None:
    for row, f in enumerate(small):
        inside = sorted({v for _, v in f.values() if 0 <= v <= _LINEAR_TOP})
        axes.vlines(inside, row - 0.34, row + 0.34, color=_colour(f), linewidth=1.1)
    _bare(axes, [f"{f.name}  {f.bits}" for f in small], f"every value from 0 to {_LINEAR_TOP:g}")
    axes.set_xlim(-0.05, _LINEAR_TOP + 0.05)
    axes.set_xticks(range(int(_LINEAR_TOP) + 1))
    axes.grid(axis="x", color=SOFT, alpha=0.25, linewidth=0.6)
    if value is not None and 0 <= abs(value) <= _LINEAR_TOP:
        axes.axvline(abs(value), color=SIGN, linewidth=1)


def _colour(f: Format) -> Any:
    return {"scale": EXPONENT, "int": INTEGER}.get(f.kind, MANTISSA)

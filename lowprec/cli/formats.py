"""`lowprec formats`: the table of formats, what each makes of a value, and a picture of them all."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

from lowprec.cli.options import emit, json_option
from lowprec.formats import Format, format, formats

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["command"]

ROUNDINGS = ("nearest", "nearest-away", "toward-zero", "up", "down", "stochastic")
OVERFLOWS = ("saturate", "keep-inf", "ieee")


@click.command(
    short_help="List number formats, or what they make of a value.", context_settings={"ignore_unknown_options": True}
)
@click.argument("value", required=False)
@click.option("--rounding", type=click.Choice(ROUNDINGS), default="nearest", show_default=True)
@click.option("--overflow", type=click.Choice(OVERFLOWS), default="saturate", show_default=True)
@click.option("--plot", metavar="FILE", help="Draw bit layouts and representable values (.png, .svg, .pdf).")
@json_option
@click.pass_context
def command(
    ctx: click.Context, value: str | None, rounding: str, overflow: str, plot: str | None, json_to: str | None
) -> None:
    """List every number format, or show what each makes of VALUE.

    Errors of a value are given in units of the last place of each format: half a
    unit is the most that rounding to nearest can do to a number in its range.

    \b
    Example:
      lowprec formats
      lowprec formats 0.3
      lowprec formats -70000 --overflow ieee --json
      lowprec formats --plot formats.png
    """
    if plot is not None:
        from lowprec.cli.formats_plot import draw

        draw(plot, None if value is None else _number(value))
        click.echo(f"wrote {plot}", err=True)
        if value is None and json_to is None:
            return
    if value is None:
        _refuse_without_value(ctx)
        every = [format(name) for name in formats()]
        emit({"formats": [plain(f) for f in every]}, json_to, lambda: _text(_table(every)))
        return
    x = _number(value)
    rows = [cast_row(format(name), x, rounding, overflow) for name in formats()]
    result = {"value": _json_number(x), "rounding": rounding, "overflow": overflow, "formats": rows}
    emit(result, json_to, lambda: _text(_value_table(x, rows)))


def _refuse_without_value(ctx: click.Context) -> None:
    for option in ("rounding", "overflow"):
        if ctx.get_parameter_source(option) is click.core.ParameterSource.COMMANDLINE:
            raise ValueError(f"--{option} has no effect without a VALUE to cast.")


def _number(text: str) -> float:
    try:
        return float.fromhex(text) if "0x" in text.lower() else float(text)
    except (ValueError, OverflowError):
        raise ValueError(f"VALUE must be a number such as 0.3, -1e-7, inf or 0x1.8p3, got {text!r}.") from None


def plain(f: Format) -> dict[str, Any]:
    """A format as plain data."""
    return {
        "name": f.name,
        "kind": f.kind,
        "bits": f.bits,
        "exponent_bits": f.exponent_bits,
        "mantissa_bits": f.mantissa_bits,
        "bias": f.bias,
        "max": f.max,
        "min_normal": f.min_normal,
        "min_subnormal": f.min_subnormal,
        "eps": f.eps,
        "infinity": f.has_infinity,
        "nan": f.nan,
        "negative_zero": f.has_negative_zero,
        "aliases": list(f.aliases),
    }


def cast_row(f: Format, x: float, rounding: str, overflow: str) -> dict[str, Any]:
    """What a format makes of a value, and how far off that is."""
    import torch

    from lowprec.kernels.cast import Rng
    from lowprec.quantize import decode, encode, round_to

    source = torch.tensor([x], dtype=torch.float64)
    rng = Rng(0) if rounding == "stochastic" else None
    codes = encode(source, f, rounding=rounding, overflow=overflow, nan="zero", rng=rng)
    result = decode(codes, f, dtype=torch.float64).item()
    lost = not f.has_nan and bool(round_to(source, f, rounding=rounding, overflow=overflow, rng=rng).isnan())
    code = int(codes.view(torch.int64).item() if f.bits == 64 else codes.to(torch.int64).item()) % (1 << f.bits)
    error = result - x if math.isfinite(result) and math.isfinite(x) else None
    return {
        "name": f.name,
        "result": None if lost else _json_number(result),
        "code": None if lost else f"0x{code:0{-(-f.bits // 4)}x}",
        "bits": None if lost else _bits(f, code),
        "error": None if lost else error,
        "error_ulp": None if lost or error is None else error / spacing(f, x),
        "note": "no NaN, Inf" if lost else _note(f, x, result),
    }


def spacing(f: Format, x: float) -> float:
    """The distance between a format's neighbours around x: one unit in the last place."""
    if f.kind == "int":
        return f.step
    if f.kind == "binary":
        return 2.0
    exponent = math.frexp(x)[1] - 1 if x else -10_000
    exponent = min(max(exponent, math.frexp(f.min_normal)[1] - 1), f.max_exponent)
    return math.ldexp(1.0, exponent - f.mantissa_bits)


def _bits(f: Format, code: int) -> str:
    """A code's bits, its fields apart."""
    digits = f"{code:0{f.bits}b}"
    if f.kind != "float":
        return digits
    cut = 1 + f.exponent_bits
    return " ".join(part for part in (digits[0], digits[1:cut], digits[cut:]) if part)


def _note(f: Format, x: float, result: float) -> str:
    if math.isnan(x) or x == result:
        return "exact" if x == result else ""
    if math.isnan(result):
        return "no sign" if f.kind == "scale" and x < 0 else "overflows"
    if math.isinf(result):
        return "overflows"
    if f.kind == "binary":
        return "the sign"
    if abs(x) > f.max:
        return "saturates"
    if result == 0:
        return "underflows"
    if x == 0:
        return "has no zero"
    if abs(x) < f.min_normal:
        return "subnormal" if f.kind == "float" else "too small"
    return ""


def _json_number(x: float) -> float | str:
    return x if math.isfinite(x) else str(x)


# -- text -------------------------------------------------------------------------------------------------------------


def _text(table: Table) -> str:
    """A table as text of at most 80 columns, coloured on a terminal."""
    import io
    import sys

    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=80, force_terminal=sys.stdout.isatty() or None, highlight=False).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip("\n").split("\n"))


def _new_table(gap: int, *columns: tuple[str, str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, gap, 0, 0), show_edge=False)
    for name, justify in columns:
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    return table


def power(x: float) -> str:
    """A power of two as such, anything else in digits.

    >>> power(0.001953125), power(448.0), power(3.4028234663852886e38)
    ('2^-9', '448', '3.4e+38')
    """
    fraction, exponent = math.frexp(x)
    if fraction == 0.5 and (x < 1 or x > 1000):
        return f"2^{exponent - 1}"
    return f"{x:.9g}" if 0.001 < abs(x) < 1e6 else f"{x:.2g}"


def _layout(f: Format) -> str:
    if f.kind == "float":
        return f"1-{f.exponent_bits}-{f.mantissa_bits}"
    return {"scale": f"0-{f.exponent_bits}-0", "int": "integer", "binary": "sign"}[f.kind]


def _specials(f: Format) -> str:
    words = [word for word, there in (("Inf", f.has_infinity), ("NaN", f.has_nan)) if there]
    if not f.has_zero:
        words.append("no 0")
    elif f.kind == "float" and not f.has_negative_zero:
        words.append("no -0")
    return " ".join(words) or "-"


def _table(every: list[Format]) -> Table:
    table = _new_table(
        1,
        ("format", "left"),
        ("bits", "right"),
        ("layout", "left"),
        ("bias", "right"),
        ("max", "right"),
        ("normal", "right"),
        ("subnormal", "right"),
        ("eps", "right"),
        ("specials", "left"),
    )
    for f in every:
        floating = f.kind == "float"
        table.add_row(
            f"[bold]{f.name}[/bold]",
            str(f.bits),
            _layout(f),
            str(f.bias) if f.kind in ("float", "scale") else "",
            power(f.max),
            power(f.min_normal),
            power(f.min_subnormal) if floating else "",
            power(f.eps) if floating else "",
            _specials(f),
        )
    return table


def _value_table(x: float, rows: list[dict[str, Any]]) -> Table:
    table = _new_table(
        2,
        ("format", "left"),
        ("value", "right"),
        ("ulp off", "right"),
        ("code", "left"),
        ("bits", "left"),
        (f"of {x:.10g}", "left"),
    )
    for row in rows:
        result, ulp = row["result"], row["error_ulp"]
        shown = "-" if result is None else f"{result:.7g}" if isinstance(result, float) else result
        table.add_row(
            f"[bold]{row['name']}[/bold]",
            shown,
            "" if ulp is None else "0" if ulp == 0 else f"{ulp:+.3f}" if abs(ulp) < 1000 else f"{ulp:+.1e}",
            "" if row["code"] is None or len(row["code"]) > 10 else row["code"],
            row["bits"] if row["bits"] is not None and len(row["bits"]) <= 12 else "",
            row["note"],
        )
    return table

"""`lowprec formats`: the table and a value at 80 columns, JSON, the picture, plain errors."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import lowprec as lp
from lowprec.cli import main
from lowprec.cli.formats import spacing


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(["formats", *arguments])
    return capsys.readouterr().out


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    lines = _run(capsys).splitlines()
    assert all(len(line) <= 80 and "…" not in line for line in lines)
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:]}
    assert set(rows) == set(lp.formats())
    assert rows["e4m3"] == ["8", "1-4-3", "7", "448", "2^-6", "2^-9", "2^-3", "NaN"]


@pytest.mark.parametrize("value", ["0.3", "-70000", "0", "inf", "nan", "1e-310", "0x1.8p3", "3.3e38"])
@pytest.mark.parametrize("overflow", ["saturate", "ieee"])
def test_a_value(capsys: pytest.CaptureFixture[str], value: str, overflow: str) -> None:
    lines = _run(capsys, value, "--overflow", overflow).splitlines()
    assert all(len(line) <= 80 and "…" not in line for line in lines) and len(lines) == 2 + len(lp.formats())
    found = json.loads(_run(capsys, value, "--overflow", overflow, "--json"))
    x = float.fromhex(value) if "0x" in value else float(value)
    for row in found["formats"]:
        fmt = lp.format(row["name"])
        if row["code"] is not None:
            assert str(fmt.value(int(row["code"], 16))) == str(float(row["result"]))
        if row["error_ulp"] is not None and fmt.kind == "float" and abs(x) <= fmt.max:
            assert abs(row["error_ulp"]) <= 0.5
            assert row["error_ulp"] * spacing(fmt, x) == pytest.approx(float(row["result"]) - x, abs=0, rel=1e-9)


def test_what_is_said_of_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["name"]: row for row in json.loads(_run(capsys, "1000", "--json"))["formats"]}
    assert rows["e4m3"]["note"] == "saturates" and rows["fp32"]["note"] == "exact" and rows["e4m3"]["code"] == "0x7e"
    rows = {row["name"]: row for row in json.loads(_run(capsys, "1e-5", "--json"))["formats"]}
    assert (rows["e4m3"]["note"], rows["e5m2"]["note"], rows["bf16"]["note"]) == ("underflows", "subnormal", "")
    assert rows["e5m2"]["bits"] == "0 00000 01"
    rows = {row["name"]: row for row in json.loads(_run(capsys, "inf", "--overflow", "ieee", "--json"))["formats"]}
    assert rows["e2m1"]["result"] is None and rows["e4m3"]["result"] == "nan" and rows["e5m2"]["result"] == "inf"


def test_the_table_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = {row["name"]: row for row in json.loads(_run(capsys, "--json"))["formats"]}
    assert found["e5m2"]["max"] == 57344 and found["e5m2"]["infinity"] and found["fp64"]["min_subnormal"] == 5e-324
    assert found["fp16"]["bias"] == 15 and math.isclose(found["mxint8"]["max"], 127 / 64)


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"formats.{ending}"
    assert _run(capsys, "--plot", str(path)) == ""
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG" if ending == "png" else b"<?xml") and len(content) > 20_000


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["three"], "VALUE must be a number"),
        (["--rounding", "up"], "--rounding has no effect without a VALUE"),
        (["--plot", "x.bmp"], "written as .png, .svg or .pdf"),
    ],
)
def test_errors(capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["formats", *arguments])
    assert stop.value.code == 2 and sentence in capsys.readouterr().err

"""`lowprec recipes`: the table at 80 columns, one recipe in full, JSON, and a plain error."""

from __future__ import annotations

import json

import pytest

import lowprec as lp
from lowprec.cli import main


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(["recipes", *arguments])
    return capsys.readouterr().out


def test_the_table_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    lines = _run(capsys).splitlines()
    assert all(len(line) <= 80 for line in lines)
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:] if line}
    assert set(lp.recipes()) <= set(rows)
    assert rows["msamp-O3"] == ["FP8", "FP8", "FP8", "FP16", "FP8", "FP8+FP16"]


@pytest.mark.parametrize("name", ["fp8-block", "nvfp4", "apex-O2", "fp8 last_layer=high"])
def test_one_recipe_in_full(capsys: pytest.CaptureFixture[str], name: str) -> None:
    text = _run(capsys, name)
    assert all(len(line) <= 80 for line in text.splitlines())
    for part in ("output.input", "grad_weight.input", "accumulation", "op policy", "loss scaling", "rounding"):
        assert part in text
    line = " ".join(text.split("as one line:")[1].split())
    assert lp.recipe(line) == lp.recipe(name)


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    one = json.loads(_run(capsys, "int8", "--json"))
    assert one["table"]["compute"] == "INT8" and lp.Recipe.from_dict(one["fields"]) == lp.recipe("int8")
    every = json.loads(_run(capsys, "--json"))["recipes"]
    assert [row["name"] for row in every] == lp.recipes()


def test_an_unknown_recipe_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["recipes", "fp9"])
    assert stop.value.code == 2 and "unknown recipe 'fp9'" in capsys.readouterr().err

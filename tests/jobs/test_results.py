"""The table says what the lines say, in 80 columns."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lowprec.jobs import results, table

sys.path.insert(0, str(Path(__file__).parent.parent / "observe"))
import made_run


def test_rows(tmp_path: Path) -> None:
    result = results.summarise(made_run.make(tmp_path, failed="int8"))
    rows = {row["recipe"]: row for row in result["rows"]}
    assert result["baseline"] == "fp32"
    assert rows["bf16"]["rate"] == pytest.approx(1024 / 0.4)
    assert rows["bf16"]["vs_torch_fp32"] == pytest.approx(2.5)
    assert rows["bf16"]["vs_torch_bf16"] == pytest.approx(1.25)
    assert rows["fp8"]["difference"] == pytest.approx(0.003)
    assert rows["fp8"]["spread"] == pytest.approx(0, abs=1e-12)
    assert rows["msamp-O2"]["bytes_a_parameter"] == pytest.approx(6)
    assert rows["fp8"]["flushed"] == pytest.approx(100 * sum(10 * i for i in range(12)) / 36e4)
    assert rows["fp8"]["skipped_steps"] == 2
    assert {name: row["verdict"] for name, row in rows.items()} == {
        "torch-fp32": "", "torch-bf16": "", "fp32": "base", "bf16": "keeps", "fp8": "keeps", "mxfp8": "keeps",
        "nvfp4": "loses", "int8": "fails", "msamp-O2": "keeps",
    }  # fmt: skip
    assert rows["int8"]["error"] == "no such luck"


def test_table_fits_eighty_columns(tmp_path: Path) -> None:
    text = table.render(results.summarise(made_run.make(tmp_path, failed="int8")))
    lines = text.split("\n\n")[0].splitlines()
    assert len(lines) == 3 + len(made_run.RECIPES)
    assert max(len(line) for line in lines) <= 80
    assert "int8: no such luck" in text


def test_sentence_names_the_fastest_that_keeps_and_the_smallest(tmp_path: Path) -> None:
    sentence = results.summarise(made_run.make(tmp_path))["sentence"]
    assert sentence.startswith(
        "int8 is the fastest recipe that keeps the loss of fp32 here at 3.45 times the speed of "
    )
    assert "msamp-O2 needs least memory, 6.0 bytes a parameter" in sentence
    assert "nvfp4 does not keep it" in sentence


def test_an_interrupted_run_has_a_table(tmp_path: Path) -> None:
    text = table.render(results.summarise(made_run.make(tmp_path, steps=1, seeds=1)))
    assert "One seed" in text and "- " in text

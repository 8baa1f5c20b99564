"""The race of recipes: its rows, its ratios, what a failing contestant leaves of it, and where the time goes."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from lowprec.cli.bench_train import command
from lowprec.heap import keep_heap
from lowprec.jobs import speed


@pytest.fixture(autouse=True)
def _nano(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(speed, "MODELS", {"gpt": "nano", "cnn": "nano"})
    yield
    keep_heap(False)


def test_ratios_are_of_the_same_run() -> None:
    said: list[str] = []
    rows = {row["name"]: row for row in speed.race(["torch-bf16", "fp32", "no-such"], "gpt", 2, said.append)}
    assert said == ["ready: torch-bf16", "ready: fp32", "ready: no-such"]
    assert rows["torch-bf16"]["vs_torch_bf16"] == 1
    assert rows["fp32"]["vs_torch_bf16"] == rows["torch-bf16"]["step_ms"] / rows["fp32"]["step_ms"]
    assert rows["fp32"]["vs_torch_fp32"] is None
    assert "unknown recipe" in rows["no-such"]["error"]
    assert rows["no-such"]["step_ms"] is None
    assert abs(rows["torch-bf16"]["loss"] - rows["fp32"]["loss"]) < 0.1


@pytest.mark.parametrize("model", ["gpt", "cnn"])
def test_where_the_time_goes(model: str) -> None:
    kinds = speed.breakdown("bf16", model)
    assert kinds["products"] > 0
    assert kinds["norms"] > 0
    assert kinds["optimizer"] > 0
    assert (kinds["attention"] > 0) == (model == "gpt")
    found = speed.limits(model)
    assert found["bf16"] > 0
    assert found["int8"] > 0


def test_memory_of_a_step_is_measured_in_a_process_of_its_own() -> None:
    found = speed.measure_here("torch-fp32", "gpt")
    assert found["peak"] >= found["rest"] * 0.9 > 0


def test_the_command_prints_a_table_and_json() -> None:
    options = ["--recipes", "bf16", "--peers", "torch-bf16", "--rounds", "1"]
    text = CliRunner().invoke(command, options, catch_exceptions=False).output
    assert "vs autocast bf16" in text
    assert "products of linear layers alone" in text
    result = CliRunner().invoke(command, [*options, "--no-where", "--json"], catch_exceptions=False)
    found = json.loads(result.stdout)
    assert [row["name"] for row in found["rows"]] == ["torch-bf16", "bf16"]
    with pytest.raises(ValueError, match="did you mean 'torch-bf16'"):
        CliRunner().invoke(command, ["--peers", "torch-bf17"], catch_exceptions=False)

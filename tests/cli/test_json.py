"""What every command prints with --json fits its documented schema, and nothing else is on stdout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lowprec.cli import COMMANDS, cli

SCHEMAS = Path(__file__).parent.parent.parent / "docs" / "schemas"
TYPES: dict[str, Any] = {
    "object": dict, "array": list, "string": str, "boolean": bool, "null": type(None), "integer": int,
    "number": (int, float),
}  # fmt: skip


def check(value: Any, schema: dict[str, Any], where: str = "$") -> None:
    """The part of JSON Schema that docs/schemas uses."""
    if "enum" in schema:
        assert value in schema["enum"], f"{where} is {value!r}"
        return
    names = schema.get("type", [])
    names = [names] if isinstance(names, str) else names
    if names:
        fits = [n for n in names if isinstance(value, TYPES[n]) and (not isinstance(value, bool) or n == "boolean")]
        assert fits, f"{where} is {value!r}, not {' or '.join(names)}"
    if isinstance(value, dict):
        known = schema.get("properties", {})
        missing = set(schema.get("required", [])) - set(value)
        assert not missing, f"{where} lacks {missing}"
        more = schema.get("additionalProperties", True)
        for key, item in value.items():
            if key in known:
                check(item, known[key], f"{where}.{key}")
            elif isinstance(more, dict):
                check(item, more, f"{where}.{key}")
            else:
                assert more, f"{where} has {key!r}, which the schema does not know"
    elif isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            check(item, schema["items"], f"{where}[{index}]")


def schema(name: str) -> dict[str, Any]:
    return json.loads((SCHEMAS / f"{name}.json").read_text())  # type: ignore[no-any-return]


def invoke(*arguments: str) -> Any:
    ran = CliRunner().invoke(cli, list(arguments), catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    return json.loads(ran.stdout)


def test_every_command_has_a_schema() -> None:
    assert set(COMMANDS) <= {path.stem for path in SCHEMAS.glob("*.json")}


def test_the_files_are_what_the_script_writes() -> None:
    import importlib.util

    path = Path(__file__).parent.parent / "docs" / "make_schemas.py"
    spec = importlib.util.spec_from_file_location("make_schemas", path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert set(made.SCHEMAS) == {path.stem for path in SCHEMAS.glob("*.json")}
    for name, wanted in made.SCHEMAS.items():
        assert {k: v for k, v in schema(name).items() if k not in ("$schema", "title")} == wanted


@pytest.mark.parametrize(
    "arguments",
    [
        ["formats", "--json"],
        ["recipes", "--json"],
        ["config", "--show", "--json"],
        ["completion", "zsh", "--json"],
        ["plan", "--size", "nano", "--recipes", "fp32,fp8", "--memory", "1G", "--json"],
        ["plan", "--params", "1e9", "--layers", "4", "--hidden", "2048", "--recipes", "bf16,msamp-O2", "--json"],
    ],
    ids=lambda arguments: " ".join(arguments[:3]),
)
def test_output_fits_its_schema(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check(invoke(*arguments), schema(arguments[0]))


def test_runs_fit_their_schemas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipes = "fp32,fp8,bf16-sr"
    done = invoke("compare", "--size", "nano", "--steps", "4", "--recipes", recipes, "--out", "a", "--json")
    check(done, schema("compare"))
    assert [row["recipe"] for row in done["rows"]] == ["torch-fp32", "torch-bf16", "fp32", "fp8", "bf16-sr"]
    assert all(row["error"] is None and row["loss"] is not None for row in done["rows"])
    fp8 = done["rows"][3]
    assert fp8["low_share"] > 0.5 and fp8["flushed"] is not None and 0 < fp8["bytes_a_parameter"] < 20
    check(invoke("report", "a", "--json"), schema("report"))
    trained = invoke("train", "--size", "nano", "--steps", "3", "--recipe", "fp16", "--out", "b", "--json")
    check(trained, schema("train"))
    check(invoke("report", "b", "--json"), schema("report"))


def test_the_check_can_fail() -> None:
    for value, wanted in (
        ({"kind": "run", "recipe": "x"}, "lacks"),
        ({"kind": "run", "recipe": 3, "command": []}, "not string"),
        ({"kind": "run", "recipe": "x", "command": [], "more": 1}, "does not know"),
        ({"kind": "walk", "recipe": "x", "command": []}, "is 'walk'"),
    ):
        with pytest.raises(AssertionError, match=wanted):
            check(value, schema("run"))

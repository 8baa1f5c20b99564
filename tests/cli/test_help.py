"""Every command: help in 80 columns with an example, --json, and no torch until it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from lowprec.cli import COMMANDS, main

READ = """
import json, sys, click
from lowprec.cli import COMMANDS, cli

def walk(command, name):
    context = click.Context(command, info_name=name, max_content_width=80, terminal_width=80)
    found[name] = {"help": command.get_help(context), "options": [o for p in command.params for o in p.opts]}
    found[name]["group"] = isinstance(command, click.Group)
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            walk(command.get_command(context, child), f"{name} {child}")

found = {}
walk(cli, "lowprec")
print(json.dumps([found, "torch" in sys.modules]))
"""


@pytest.fixture(scope="module")
def helps() -> tuple[dict[str, Any], bool]:
    ran = subprocess.run([sys.executable, "-c", READ], capture_output=True, text=True, check=True)
    found, torch = json.loads(ran.stdout)
    return found, torch


def test_no_torch_for_help(helps: tuple[dict[str, Any], bool]) -> None:
    assert not helps[1]


def test_every_command_is_listed(helps: tuple[dict[str, Any], bool]) -> None:
    for name, (_, summary) in COMMANDS.items():
        assert f"lowprec {name}" in helps[0]
        assert summary.endswith(".") and summary in " ".join(helps[0]["lowprec"]["help"].split())


def test_help_is_narrow_and_shows_an_example(helps: tuple[dict[str, Any], bool]) -> None:
    for name, found in helps[0].items():
        wide = [line for line in found["help"].splitlines() if len(line) > 80]
        assert not wide, f"{name}: {wide}"
        assert "Example" in found["help"], name
        assert f"{name}" in found["help"].split("Example", 1)[1] or found["group"], name


def test_every_command_has_json(helps: tuple[dict[str, Any], bool]) -> None:
    for name, found in helps[0].items():
        assert found["group"] or "--json" in found["options"], name


def test_completion_of_commands_and_recipes() -> None:
    def complete(line: str, index: int) -> list[str]:
        asked = {"COMP_WORDS": line, "COMP_CWORD": str(index), "_LOWPREC_COMPLETE": "bash_complete"}
        ran = subprocess.run(
            [sys.executable, "-m", "lowprec"], env={**os.environ, **asked}, capture_output=True, text=True, check=False
        )
        return [line.partition(",")[2] for line in ran.stdout.splitlines()]

    assert "compare" in complete("lowprec com", 1)
    assert "fp32,fp8-block" in complete("lowprec compare --recipes fp32,fp8", 3)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", shell])
    assert "_LOWPREC_COMPLETE" in capsys.readouterr().out


def test_mistakes_are_one_sentence_and_exit_code_two(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["compar"], "did you mean 'compare'?"),
        (["compare", "--recipes", "fp32,bf17"], "unknown recipe 'bf17'; did you mean"),
        (["train", "--out", "x", "--recipe", "fp9"], "unknown recipe 'fp9'; did you mean"),
        (["run", "--recipe", "bf16", "nowhere.py"], "there is no script nowhere.py"),
        (["report", "nowhere"], "there is no run folder nowhere"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        err = capsys.readouterr().err
        assert stop.value.code == 2 and words in err and "Traceback" not in err

"""`lowprec run` gives a script its recipe and otherwise leaves it alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, sys
print(__name__, os.environ["LOWPREC_RECIPE"], sys.argv[1:])
if "fail" in sys.argv:
    raise ValueError("mine")
sys.exit(7)
"""


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lowprec", "run", *arguments], capture_output=True, text=True, cwd=cwd, check=False
    )


def test_script_gets_recipe_arguments_and_keeps_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT)
    ran = run("--recipe", "fp8-block", "mine.py", "--epochs", "3", "-h", cwd=tmp_path)
    assert ran.stdout.strip() == "__main__ fp8-block ['--epochs', '3', '-h']"
    assert ran.returncode == 7
    ran = run("--recipe", "bf16", "-m", "mine", cwd=tmp_path)
    assert ran.stdout.startswith("__main__ bf16 []")


def test_a_scripts_error_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT)
    ran = run("--recipe", "bf16", "mine.py", "fail", cwd=tmp_path)
    assert "Traceback" in ran.stderr and "ValueError: mine" in ran.stderr and "had no effect" not in ran.stderr
    assert ran.returncode == 1


def test_a_script_that_takes_no_recipe_is_told(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("print('done')\n")
    ran = run("--recipe", "int8", "plain.py", cwd=tmp_path)
    assert "plain.py ended without calling lp.prepare, so recipe int8 had no effect." in ran.stderr
    assert ran.returncode == 0


def test_json_shows_and_runs_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit(3)\n")
    ran = run("--recipe", "bf16", "--nproc", "2", "--json", "mine.py", "a", cwd=tmp_path)
    shown = json.loads(ran.stdout)
    assert ran.returncode == 0 and shown["recipe"] == "bf16"
    assert shown["command"][1:] == [
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "lowprec.cli.launch", "file",
        "mine.py", "a",
    ]  # fmt: skip

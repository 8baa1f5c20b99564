"""Every example runs at its default size."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# examples that need a device of their own
ELSEWHERE = ("gpu_check.py",)
EXAMPLES = sorted(p.name for p in (ROOT / "examples").glob("*.py") if p.name not in ELSEWHERE)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(name: str) -> None:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, str(ROOT / "examples" / name)]
    ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=300)
    assert ran.returncode == 0, ran.stderr[-2000:]

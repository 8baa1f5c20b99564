"""The native core lives in torch's process: one OpenMP runtime, torch's thread count, the path that was asked for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lowprec.kernels import available, native_core

pytestmark = pytest.mark.skipif(not available("native")[0], reason="the native core is not built")

RUNTIMES = """
import torch
from pathlib import Path
from lowprec.formats import format
from lowprec.kernels import cast
torch.set_num_threads(2)
x = torch.randn(1 << 20)
(x @ x).item(), cast.encode(x, format("e4m3")), (x * 2).sum().item()
files = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
print([f for f in sorted(files) if any(w in Path(f).name for w in ("libgomp", "libiomp", "libomp"))])
"""


def _run(code: str, **environment: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, check=True
    )
    return ran.stdout.strip()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_one_openmp_runtime() -> None:
    assert len(eval(_run(RUNTIMES))) == 1


@pytest.mark.parametrize("isa", native_core().isas() if available("native")[0] else [])
def test_environment_forces_a_path(isa: str) -> None:
    code = "from lowprec.kernels import native_core; print(native_core().isa())"
    assert _run(code, LOWPREC_CPU=isa) == isa


def test_an_unknown_path_is_refused() -> None:
    code = "import lowprec.kernels"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "LOWPREC_CPU": "avx9"}
    )
    assert ran.returncode and "unknown LOWPREC_CPU instruction set 'avx9'" in ran.stderr


def test_features_explain_the_paths() -> None:
    core = native_core()
    order = ["scalar", "avx2", "avx512", "avx512bf16"]
    for isa in order[1:]:
        needed = [present for owner, _, present in core.cpu_features() if order.index(owner) <= order.index(isa)]
        assert all(needed) == (isa in core.isas()) or not needed

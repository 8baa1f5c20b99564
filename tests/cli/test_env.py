"""`lowprec env` and `lowprec bench kernels`."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from lowprec.cli import cli
from lowprec.kernels import available, native_core


def test_env_says_what_runs() -> None:
    ran = CliRunner().invoke(cli, ["env", "--json"])
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.output)
    assert found["native"]["available"] == available("native")[0]
    if found["native"]["available"]:
        assert found["native"]["path"] == native_core().isa()
        text = CliRunner().invoke(cli, ["env"]).output
        assert native_core().isa() in text and "OpenMP" in text and "threads" in text


@pytest.mark.skipif(not available("native")[0], reason="the native core is not built")
def test_bench_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowprec.jobs import kernel_speed

    monkeypatch.setattr(kernel_speed, "SIZES", ((64, 128),))
    ran = CliRunner().invoke(cli, ["bench", "kernels", "--json", "--no-peers", "--seconds", "0.01", "--threads", "1"])
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    (size,) = found["sizes"]
    assert {row["name"] for row in size["rows"]} >= {"encode fp32 to e4m3", "quantise nvfp4 1x16", "amax fp32"}
    for row in size["rows"]:
        assert row["share"] == pytest.approx(row["gbs"] / size["copy_gbs"])


def test_an_unknown_benchmark_is_refused() -> None:
    ran = CliRunner().invoke(cli, ["bench", "kernel"])
    assert ran.exit_code == 2 and "did you mean 'kernels'" in ran.output

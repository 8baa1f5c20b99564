"""`lowprec bench optim` runs and says what it measured."""

from __future__ import annotations

import json

from click.testing import CliRunner

from lowprec.cli.bench_optim import command


def test_bench_optim() -> None:
    arguments = ["--no-peers", "--scale", "0.002", "--seconds", "0.01", "--threads", "1", "--json"]
    ran = CliRunner().invoke(command, arguments)
    assert ran.exit_code == 0, ran.output
    result = json.loads(ran.stdout)
    big = {row["name"]: row for row in result["sets"][0]["rows"]}
    assert big["torch fused"]["bytes"] == 16 and big["torch fused"]["over_fused"] == 1
    assert big["fp32"]["bytes"] == 16 and big["8bit states"]["bytes"] == 8 + 2 + 8 / 256
    assert big["bf16, bf16 states, stochastic"]["bytes"] == 8
    assert all(row["ms"] > 0 and row["share_of_copy"] > 0 for row in big.values())
    shown = CliRunner().invoke(command, arguments[:-1])
    assert "8bit states" in shown.output and "of torch fused" in shown.output

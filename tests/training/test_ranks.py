"""Two processes over gloo: what one finds, both act on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_worker import data, flat, net
from torch import nn

import lowprec as lp


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    worker = Path(__file__).with_name("ranks_worker.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen([sys.executable, str(worker), str(rank), str(folder)], env=environment) for rank in range(2)
    ]
    assert [process.wait(timeout=240) for process in started] == [0, 0]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_both_ranks_skip_what_one_found_and_stay_equal(results: list[dict[str, Any]]) -> None:
    first, second = (r["parallel"] for r in results)
    assert first["kinds"] == second["kinds"] == ["", "", "loss", "", "gradients", ""]
    assert first["scales"] == second["scales"] == [64.0, 64.0, 64.0, 64.0, 32.0, 32.0]
    assert first["weights"] == second["weights"] and first["norm"] == second["norm"]


@pytest.mark.parametrize("key", ["accumulated", "accumulated_low"])
def test_no_sync_gives_the_mean_over_ranks_and_micro_batches(results: list[dict[str, Any]], key: str) -> None:
    assert results[0][key] == results[1][key]
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = [model(data(rank, step)).square().mean() / 8 for rank in range(2) for step in range(4)]
    torch.stack(losses).sum().backward()
    optimizer.step()
    tolerance = 2e-2 if key.endswith("low") else 1e-5
    torch.testing.assert_close(torch.tensor(results[0][key]), torch.tensor(flat(model)), rtol=0, atol=tolerance)


def test_grad_scaler_shares_what_it_found(results: list[dict[str, Any]]) -> None:
    assert [r["scaler"] for r in results] == [{"skipped": True, "moved": False, "scale": 4.0}] * 2


def test_sharded_gradients_have_the_norm_of_the_whole(results: list[dict[str, Any]]) -> None:
    first, second = (r["sharded"] for r in results)
    model = lp.apply(net(), "bf16")
    model(data(0, 0)).float().square().mean().backward()
    whole = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    assert first == second and first["norm"] == pytest.approx(whole, rel=2e-2)
    assert first["kind"] == "gradients" and first["scale"] == 8.0


def test_a_wrapped_model_cannot_change_how_its_weights_are_stored(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(net())
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(ValueError, match=r"stores weights in bf16.*prepare the model first, then wrap it"):
            lp.prepare(model, optimizer, "bf16-true")
    finally:
        torch.distributed.destroy_process_group()

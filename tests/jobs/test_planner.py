"""What the planner says against what a step then measures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lowprec import workloads
from lowprec.jobs import planner, skeleton
from lowprec.jobs.engine import Hyper, make

RECIPES = ("fp32", "bf16", "fp8", "int8", "fp8-block")


@pytest.mark.parametrize("job", workloads.BUILT_IN)
@pytest.mark.parametrize("recipe", RECIPES)
def test_bytes_by_role_are_those_of_a_step(job: str, recipe: str) -> None:
    work = workloads.load(job, size="nano")
    held = planner.kept(work.model(0).to("meta"), planner.find_recipe(recipe))
    engine = make(work, recipe, Hyper(), 0)
    batch = work.data.train(0, 0)
    engine.step([batch], 1e-3, 0)
    _, measured, _ = engine.measure([batch], 1e-3, 1)
    for role in ("weights", "masters", "gradients", "states"):
        assert getattr(held, role) == pytest.approx(getattr(measured, role), rel=0.05, abs=64), role


@pytest.mark.long
@pytest.mark.parametrize("job", workloads.BUILT_IN)
@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp8"])
def test_peak_of_a_whole_batch_is_foretold(job: str, recipe: str) -> None:
    work = workloads.load(job, size="small")
    need, _ = planner.needs_of_workload(work, recipe)
    engine = make(work, recipe, Hyper(), 0)
    batch = work.data.train(0, 0)
    engine.step([batch], 1e-3, 0)
    _, _, peak = engine.measure([batch], 1e-3, 1)
    assert peak is not None
    assert need.peak(planner.batch_of(work)) == pytest.approx(peak, rel=0.05)


def test_flops_of_the_built_in_models() -> None:
    work = workloads.load("gpt", size="nano")
    need, plan = planner.needs_of_workload(work, "fp8")
    matmul = sum(p.numel() for n, p in work.model(0).named_parameters() if p.dim() == 2 and "ions" not in n)
    embeddings = work.model(0).tokens.weight.numel()  # type: ignore[union-attr, operator]
    assert need.flops_a_sample == 6 * (matmul - embeddings) * 32
    assert need.flops == {"e5m2 x e4m3": pytest.approx(2 / 3), "e4m3": pytest.approx(1 / 3)}
    assert len(plan.converted) == 9


def test_largest_batch_fills_the_memory() -> None:
    work = workloads.load("gpt", size="nano")
    need, _ = planner.needs_of_workload(work, "fp32")
    most = need.largest_batch(64 * 2**20)
    assert need.peak(most) <= 64 * 2**20 < need.peak(most + 2)
    assert need.largest_batch(1000) == 0


def test_sizes_make_that_many_parameters() -> None:
    model, sizes = skeleton.from_sizes(70e9, 80, 8192, 32000, 4096)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(70e9, rel=1e-3)
    assert sizes.mlp > 8192
    need, _ = planner.needs_of_shapes(lambda: skeleton.from_sizes(7e9, 32, 4096, 32000, 2048), "fp32")
    assert need.weights + need.gradients + need.states == pytest.approx(16 * 7e9, rel=1e-3)
    with pytest.raises(ValueError, match="more than 1e\\+06; check --params"):
        skeleton.from_sizes(1e6, 80, 8192, 32000, 4096)


def test_a_safetensors_file_is_read_by_its_header(tmp_path: Path) -> None:
    model = workloads.load("gpt", size="nano").model(0)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    need, plan = planner.needs_of_shapes(lambda: skeleton.from_safetensors(tmp_path / "model.safetensors", None), "fp8")
    assert need.parameters == sum(p.numel() for p in model.parameters()) and need.activations == 0
    assert {row.name for row in plan.converted} >= {"blocks.0.mlp.up", "lm_head"}
    config = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 256, "max_position_embeddings": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    need, _ = planner.needs_of_shapes(lambda: skeleton.from_safetensors(tmp_path, None), "fp8")
    measured, _ = planner.needs_of_workload(workloads.load("gpt", size="nano"), "fp32")
    assert need.activations > 0 and need.weights == measured.weights


def test_what_is_no_safetensors_file(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="is not a safetensors file"):
        skeleton.from_safetensors(tmp_path / "x.safetensors", None)
    with pytest.raises(OSError, match="could not be read: no such file"):
        skeleton.from_safetensors(tmp_path / "y.safetensors", None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(OSError, match=r"holds no \.safetensors file"):
        skeleton.from_safetensors(tmp_path / "empty", None)


def test_estimate_of_activations_is_near_what_plain_torch_saves() -> None:
    sizes = skeleton.Sizes(layers=4, hidden=128, vocab=256, context=64, mlp=512)
    estimated, _ = planner._estimate(planner.find_recipe("fp32"), sizes)
    model = workloads.gpt.GPT(256, 128, 4, 4, 64)
    x = torch.zeros(2, 64, dtype=torch.long)
    measured = planner.measure.saved_bytes(lambda: model(x, x), model) / 2
    assert estimated == pytest.approx(measured, rel=0.25)

"""Recipes on whole models: what people have, trained for a few steps, with all that must go on working."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowprec as lp
from lowprec.apply import load_scaling_state, scaling_state
from lowprec.workloads import gpt

RECIPES = lp.recipes()


def _gpt() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    model = gpt.GPT(vocab=64, dim=32, blocks=2, heads=2, context=16)
    x = torch.randint(0, 64, (4, 16))
    return model, lambda net: net(x, x.roll(-1, 1))


def _llama() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=32, **sizes))
    x = torch.randint(0, 64, (4, 16))
    return model, lambda net: net(input_ids=x, labels=x).loss


def _bert() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = BertForSequenceClassification(BertConfig(vocab_size=64, max_position_embeddings=32, **sizes))
    x, y = torch.randint(0, 64, (8, 16)), torch.arange(8) % 2
    return model, lambda net: net(input_ids=x, labels=y).loss


def _gpt2() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    x = torch.randint(0, 64, (4, 16))
    return model, lambda net: net(input_ids=x, labels=x).loss


def _transformer() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(64, 32), nn.TransformerEncoder(layer, 2), nn.Linear(32, 64))
    x = torch.randint(0, 64, (4, 16))
    return model, lambda net: nn.functional.cross_entropy(net(x).float().flatten(0, 1), x.flatten())


def _train(model: nn.Module, loss_of: Callable[[nn.Module], torch.Tensor], steps: int = 8) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        loss = loss_of(model)
        loss.backward()
        for name, p in model.named_parameters():
            assert p.grad is None or torch.isfinite(p.grad).all(), name
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", RECIPES)
def test_gpt_trains(name: str) -> None:
    torch.manual_seed(0)
    model, loss_of = _gpt()
    lp.apply(model, name)
    losses = _train(model, loss_of)
    assert losses[-1] < losses[0] - 0.1


_OTHERS: list[Any] = [_llama, _bert, _gpt2, _transformer]
_FEW = ["fp8-delayed", "nvfp4", "int8"]


@pytest.mark.parametrize("make", _OTHERS, ids=lambda make: make.__name__.strip("_"))
@pytest.mark.parametrize("name", [n if n in _FEW else pytest.param(n, marks=pytest.mark.long) for n in RECIPES])
def test_other_models_train(make: Callable[[], Any], name: str) -> None:
    torch.manual_seed(0)
    model, loss_of = make()
    lp.apply(model, name)
    losses = _train(model, loss_of, 12)
    assert losses[-1] < losses[0] - 0.01


def _tokens(make: Callable[[], Any]) -> int:
    return 8 * 16 if make is _bert else 4 * 16


def test_coverage_tells_the_truth() -> None:
    for make in (_gpt, _llama, _bert, _gpt2, _transformer):
        torch.manual_seed(0)
        model, loss_of = make()
        before = lp.coverage(model, loss_of)
        assert before.low == 0 and sum(before.shares.values()) == pytest.approx(1)
        plan = lp.plan(model, "int8")
        lp.apply(model, plan)
        after = lp.coverage(model, loss_of)
        assert after.flops == pytest.approx(before.flops, rel=0.02), make.__name__
        assert after.low > 0.75, f"{make.__name__}\n{after}\n{plan}"
        assert all(row.note for row in after.rows if row.format != "int8")
        if make is not _transformer:
            heads = [row for row in after.rows if row.note.startswith("attention")]
            assert sum(row.flops for row in heads) == 3 * 2 * 4 * _tokens(make) * 16 * 32, make.__name__
    partly = lp.apply(_gpt()[0], "int8", skip=["lm_head"])
    rows = lp.coverage(partly, torch.randint(0, 64, (2, 8))).rows
    assert {row.note for row in rows if row.module == "lm_head"} == {"skipped by 'lm_head'"}


def test_attention_equals_torchs_own() -> None:
    torch.manual_seed(0)
    recipe = lp.recipe("fp8").replace(compute="fp32", **{r: lp.Gemm(None, None) for r in ("grad_input", "grad_weight")})
    plain = recipe.replace(output=lp.Gemm(lp.Cast("fp32", scale="none"), lp.Cast("fp32", scale="none")))
    x, y = torch.randn(3, 5, 16), torch.randn(3, 7, 16)
    padding = torch.zeros(3, 7, dtype=torch.bool)
    padding[1, 4:] = True
    causal = torch.full((5, 7), float("-inf")).triu(1)
    for batch_first in (True, False):
        net = nn.MultiheadAttention(16, 4, batch_first=batch_first)
        low = lp.apply(copy.deepcopy(net), plain)
        assert type(low.out_proj).__name__.startswith("LowPrecLinear")  # type: ignore[union-attr]
        q, k = (x, y) if batch_first else (x.transpose(0, 1), y.transpose(0, 1))
        for options in (
            {},
            {"need_weights": False},
            {"key_padding_mask": padding},
            {"attn_mask": causal, "average_attn_weights": False},
            {"attn_mask": causal.bool(), "need_weights": False, "is_causal": True, "key_padding_mask": padding},
        ):
            for got, wanted in zip(low(q, k, k, **options), net(q, k, k, **options)):
                torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(low(q, q, q)[0], net(q, q, q)[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(low(x[0], x[0], x[0])[0], net(x[0], x[0], x[0])[0], rtol=1e-5, atol=1e-6)


def test_attention_that_is_not_handled_says_so() -> None:
    plan = lp.plan(nn.MultiheadAttention(16, 4, kdim=8), "fp8")
    assert not plan.converted and "reads the weight without calling" in plan.row("out_proj").note


@pytest.mark.parametrize("name", ["fp8", "fp8-delayed", "mxfp4", "int8"])
def test_checkpointing_changes_nothing(name: str) -> None:
    """The recomputed pass uses the same scales and random bits and does not advance them."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
            self.again = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = lambda t: t + self.down(torch.relu(self.up(t)))  # noqa: E731
            return checkpoint(inner, x, use_reentrant=False) if self.again else inner(x)

    torch.manual_seed(0)
    plain = lp.apply(nn.Sequential(Block(), Block()), name)
    again = copy.deepcopy(plain)
    for block in again:
        block.again = True
    for _ in range(3):
        x = torch.randn(48, 32)
        for net in (plain, again):
            net(x).float().square().mean().backward()
    for p, q in zip(plain.parameters(), again.parameters()):
        assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)
    one, two = scaling_state(plain), scaling_state(again)
    assert one.keys() == two.keys() and one
    for module in one:
        for key in one[module]:
            assert torch.equal(torch.as_tensor(one[module][key]), torch.as_tensor(two[module][key])), (module, key)


def test_delayed_scaling_follows_its_history() -> None:
    recipe = lp.recipe("fp8-delayed").replace(delayed=lp.Delayed(history=3, margin=1))
    layer = lp.apply(nn.Linear(8, 8), recipe)
    scales, sizes = [], [4.0, 2.0, 1.0, 8.0, float("inf"), 1.0, 1.0, 1.0]
    for size in sizes:
        layer(torch.full((2, 8), size))
        scales.append(layer._lowprec_scale[0].item())  # type: ignore[union-attr]
    # of the previous three passes, the largest; the first pass has none, and the one after Inf keeps what was there
    wanted = [1.0, *(2 * m / 448 for m in (4.0, 4.0, 4.0, 8.0, 8.0, 8.0, 8.0))]
    assert scales[:6] == pytest.approx(wanted[:6])
    assert scales[-1] == pytest.approx(wanted[-1])
    layer.eval()
    before = copy.deepcopy(scaling_state(layer))
    layer(torch.full((2, 8), 100.0))
    assert torch.equal(before[""]["passes"], scaling_state(layer)[""]["passes"])


def test_scaling_state_travels() -> None:
    first = lp.apply(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), "fp8-delayed")
    for _ in range(3):
        first(torch.randn(4, 8)).float().sum().backward()
    second = lp.apply(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), "fp8-delayed")
    second.load_state_dict(first.state_dict())
    state = scaling_state(first)
    load_scaling_state(second, state)
    x = torch.randn(4, 8)
    assert torch.equal(first(x), second(x))
    with pytest.raises(ValueError, match="unknown module in the scaling state"):
        load_scaling_state(second, {"2": {}})
    with pytest.raises(ValueError, match="has shape"):
        load_scaling_state(second, {"0": {"scale": torch.ones(4)}})


def test_state_dict_needs_no_lowprec(tmp_path: Path) -> None:
    model, loss_of = _gpt()
    before = {key: value.dtype for key, value in model.state_dict().items()}
    lp.apply(model, "fp8-delayed")
    loss_of(model).backward()
    assert {key: value.dtype for key, value in model.state_dict().items()} == before
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    code = (
        "import torch, sys; state = torch.load(sys.argv[1], weights_only=True); "
        "assert not any(m.startswith('lowprec') for m in sys.modules) and len(state) == int(sys.argv[2])"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "weights.pt"), str(len(before))], check=True)


def test_ties_frozen_layers_and_sharing() -> None:
    torch.manual_seed(0)
    embedding, head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
    head.weight = embedding.weight
    shared = nn.Linear(8, 8)
    frozen = nn.Linear(8, 8).requires_grad_(False)
    net = lp.apply(nn.Sequential(embedding, shared, shared, frozen, head), "fp8")
    assert net[0].weight is net[4].weight and net[1] is net[2]
    net(torch.arange(6)).float().square().mean().backward()
    assert net[3].weight.grad is None and net[1].weight.grad is not None and net[0].weight.grad is not None
    lp.undo(net)
    assert type(net[1]) is nn.Linear and net[0].weight is net[4].weight


def test_undo_is_bit_identical() -> None:
    torch.manual_seed(0)
    model, loss_of = _gpt()
    wanted = loss_of(model)
    lp.undo(lp.apply(model, "mxfp8"))
    assert torch.equal(loss_of(model), wanted)
    assert not [b for b, _ in model.named_buffers() if "lowprec" in b]


def test_parametrized_and_wrapped_layers() -> None:
    class Lora(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.down, self.up = base, nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.up(self.down(x))

    normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
    net = nn.ModuleDict({"lora": Lora(nn.Linear(8, 8)), "normed": normed, "experts": experts})
    lp.apply(net, "fp8")
    x = torch.randn(4, 8)
    y = net["lora"](x).float() + net["normed"](x).float() + sum(expert(x).float() for expert in experts)
    y.sum().backward()
    missing = [name for name, p in net.named_parameters() if p.grad is None]
    assert not missing
    names = {row.name for row in lp.applied(net).converted}  # type: ignore[union-attr]
    assert {"lora.base", "lora.down", "lora.up", "normed", "experts.2"} <= names


def test_observation_counts() -> None:
    layer = lp.apply(nn.Linear(4, 4), lp.recipe("fp8").replace(saved="high"))
    x = torch.tensor([[448.0, 1e-6, 1.0, -2.0]], requires_grad=True)
    with lp.observe(layer) as watch:
        layer(x).float().sum().backward()
    rows = {row.role: row for row in watch.rows()}
    assert rows["output.input"].flushed == 1 and rows["output.input"].elements == 4
    assert rows["output.input"].amax == 448.0 and rows["output.input"].scale == 1.0
    assert {"output.weight", "grad_input.grad_output"} <= rows.keys()
    watch.clear()
    layer(x)
    assert not watch.rows()
    with pytest.raises(ValueError, match="no module of this model has a recipe applied"):
        lp.observe(nn.Linear(2, 2)).__enter__()


def test_functions() -> None:
    a, b = torch.randn(3, 5, 16, requires_grad=True), torch.randn(16, 7)
    torch.testing.assert_close(lp.matmul(a, b, recipe="mxint8").float(), a @ b, rtol=0.1, atol=0.3)
    lp.matmul(a, torch.randn(3, 16, 7), recipe="mxfp4").float().sum().backward()
    assert a.grad is not None
    with pytest.raises(ValueError, match="needs a module"):
        lp.linear(a, b.t(), recipe="fp8-delayed")
    with pytest.raises(ValueError, match="contracts over"):
        lp.linear(a, b, recipe="fp8")


def test_strict_refuses_what_is_emulated() -> None:
    net = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(ValueError, match=r"0 \(output\): cpu here cannot compute e4m3.*Leave strict off.*skip=\['0'\]"):
        lp.plan(net, "fp8", strict=True)
    with pytest.raises(ValueError, match="cannot compute fp16 x fp16"):
        lp.plan(net, "fp16", strict=True)
    assert lp.plan(net, "int8", strict=True).converted
    assert not lp.plan(net, "fp8", strict=True, skip=["0"]).converted

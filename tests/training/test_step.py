"""The prepared optimizer: order of operations, reports, accumulation, several losses and optimizers."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import lowprec as lp
from lowprec.errors import LowprecWarning
from lowprec.loss_scale import DynamicScale, LossScaleCollapseError


def _net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def _batch(seed: int = 1, n: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 4, generator=g), torch.randn(n, 3, generator=g)


def _prepared(recipe: str = "fp32", cls: type = torch.optim.SGD, **options: Any) -> tuple[nn.Module, Any]:
    model = _net()
    return lp.prepare(model, cls(model.parameters(), lr=0.1), recipe, **options)


def _prepared_bf16() -> tuple[nn.Module, Any]:
    model = _net().bfloat16()
    return lp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")


def _loss(model: nn.Module, seed: int = 1, n: int = 5) -> torch.Tensor:
    x, y = _batch(seed, n)
    return (model(x.to(next(model.parameters()).dtype)).float() - y).square().mean()


def _weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


# -- it is an optimizer --------------------------------------------------------------------------------------------


def test_same_model_and_an_optimizer() -> None:
    model = _net()
    given = torch.optim.AdamW(model.parameters(), lr=0.1)
    back, optimizer = lp.prepare(model, given, "fp32")
    assert back is model
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups[0]["params"][0] is next(iter(model.parameters()))
    assert optimizer.param_groups[0] is given.param_groups[0]
    assert "Prepared(" in repr(optimizer)


def test_a_scheduler_made_before_or_after_works() -> None:
    for after in (False, True):
        model = _net()
        given = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = None if after else torch.optim.lr_scheduler.StepLR(given, 1, 0.5)
        model, optimizer = lp.prepare(model, given, "fp32")
        scheduler = scheduler or torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        optimizer.backward(_loss(model))
        optimizer.step()
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.5


def test_hooks_run_when_the_step_is_taken() -> None:
    model, optimizer = _prepared()
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *a: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *a: calls.append("post"))
    optimizer.backward(_loss(model))
    optimizer.step()
    assert calls == ["pre", "post"]
    optimizer.zero_grad()
    optimizer.backward(_loss(model) * math.nan)
    optimizer.step()
    assert calls == ["pre", "post"]


@pytest.mark.parametrize("recipe", ["fp32", "fp16"])
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_same_weights_as_a_plain_loop_with_clipping(recipe: str, name: str) -> None:
    """Unscale, norm, clip, update: in this order the scale leaves no trace."""
    cls = getattr(torch.optim, name)
    plain, ours = _net(), _net()
    reference = cls(plain.parameters(), lr=0.05)
    ours, optimizer = lp.prepare(ours, cls(ours.parameters(), lr=0.05), "fp32", clip_grad_norm=0.3,
                                 loss_scale="torch" if recipe == "fp16" else None)  # fmt: skip
    for i in range(20):
        reference.zero_grad()
        _loss(plain, i).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        reference.step()
        optimizer.zero_grad()
        optimizer.backward(_loss(ours, i))
        optimizer.step()
        assert optimizer.last_step.grad_norm == pytest.approx(float(norm), rel=1e-5)
        assert optimizer.last_step.clipped == (float(norm) > 0.3)
    torch.testing.assert_close(_weights(ours), _weights(plain), rtol=1e-5, atol=1e-6)


def test_closure() -> None:
    model, optimizer = _prepared()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = _loss(model)
        optimizer.backward(loss)
        return loss

    before = _weights(model)
    assert float(optimizer.step(closure).detach()) == pytest.approx(optimizer.last_step.loss)
    assert not torch.equal(_weights(model), before)


# -- what can go wrong ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "kind"), [(math.nan, "nan"), (math.inf, "inf")])
def test_a_bad_gradient_skips_and_is_named(value: float, kind: str) -> None:
    model, optimizer = _prepared(loss_scale=DynamicScale(64.0))
    before = _weights(model)
    optimizer.backward(_loss(model))
    model[2].weight.grad.view(-1)[3] = value
    optimizer.gradients.remember()  # as if backward had made it
    optimizer.step()
    report = optimizer.last_step
    assert report.skipped and report.kind == "gradients" and not report.taken
    assert getattr(report, kind) == ("2.weight",) and report.inf + report.nan == ("2.weight",)
    assert "2.weight" in report.reason and torch.equal(_weights(model), before)
    assert report.loss_scale == 64.0 and optimizer.loss_scale == 32.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_loss_is_caught_before_backward(value: float) -> None:
    model, optimizer = _prepared(loss_scale=64.0)
    before = _weights(model)
    assert optimizer.backward(_loss(model) * value, batch="b7") is False
    assert all(p.grad is None for p in model.parameters())
    optimizer.step()
    report = optimizer.last_step
    assert report.kind == "loss" and report.batches == ("b7",) and "in batch b7" in report.reason
    assert torch.equal(_weights(model), before) and optimizer.loss_scale == 64.0
    optimizer.zero_grad()
    assert optimizer.backward(_loss(model))
    optimizer.step()
    assert optimizer.last_step.taken


def test_a_bad_loss_among_micro_batches_drops_the_whole_step() -> None:
    model, optimizer = _prepared()
    before = _weights(model)
    optimizer.backward(_loss(model))
    optimizer.backward(_loss(model) * math.nan)
    optimizer.backward(_loss(model))
    optimizer.step()
    assert optimizer.last_step.skipped and optimizer.last_step.micro_batches == 3
    assert "batch 1" in optimizer.last_step.reason and torch.equal(_weights(model), before)


def test_clip_before_unscale_cannot_happen() -> None:
    model, optimizer = _prepared(loss_scale=1024.0)
    optimizer.backward(_loss(model))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with pytest.raises(ValueError, match=r"was changed after optimizer.backward.*1024 times the gradient.*unscale_"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.backward(_loss(model))
    optimizer.unscale_()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    assert optimizer.last_step.grad_norm == pytest.approx(0.1, rel=1e-3) and float(norm) > 0.1
    # the same weights as without any scale
    other, plain = _prepared()
    plain.backward(_loss(other))
    torch.nn.utils.clip_grad_norm_(other.parameters(), 0.1)
    plain.step()
    torch.testing.assert_close(_weights(model), _weights(other))


def test_gradients_that_backward_did_not_make() -> None:
    model, optimizer = _prepared(loss_scale=8.0)
    _loss(model).backward()
    with pytest.raises(ValueError, match=r"step\(\) found gradients that optimizer.backward"):
        optimizer.step()


def test_a_forgotten_zero_grad() -> None:
    model, optimizer = _prepared(loss_scale=8.0)
    optimizer.backward(_loss(model))
    optimizer.step()
    with pytest.raises(ValueError, match=r"call optimizer.zero_grad\(\)"):
        optimizer.backward(_loss(model))
    model.zero_grad()
    optimizer.backward(_loss(model))
    optimizer.step()
    assert optimizer.last_step.taken


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_of_the_model_will_do(set_to_none: bool) -> None:
    results = []
    for ours in (False, True):
        model, optimizer = _prepared(loss_scale=8.0)
        for i in range(3):
            (optimizer if ours else model).zero_grad(set_to_none=set_to_none)
            optimizer.backward(_loss(model, i))
            optimizer.step()
        results.append(_weights(model))
    assert torch.equal(*results)


def test_bad_losses_given() -> None:
    model, optimizer = _prepared()
    with pytest.raises(ValueError, match="takes a scalar loss, got \\(5, 3\\)"):
        optimizer.backward(model(_batch()[0]))
    with pytest.raises(ValueError, match="depends on no parameter"):
        optimizer.backward(torch.tensor(1.0))


def test_no_gradient_this_step() -> None:
    model, optimizer = _prepared(loss_scale=DynamicScale(4.0, window=1))
    optimizer.step()
    assert optimizer.last_step.kind == "nothing" and optimizer.loss_scale == 4.0
    optimizer.backward(_loss(model))
    optimizer.step()
    assert optimizer.last_step.taken and optimizer.loss_scale == 8.0


def test_collapse_is_reported_with_its_cause_and_the_scale_comes_back() -> None:
    model, optimizer = _prepared(loss_scale=DynamicScale(256.0))

    def step(value: float) -> None:
        optimizer.zero_grad()
        optimizer.backward(_loss(model))
        model[0].bias.grad[0] *= value
        optimizer.gradients.remember()
        optimizer.step()

    step(1.0)
    with pytest.warns(LowprecWarning, match=r"16 steps in a row were skipped.*NaN in 0.bias"):
        for _ in range(16):
            step(math.nan)
    step(math.nan)  # said once
    assert optimizer.loss_scale < 0.01
    step(1.0)
    assert optimizer.last_step.taken and optimizer.loss_scale == 256.0


def test_collapse_can_raise() -> None:
    model, optimizer = _prepared(loss_scale="none", collapse="raise")
    with pytest.raises(LossScaleCollapseError, match=r"Inf in 0.bias"):
        for _ in range(12):
            optimizer.zero_grad()
            optimizer.backward(_loss(model))
            model[0].bias.grad[0] = math.inf
            optimizer.step()
    assert optimizer.last_step.index == 10


def test_deepspeed_stops_at_its_floor_and_says_why() -> None:
    model, optimizer = _prepared(loss_scale="deepspeed")
    optimizer.reset_loss_scale(DynamicScale(1.0, floor=1.0, strict=True))
    optimizer.backward(_loss(model))
    model[0].bias.grad[0] = math.inf
    optimizer.gradients.remember()
    with pytest.raises(LossScaleCollapseError, match=r"at its floor 1.*Inf in 0.bias"):
        optimizer.step()
    assert optimizer.last_step.skipped


# -- accumulation --------------------------------------------------------------------------------------------------


def test_16_bit_gradients_accumulate_in_fp32() -> None:
    """256 micro-batches whose sum a bf16 accumulator cannot hold."""
    weight = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    model = nn.ParameterList([weight])
    model, optimizer = lp.prepare(model, torch.optim.SGD([weight], lr=2.0**-9), "fp32")
    for i in range(512):
        optimizer.backward((weight * (1.0 if i % 2 else 2.0**-7)).sum().float())
    optimizer.step()
    # exact: 256 + 2; added in bf16 the small ones vanish beside 256
    assert optimizer.last_step.grad_norm == pytest.approx(258.0 * math.sqrt(8), rel=1e-7)
    torch.testing.assert_close(weight.detach().float(), torch.full((8,), 1.0 - 258.0 / 512), rtol=2**-8, atol=0)


def test_accumulation_equals_one_large_batch() -> None:
    one, optimizer_one = _prepared(loss_scale=16.0)
    many, optimizer_many = _prepared(loss_scale=16.0)
    x, y = _batch(3, 8)
    optimizer_one.backward((one(x) - y).square().mean())
    for i in range(4):
        part = slice(2 * i, 2 * i + 2)
        optimizer_many.backward((many(x[part]) - y[part]).square().mean() / 4)
    optimizer_one.step()
    optimizer_many.step()
    assert optimizer_many.last_step.micro_batches == 4
    torch.testing.assert_close(_weights(one), _weights(many))


def test_abandoned_micro_batches_leave_nothing() -> None:
    model, optimizer = _prepared_bf16()
    other, plain = _prepared_bf16()
    for _ in range(2):
        optimizer.backward(_loss(model, 5))
    model.zero_grad()
    for m, o in ((model, optimizer), (other, plain)):
        o.backward(_loss(m, 6))
        o.backward(_loss(m, 7))
        o.step()
    assert torch.equal(_weights(model), _weights(other)) and optimizer.last_step.micro_batches == 2


# -- embeddings ----------------------------------------------------------------------------------------------------


class _Words(nn.Module):
    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(6, 4, sparse=sparse)
        self.head = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.table(x))
        return out


def _words_loss(model: nn.Module) -> torch.Tensor:
    return nn.functional.cross_entropy(model(torch.tensor([1, 2, 2, 5])), torch.tensor([0, 1, 2, 3]))


@pytest.mark.parametrize("sparse", [False, True])
def test_embedding_gradient_scale(sparse: bool) -> None:
    plain, model = _Words(sparse), _Words(sparse)
    start = model.table.weight.detach().clone()
    sgd = torch.optim.SGD(plain.parameters(), lr=1.0)
    _words_loss(plain).backward()
    sgd.step()
    model, optimizer = lp.prepare(
        model, torch.optim.SGD(model.parameters(), lr=1.0), "fp32", loss_scale=32.0, embedding_grad_scale=0.25
    )
    optimizer.backward(_words_loss(model))
    optimizer.step()
    torch.testing.assert_close(model.head.weight, plain.head.weight)
    torch.testing.assert_close(model.table.weight - start, (plain.table.weight - start) * 0.25)


def test_embeddings_are_clipped_apart() -> None:
    model = _Words()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    model, optimizer = lp.prepare(
        model, torch.optim.SGD(model.parameters(), lr=1.0), "fp32", clip_grad_norm=0.05, clip_embedding_norm=0.01
    )
    optimizer.backward(_words_loss(model))
    optimizer.step()
    moved = {n: (p.detach() - before[n]).norm().item() for n, p in model.named_parameters()}
    assert moved["table.weight"] == pytest.approx(0.01, rel=1e-3)
    assert math.hypot(moved["head.weight"], moved["head.bias"]) == pytest.approx(0.05, rel=1e-3)
    assert optimizer.last_step.embedding_norm is not None and optimizer.last_step.clipped


def test_sparse_gradients_are_checked_and_named() -> None:
    model = _Words(sparse=True)
    model, optimizer = lp.prepare(model, torch.optim.SparseAdam([model.table.weight]), "fp32", loss_scale=2.0)
    optimizer.backward(_words_loss(model) * torch.tensor([3e38]).sum() * 100)
    optimizer.step()
    assert optimizer.last_step.skipped
    optimizer.zero_grad()
    optimizer.backward(_words_loss(model))
    optimizer.step()
    assert optimizer.last_step.taken


# -- several of everything -----------------------------------------------------------------------------------------


def test_gan_two_models_two_optimizers() -> None:
    torch.manual_seed(0)
    g, d = nn.Linear(2, 3), nn.Linear(3, 1)
    (g, d), (og, od) = lp.prepare(
        (g, d), (torch.optim.Adam(g.parameters()), torch.optim.Adam(d.parameters())), "fp32", loss_scale="torch"
    )
    for _ in range(3):
        noise, real = torch.randn(4, 2), torch.randn(4, 3)
        od.zero_grad()
        od.backward((d(g(noise).detach()) - d(real)).mean())
        od.step()
        og.zero_grad()
        og.backward(-d(g(noise)).mean())
        og.step()
        assert od.last_step.taken and og.last_step.taken
    assert og.gradients.name(g.weight) == "weight"
    # an overflow in one leaves the other alone
    og.zero_grad()
    og.backward(g(torch.full((1, 2), 3e38)).sum() * 1e-30)
    g.weight.grad[0, 0] = math.inf
    og.gradients.remember()
    og.step()
    assert og.last_step.skipped and og.loss_scale == 2.0**15 and od.loss_scale == 2.0**16


def test_several_losses_with_a_scale_each() -> None:
    model, optimizer = _prepared(loss_scale=DynamicScale(1024.0))
    plain, reference = _prepared()
    optimizer.backward(_loss(model, 1), name="main")
    optimizer.reset_loss_scale(DynamicScale(4.0), name="main")
    optimizer.zero_grad()
    for _ in range(2):
        optimizer.backward(_loss(model, 1), name="main")
        optimizer.backward(_loss(model, 2) * 3, name="side")
        reference.backward(_loss(plain, 1))
        reference.backward(_loss(plain, 2) * 3)
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
    torch.testing.assert_close(_weights(model), _weights(plain))
    optimizer.backward(_loss(model, 1), name="main")
    x = model(_batch(2)[0])
    optimizer.backward((x * torch.tensor(1e38)).sum() * 1e-2, name="side")
    optimizer.step()
    assert optimizer.last_step.skipped
    assert optimizer.scales["side"].scale == 512.0 and optimizer.scales["main"].scale == 4.0


def test_parameters_added_later_and_frozen_ones() -> None:
    model = _net()
    for p in model[2].parameters():
        p.requires_grad_(False)
    model, optimizer = lp.prepare(model, torch.optim.SGD(model[0].parameters(), lr=0.1), "fp32", loss_scale=2.0)
    frozen = model[2].weight.detach().clone()
    optimizer.backward(_loss(model))
    optimizer.step()
    assert torch.equal(model[2].weight, frozen)
    for p in model[2].parameters():
        p.requires_grad_(True)
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.2})
    optimizer.zero_grad()
    optimizer.backward(_loss(model))
    optimizer.step()
    assert not torch.equal(model[2].weight, frozen)
    assert optimizer.gradients.name(model[2].weight) == "2.weight"


def test_an_optimizer_of_ones_own_is_kept() -> None:
    class Own(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.sub_(p.grad, alpha=group["lr"])

    model, plain = _net(), _net()
    given = Own(model.parameters())
    model, optimizer = lp.prepare(model, given, "fp32", loss_scale=512.0)
    assert optimizer.inner is given
    optimizer.backward(_loss(model))
    optimizer.step()
    _loss(plain).backward()
    Own(plain.parameters()).step()
    torch.testing.assert_close(_weights(model), _weights(plain))


# -- errors of prepare ---------------------------------------------------------------------------------------------


def test_errors_of_prepare(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.delenv("LOWPREC_RECIPE", raising=False)
    monkeypatch.chdir(tmp_path)
    model = _net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="prepare got no recipe: pass recipe='bf16'"):
        lp.prepare(model, sgd)
    with pytest.raises(ValueError, match="none of the model's parameters"):
        lp.prepare(_net(), sgd, "fp32")
    with pytest.raises(TypeError, match="prepare takes an optimizer"):
        lp.prepare(model, [1], "fp32")  # type: ignore[list-item]
    with pytest.raises(ValueError, match="clip_grad_norm must be a positive number"):
        lp.prepare(model, sgd, "fp32", clip_grad_norm=-1.0)
    with pytest.raises(ValueError, match="LBFGS evaluates the loss many times"):
        lp.prepare(model, torch.optim.LBFGS(model.parameters()), "fp32")
    _, optimizer = lp.prepare(model, sgd, "fp32")
    with pytest.raises(ValueError, match="was prepared already"):
        lp.prepare(model, optimizer, "fp32")
    scaler = lp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(ValueError, match="scales its loss itself: drop the GradScaler"):
        scaler.step(optimizer)


def test_the_recipe_comes_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lowprec.toml").write_text(
        'recipe = "fp16"\nskip = ["2"]\nclip_grad_norm = 0.5\nguard = "stop"\nseed = 3\n[rules]\n"0" = "high"\n'
    )
    model = _net()
    _, optimizer = lp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert optimizer.recipe.name == "fp16" and optimizer.options.clip_grad_norm == 0.5
    assert optimizer.guard.guard.action == "stop" and optimizer.inner.seed == 3
    assert not any(row.handler for row in lp.plan(_net(), "fp16", skip=["2"], rules={"0": None}).rows)
    assert not hasattr(model[0], "_lowprec") and not hasattr(model[2], "_lowprec")
    monkeypatch.setenv("LOWPREC_RECIPE", "bf16")
    model = _net()
    _, optimizer = lp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), clip_grad_norm=2.0)
    assert optimizer.recipe.name == "bf16" and optimizer.options.clip_grad_norm == 2.0


def test_nothing_is_warned_in_a_healthy_run() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, optimizer = _prepared(cls=torch.optim.AdamW)
        for i in range(5):
            optimizer.zero_grad()
            optimizer.backward(_loss(model, i))
            optimizer.step()
        assert optimizer.last_step.index == 5

"""The op policy: each row of the table on real ops, in eager code, compiled, checkpointed, and absent when off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import lowprec as lp
from lowprec import policy
from lowprec.op_table import TABLE

B, H = torch.bfloat16, torch.float16


def _x(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


LABELS = torch.arange(4)
# op -> what is called; x is 4 x 6, image is 2 x 4 x 6 x 6
CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "linear": lambda x, image: F.linear(x, x),
    "matmul": lambda x, image: x @ x.T,
    "mm": lambda x, image: torch.mm(x, x.T),
    "bmm": lambda x, image: torch.bmm(image[0], image[0]),
    "addmm": lambda x, image: torch.addmm(x[:, :4], x, x.T),
    "baddbmm": lambda x, image: torch.baddbmm(image[0], image[0], image[0]),
    "mv": lambda x, image: torch.mv(x, x[0]),
    "conv1d": lambda x, image: F.conv1d(image[0], image[0][:, :, :3]),
    "conv2d": lambda x, image: F.conv2d(image, image[:, :, :3, :3]),
    "conv_transpose2d": lambda x, image: F.conv_transpose2d(image, image[:, :, :3, :3].transpose(0, 1)),
    "scaled_dot_product_attention": lambda x, image: F.scaled_dot_product_attention(image, image, image),
    "max_pool2d": lambda x, image: F.max_pool2d(image, 2),
    "avg_pool2d": lambda x, image: F.avg_pool2d(image, 2),
    "adaptive_avg_pool2d": lambda x, image: F.adaptive_avg_pool2d(image, 2),
    "relu": lambda x, image: F.relu(x),
    "gelu": lambda x, image: F.gelu(x),
    "softmax": lambda x, image: F.softmax(x, -1),
    "log_softmax": lambda x, image: F.log_softmax(x, -1),
    "cross_entropy_loss": lambda x, image: F.cross_entropy(x, LABELS),
    "nll_loss_nd": lambda x, image: F.nll_loss(x, LABELS),
    "mse_loss": lambda x, image: F.mse_loss(x, x * 0),
    "l1_loss": lambda x, image: F.l1_loss(x, x * 0),
    "smooth_l1_loss": lambda x, image: F.smooth_l1_loss(x, x * 0),
    "kl_div": lambda x, image: F.kl_div(x, x * 0, reduction="batchmean"),
    "binary_cross_entropy_with_logits": lambda x, image: F.binary_cross_entropy_with_logits(x, x * 0),
    "exp": lambda x, image: x.exp(),
    "log": lambda x, image: x.log(),
    "pow": lambda x, image: x**3,
    "rsqrt": lambda x, image: x.rsqrt(),
    "sum": lambda x, image: x.sum(0),
    "mean": lambda x, image: x.mean(),
    "prod": lambda x, image: x.prod(),
    "cumsum": lambda x, image: x.cumsum(0),
    "var": lambda x, image: x.var(),
    "norm": lambda x, image: x.norm(),
    "linalg_vector_norm": lambda x, image: torch.linalg.vector_norm(x),
    "cosine_similarity": lambda x, image: F.cosine_similarity(x, x.flip(0)),
    "cdist": lambda x, image: torch.cdist(x, x.flip(0)),
    "layer_norm": lambda x, image: F.layer_norm(x, (6,), torch.ones(6), torch.zeros(6)),
    "group_norm": lambda x, image: F.group_norm(image, 2, torch.ones(4), torch.zeros(4)),
    "batch_norm": lambda x, image: F.batch_norm(image, torch.zeros(4), torch.ones(4), training=True),
    "instance_norm": lambda x, image: F.instance_norm(image),
    "rms_norm": lambda x, image: F.rms_norm(x, (6,), torch.ones(6)),
}


@pytest.mark.parametrize("given", [torch.float32, B, H], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("recipe", ["bf16", "fp16"])
@pytest.mark.parametrize("op", CALLS)
def test_each_op_follows_its_row(op: str, recipe: str, given: torch.dtype) -> None:
    low = policy.Policy(recipe).dtype
    x, image = _x(4, 6).abs().to(given), _x(2, 4, 6, 6, dtype=given)
    with policy.active(lp.recipe(recipe), "cpu"):
        result = CALLS[op](x, image)
    rule = TABLE[op]
    assert result.dtype == (torch.float32 if rule == "fp32" else low)
    # The value: the op in fp32 on operands rounded as the rule says. fp32 sums are exactly that; a 16-bit result is
    # that, rounded once (2^-8 and 2^-11 relative), but for the bf16 kernels' own order of sums.
    args = [t.to(low) if rule == "low" else t for t in (x, image)]
    expected = CALLS[op](*(t.float() for t in args))
    if rule == "fp32":
        assert torch.equal(result, expected)
    else:
        eps = 2.0**-7 if low == B else 2.0**-10
        torch.testing.assert_close(result.float(), expected, rtol=eps, atol=eps * float(expected.abs().max()))


def test_softmax_in_bf16_would_be_seen() -> None:
    x = _x(4, 6).to(B)
    assert not torch.equal(F.softmax(x, -1).float(), F.softmax(x.float(), -1))


@pytest.mark.parametrize("op", sorted(CALLS.keys() - {"rms_norm"}))  # torch warns of its dtypes
def test_torch_autocast_alone_is_as_before(op: str) -> None:
    """In a process without lowprec and in this one, torch.autocast gives the same (values from torch's own kernels)."""
    x, image = _x(4, 6).abs(), _x(2, 4, 6, 6)
    with torch.autocast("cpu", B):
        result = CALLS[op](x, image)
    torch_lists_low = {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "conv1d", "conv2d", "conv_transpose2d"}
    torch_lists_low |= {"scaled_dot_product_attention"}
    assert result.dtype == (B if op in torch_lists_low else torch.float32)
    with torch.autocast("cpu", B):
        half = CALLS[op](x.to(B), image.to(B))
    ours = {"softmax", "exp", "log", "pow", "sum", "cumsum", "log_softmax", "layer_norm", "norm"}
    assert op not in ours or half.dtype == B


def test_fp64_and_integers_are_left_alone() -> None:
    with policy.active(lp.recipe("bf16"), "cpu"):
        assert _x(3, 3, dtype=torch.float64).exp().dtype == torch.float64
        assert torch.arange(3).sum().dtype == torch.int64
        assert F.relu(torch.arange(3)).dtype == torch.int64


def test_uniform_computes_everything_in_the_compute_dtype_but_norms_inside() -> None:
    x = _x(4, 6, dtype=B)
    with policy.active(lp.recipe("bf16-true"), "cpu"):
        assert {F.softmax(x, -1).dtype, x.exp().dtype, x.sum().dtype, F.cross_entropy(x, LABELS).dtype} == {B}
        assert F.linear(_x(4, 6), x).dtype == B
        norm = F.layer_norm(x, (6,), torch.ones(6), torch.zeros(6))
    assert norm.dtype == B
    torch.testing.assert_close(norm.float(), F.layer_norm(x.float(), (6,)), rtol=2**-7, atol=2**-8)


@pytest.mark.parametrize("recipe", ["fp32", "tf32", "apex-O0"])
def test_fp32_recipes_have_no_policy(recipe: str) -> None:
    with policy.active(lp.recipe(recipe), "cpu"):
        assert policy.current() is None and (_x(2, 2) @ _x(2, 2)).dtype == torch.float32


def test_your_own_rules_come_first() -> None:
    x = _x(4, 6, dtype=B)
    with policy.active(lp.recipe("bf16 ops=softmax->low|exp->given|relu->fp32"), "cpu"):
        assert F.softmax(x, -1).dtype == B and x.exp().dtype == B and F.relu(x).dtype == torch.float32
        assert F.log_softmax(x, -1).dtype == torch.float32


def test_backward_follows_the_casts() -> None:
    x, w = _x(4, 6).requires_grad_(), _x(5, 6, seed=1).requires_grad_()
    with policy.active(lp.recipe("bf16"), "cpu"):
        loss = F.cross_entropy(F.linear(x, w), LABELS)
    loss.backward()
    assert x.grad is not None and w.grad is not None and w.grad.dtype == torch.float32
    # the gradient of the logits is fp32 up to the linear, which rounds it to bf16 and so its own result
    logits = F.linear(x.detach().to(B), w.detach().to(B)).requires_grad_()
    F.cross_entropy(logits.float(), LABELS).backward()
    assert logits.grad is not None
    assert torch.equal(w.grad, (logits.grad.t() @ x.detach().to(B)).float())


def test_fp16_products_on_a_cpu_round_operands_and_result_to_fp16() -> None:
    x, w = _x(8, 32), _x(8, 32, seed=1)
    with policy.active(lp.recipe("fp16"), "cpu"):
        y = F.linear(x, w)
    exact = x.to(H).double() @ w.to(H).double().T
    assert y.dtype == H
    assert ((y.double() - exact).abs() <= 2.0**-11 * exact.abs() * 1.01 + 1e-6).all()


def test_attention_pv_switch() -> None:
    q, k, v = (_x(2, 3, 8, 16, seed=s) for s in range(3))
    scores = (q.to(B) @ k.to(B).transpose(-2, -1)).float() * 0.25
    expected = (F.softmax(scores, -1) @ v.to(B).float()).to(B)
    with policy.active(lp.recipe("bf16 attention_pv=high"), "cpu"):
        high = F.scaled_dot_product_attention(q, k, v)
        causal = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mask = torch.ones(8, 8, dtype=torch.bool).tril()
        masked = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        grouped = F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True)
        repeated = F.scaled_dot_product_attention(q, k[:, :1].expand_as(k), v[:, :1].expand_as(v))
    assert torch.equal(high, expected)
    assert torch.equal(causal, masked) and not torch.equal(causal, high)
    assert torch.equal(grouped, repeated)


def test_fused_implementations_stand_in_for_ops() -> None:
    op = torch.ops.aten.softmax.int
    before = policy._fused.pop(op, None)

    def fused(active: policy.Policy, x: torch.Tensor, dim: int, dtype: Any = None) -> Any:
        if dim == 0:
            return NotImplemented
        return x.float() * 0 + 7

    try:
        policy.register(op, fused)
        with pytest.raises(ValueError, match="already"):
            policy.register(op, lambda *a: None)
        x = _x(4, 6, dtype=B)
        assert float(F.softmax(x, -1)[0, 0]) != 7
        with policy.active(lp.recipe("bf16"), "cpu"):
            assert float(F.softmax(x, -1)[0, 0]) == 7
            assert torch.equal(F.softmax(x, 0), F.softmax(x.float(), 0))
        with policy.active(lp.recipe("bf16 ops=softmax->low"), "cpu"):
            assert F.softmax(x, -1).dtype == B and float(F.softmax(x, -1)[0, 0]) != 7
    finally:
        policy.unregister(op)
        if before is not None:
            policy.register(op, before)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 16)
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 8)
        self.recipe = lp.recipe("bf16")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with policy.active(self.recipe, "cpu"):
            x = self.embed(tokens)
            q = self.norm(x)
            x = x + F.scaled_dot_product_attention(q, q, q)
            return F.softmax(self.down(F.gelu(self.up(x))), -1)


@pytest.fixture
def model() -> Iterator[Tiny]:
    torch.manual_seed(0)
    yield Tiny()


def test_compiled_is_eager(model: Tiny) -> None:
    tokens = torch.arange(8).reshape(2, 4)
    eager = model(tokens)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(tokens)
    assert compiled.dtype == torch.float32 and torch.equal(eager, compiled)
    assert policy.current() is None
    compiled.sum().backward()
    graphs: list[torch.fx.GraphModule] = []

    def inspect(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with policy.active(lp.recipe("bf16"), "cpu"):  # compiled inside a policy that eager code entered
        assert torch.compile(lambda x: F.softmax(x, -1), backend=inspect)(_x(2, 2, dtype=B)).dtype == torch.float32


def test_checkpointed_recomputation_follows_the_same_policy() -> None:
    seen: list[torch.dtype] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        y = F.softmax(x @ x, -1)
        seen.append(y.dtype)
        return y

    x = _x(4, 4).requires_grad_()
    with policy.active(lp.recipe("bf16"), "cpu"), set_checkpoint_early_stop(False):
        y = checkpoint(block, x, use_reentrant=False)
    assert policy.current() is None
    y.sum().backward()
    assert seen == [torch.float32, torch.float32]


def test_an_error_inside_leaves_no_policy_behind() -> None:
    with pytest.raises(RuntimeError, match="boom"), policy.active(lp.recipe("bf16"), "cpu"):
        raise RuntimeError("boom")
    assert policy.current() is None


def test_trace(model: Tiny) -> None:
    trace = lp.trace_policy(model, torch.arange(8).reshape(2, 4))
    rows = {row.op: row for row in trace.rows}
    assert (rows["linear"].inputs, rows["linear"].compute, rows["linear"].output) == ("bf16 fp32", "bf16", "bf16")
    assert rows["linear"].module == "down" and rows["linear"].rule == "low: op table"
    assert (rows["softmax"].inputs, rows["softmax"].compute, rows["softmax"].output) == ("bf16", "fp32", "fp32")
    assert (rows["layer_norm"].compute, rows["layer_norm"].output) == ("fp32 inside", "bf16")
    assert rows["embedding"].rule.startswith("no rule") and rows["embedding"].output == "fp32"
    assert rows["add"].inputs == "fp32 bf16"
    assert model.training and "softmax" in str(trace) and trace.to_dict()["rows"]
    assert lp.trace_policy(nn.Linear(2, 2), _x(1, 2)).rows[-1].rule.startswith("no rule")


def test_trace_shows_your_rule_and_emulated_fp16() -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with policy.active(lp.recipe("fp16 ops=exp->low"), "cpu"):
                return (x @ x).exp()

    product, exponential = lp.trace_policy(Net(), (_x(3, 3),)).rows
    assert product.compute == "fp16 as fp32" and product.output == "fp16"
    assert exponential.rule == "low: your rule" and exponential.compute == "fp16"

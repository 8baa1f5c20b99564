"""Which op may run in which precision: one table, the same on every device. No torch here.

The rules:

* ``low``     operands are cast to the recipe's compute dtype, sums run in fp32, the result is in the compute dtype.
              Products belong here, and what only picks or scales values: pooling, ReLU, GELU.
* ``fp32``    operands are cast to fp32 and the result is fp32: softmax, losses, exp, log, powers, sums, tensor norms.
              A sum of 4096 bf16 numbers near 1 stops growing at 256; an exp of a bf16 number is off by up to 0.4%.
* ``inside``  computed in fp32, whatever comes in, the result rounded once to the compute dtype: normalisation layers.
* ``given``   runs in the dtypes it is given, as an op that stands in no row does. Only an override says this.

torch's own autocast has such lists too, but another one for each device: on a CPU it leaves softmax, layer_norm, exp,
log, pow, sum, norm and cumsum in bf16 that its GPU list puts in fp32. The same script follows the same rules here.

A user's own rules go into a recipe: ``ops=softmax->low|exp->given``. In-place forms (``x.exp_()``) keep the dtype of
what they write to, on every device.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lowprec.errors import unknown_name

__all__ = ["RULES", "TABLE", "OpRule", "families", "rule_of"]

RULES = ("low", "fp32", "inside", "given")

# rule -> families, each a line of the documentation -> ops (aten names; every overload of a name follows its rule)
_FAMILIES: dict[str, dict[str, str]] = {
    "low": {
        "products": "linear matmul mm bmm addmm baddbmm addbmm addmv mv dot vdot bilinear chain_matmul "
        "linalg_multi_dot",
        "convolutions": "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc",
        "attention": "scaled_dot_product_attention",
        "pooling": "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d "
        "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d "
        "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d",
        "activations": "relu gelu silu",
    },
    "fp32": {
        "softmax": "softmax log_softmax special_softmax special_log_softmax logsumexp softplus",
        "losses": "cross_entropy_loss nll_loss nll_loss2d nll_loss_nd mse_loss l1_loss smooth_l1_loss huber_loss "
        "binary_cross_entropy binary_cross_entropy_with_logits kl_div poisson_nll_loss cosine_embedding_loss "
        "hinge_embedding_loss margin_ranking_loss multi_margin_loss multilabel_margin_loss soft_margin_loss "
        "triplet_margin_loss ctc_loss",
        "powers and logarithms": "exp exp2 expm1 log log2 log10 log1p pow reciprocal rsqrt erfinv sinh cosh tan "
        "asin acos",
        "sums": "sum prod cumsum cumprod mean var std var_mean std_mean",
        "norms of tensors": "norm linalg_vector_norm linalg_matrix_norm linalg_norm frobenius_norm nuclear_norm dist "
        "cdist renorm cosine_similarity pdist",
    },
    "inside": {
        "normalisation": "layer_norm group_norm batch_norm instance_norm rms_norm",
    },
}
TABLE: dict[str, str] = {
    op: rule for rule, families in _FAMILIES.items() for ops in families.values() for op in ops.split()
}


def families() -> list[tuple[str, str, tuple[str, ...]]]:
    """The table for people: (rule, family, ops)."""
    return [(rule, name, tuple(ops.split())) for rule, lines in _FAMILIES.items() for name, ops in lines.items()]


@dataclass(frozen=True)
class OpRule:
    """A user's own rule for one op: its aten name ("softmax") and "low", "fp32", "inside" or "given".

    >>> OpRule.parse("softmax->low")
    OpRule(op='softmax', rule='low')
    """

    op: str
    rule: str

    def __post_init__(self) -> None:
        if self.op not in TABLE:
            raise unknown_name("op", self.op, sorted(TABLE))
        if self.rule not in RULES:
            raise unknown_name(f"rule for {self.op}", self.rule, RULES)

    def __str__(self) -> str:
        return f"{self.op}->{self.rule}"

    @classmethod
    def parse(cls, text: str) -> OpRule:
        """The rule a word describes."""
        match = re.fullmatch(r"(\w+)->(\w+)", text)
        if match is None:
            raise ValueError(f"a rule for an op is written OP->RULE, got {text!r}")
        return cls(*match.groups())


def rule_of(op: str, overrides: tuple[OpRule, ...] = ()) -> tuple[str, str]:
    """The rule of an op and who made it: "your rule", "op table" or, for an op in no row, "no rule".

    >>> rule_of("softmax"), rule_of("add")
    (('fp32', 'op table'), ('given', 'no rule'))
    """
    for override in overrides:
        if override.op == op:
            return override.rule, "your rule"
    return (TABLE[op], "op table") if op in TABLE else ("given", "no rule")

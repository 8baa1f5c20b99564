"""Embedding tables: lookups, with nothing to cast, but stored as the recipe says.

A lookup has no product, so no recipe casts it: it copies rows. What a recipe can change is how the table is stored
(`Recipe.weights`), and then a row is read in the compute dtype. A table in 8 bits is read a row at a time; its gradient
goes to the gradient store that comes with such weights.
"""

from __future__ import annotations

from torch import Tensor, nn

from lowprec.handlers import ModuleState, Row, Site, handles
from lowprec.linear import stored

__all__ = ["LowPrecEmbedding"]


@handles(nn.Embedding)
class LowPrecEmbedding(nn.Embedding):
    """`nn.Embedding` whose table is stored in 8 bits."""

    _lowprec: ModuleState

    @staticmethod
    def lowprec_plan(site: Site) -> Row | str:
        """The row of a table."""
        if site.recipe.weights != "fp8" or site.recipe.embeddings == "fp32":
            return "a lookup: no product to cast"
        return site.row(LowPrecEmbedding, carrier="rows read from 8 bits", output="-", grad_input="-", grad_weight="-")

    def forward(self, input: Tensor) -> Tensor:
        if self.weight.element_size() > 1:
            return super().forward(input)
        return nn.functional.embedding(
            input, stored(self.weight), self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq
        )

"""`nn.MultiheadAttention`: its projections through the recipe's products.

The module keeps the three input projections as one parameter and reads the output projection's weight without calling
that layer, so handling `nn.Linear` alone would leave all four in high precision. Here the input projections are
products of their own (one, where query, key and value are the same tensor), the output projection is called as the
layer it is, and what lies between is plain torch under the op policy.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowprec.handlers import Row, Site, handles
from lowprec.linear import LinearLike, plan_linear

__all__ = ["LowPrecMultiheadAttention"]


@handles(nn.MultiheadAttention)
class LowPrecMultiheadAttention(LinearLike, nn.MultiheadAttention):
    """`nn.MultiheadAttention` with the casts of its recipe in all four projections."""

    @classmethod
    def lowprec_plan(cls, site: Site) -> Row | str:
        """The row; a module with parts that are not handled says which."""
        module = site.module
        assert isinstance(module, nn.MultiheadAttention)
        for what, there in (("bias_k and bias_v", module.bias_k is not None), ("add_zero_attn", module.add_zero_attn)):
            if there:
                return f"MultiheadAttention with {what} is not handled: its projections stay as they are."
        if not module._qkv_same_embed_dim:
            return "MultiheadAttention with kdim or vdim of their own is not handled: its projections stay as they are."
        return plan_linear(site, cls)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        batched = query.dim() == 3
        if not batched:
            query, key, value = (t.unsqueeze(0 if self.batch_first else 1) for t in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        q, k, v = self._projections(query, key, value)
        if not self.batch_first:
            q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        batch, targets, _ = q.shape
        q, k, v = (t.reshape(batch, t.shape[1], self.num_heads, self.head_dim).transpose(1, 2) for t in (q, k, v))
        mask = self._mask(q, k, key_padding_mask, attn_mask, is_causal)
        dropout = self.dropout if self.training else 0.0
        weights: Tensor | None = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) * self.head_dim**-0.5
            weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
            weights = nn.functional.dropout(weights, dropout)
            mixed = weights.to(v.dtype) @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, mask, dropout)
        output = self.out_proj(mixed.transpose(1, 2).reshape(batch, targets, self.embed_dim))
        output = output if self.batch_first else output.transpose(0, 1)
        if not batched:
            output = output.squeeze(0 if self.batch_first else 1)
            weights = None if weights is None else weights.squeeze(0)
        return output, weights

    def _projections(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert self.in_proj_weight is not None
        if query is key and key is value:
            q, k, v = self.lowprec_linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1)
            return q, k, v
        weights = self.in_proj_weight.chunk(3)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        inputs = (query, key, value)
        q, k, v = (self.lowprec_linear(x, w, b) for x, w, b in zip(inputs, weights, biases))
        return q, k, v

    def _mask(
        self, q: Tensor, k: Tensor, padding: Tensor | None, attention: Tensor | None, causal: bool
    ) -> Tensor | None:
        """One additive mask of the scores' dtype, or None."""
        if causal and attention is None:
            raise ValueError("is_causal is a hint about attn_mask: MultiheadAttention needs that mask too.")
        made = None
        for mask, shape in ((padding, (q.shape[0], 1, 1, k.shape[-2])), (attention, None)):
            if mask is None:
                continue
            if mask.dtype == torch.bool:
                mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(mask, float("-inf"))
            if shape is not None:
                mask = mask.view(shape)
            elif mask.dim() == 3:
                mask = mask.view(-1, self.num_heads, *mask.shape[-2:])
            mask = mask.to(q.dtype)
            made = mask if made is None else made + mask
        return made

"""LSTM, GRU and RNN layers: the products of every cell under the recipe, the state in fp32.

    gates_t = x_t @ w_ih^T + b_ih  +  h_{t-1} @ w_hh^T + b_hh        two products a step and layer
    the gates' functions, c_t and the mixing with h_{t-1}             fp32
    h_t, which is what leaves the layer                               compute dtype

The products with the input of all steps are one product; those with the state run step by step, each operand cast as
a linear layer's. What accumulates over time (c of an LSTM, h of a GRU) stays in fp32 within a sequence: rounding it at
every step would lose small updates as 16-bit weights do. A layer's output and h_n have the compute dtype, c_n is fp32.

All of torch's options work: several layers, both directions, projections, dropout, batch_first, inputs without a batch,
and packed sequences (a padded batch is a packed one whose steps all have the same size). Delayed scaling is not kept
for each step and gate; those casts take the current scale instead, and the plan says so.

``rnn="high"`` in a recipe runs torch's own layer in fp32.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from lowprec.handlers import ModuleState, Row, Site, handles
from lowprec.linear import Memory, Spec, apply_linear
from lowprec.products import COMPUTE

__all__ = ["LowPrecGRU", "LowPrecGRUCell", "LowPrecLSTM", "LowPrecLSTMCell", "LowPrecRNN", "LowPrecRNNCell"]

Product = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]


def _cell(mode: str, x: Tensor, h: Tensor, c: Tensor | None, gates: Tensor) -> tuple[Tensor, Tensor | None]:
    """One step in fp32: the gates' input part x and state part, the state before, and the state after."""
    x, gates = x.float(), gates.float()
    if mode == "LSTM":
        assert c is not None
        i, f, g, o = (x + gates).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c
    if mode == "GRU":
        (xr, xz, xn), (hr, hz, hn) = x.chunk(3, 1), gates.chunk(3, 1)
        z = torch.sigmoid(xz + hz)
        n = torch.tanh(xn + torch.sigmoid(xr + hr) * hn)
        return n + z * (h - n), None
    total = x + gates
    return (torch.relu(total) if mode == "RNN_RELU" else torch.tanh(total)), None


def _sequence(
    module: Any,
    names: tuple[str, ...],
    data: Tensor,
    sizes: list[int],
    h: Tensor,
    c: Tensor | None,
    reverse: bool,
    product: Product,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """One layer in one direction over packed steps: its output, and the last states."""
    w_ih, w_hh, b_ih, b_hh, w_hr = (getattr(module, n, None) for n in names)
    inputs = product(data, w_ih, b_ih).split(sizes)  # type: ignore[arg-type, no-untyped-call]
    outputs: list[Tensor] = [data] * len(sizes)
    steps = range(len(sizes))
    h, c = h.float(), None if c is None else c.float()
    for t in reversed(steps) if reverse else steps:
        n = sizes[t]
        gates = product(h[:n], w_hh, b_hh)  # type: ignore[arg-type]
        new, cell = _cell(module.mode, inputs[t], h[:n], None if c is None else c[:n], gates)
        if w_hr is not None:
            new = product(new, w_hr, None).float()
        outputs[t] = new
        h = new if n == h.shape[0] else torch.cat([new, h[n:]])
        if c is not None and cell is not None:
            c = cell if n == c.shape[0] else torch.cat([cell, c[n:]])
    return torch.cat(outputs), h, c


def _layers(
    module: Any, data: Tensor, sizes: list[int], h0: Tensor, c0: Tensor | None, product: Product, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """All layers and directions: the output in the compute dtype, and the stacked last states."""
    hs, cs = [], []
    directions = ("", "_reverse") if module.bidirectional else ("",)
    for layer in range(module.num_layers):
        made = []
        for d, suffix in enumerate(directions):
            index = layer * len(directions) + d
            names = tuple(
                f"{n}_l{layer}{suffix}" for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
            )
            c = None if c0 is None else c0[index]
            out, h, c = _sequence(module, names, data, sizes, h0[index], c, d == 1, product)
            made.append(out.to(dtype))
            hs.append(h)
            cs.append(c)
        data = torch.cat(made, -1)
        if module.dropout and module.training and layer < module.num_layers - 1:
            data = torch.dropout(data, module.dropout, True)
    states = [c for c in cs if c is not None]
    return data, torch.stack(hs).to(dtype), torch.stack(states) if states else None


def _run(module: Any, input: Any, hx: Any) -> Any:
    """`nn.RNNBase.forward` over `_layers`: batches in, batches out."""
    product, dtype = _product(module)
    lstm = module.mode == "LSTM"
    packed = isinstance(input, PackedSequence)
    batched = packed or input.dim() == 3
    if packed:
        data, sizes = input.data, input.batch_sizes.tolist()
        order = input.sorted_indices
    else:
        x = input if batched else input.unsqueeze(0 if module.batch_first else 1)
        x = x.transpose(0, 1) if module.batch_first else x
        data, sizes, order = x.reshape(-1, x.shape[-1]), [x.shape[1]] * x.shape[0], None
    count = module.num_layers * (2 if module.bidirectional else 1)
    given = hx if lstm and hx is not None else (hx,)
    widths = (module.proj_size or module.hidden_size, module.hidden_size)
    states = []
    for state, width in zip(given if hx is not None else (None, None), widths):
        if state is None:
            state = torch.zeros(count, sizes[0], width, device=data.device)
        state = state if batched or state.dim() == 3 else state.unsqueeze(1)
        if state.shape != (count, sizes[0], width):
            raise RuntimeError(f"Expected hidden size {(count, sizes[0], width)}, got {list(state.shape)}")
        states.append(state if order is None else state.index_select(1, order))
    h: Tensor | None
    data, h, c = _layers(module, data, sizes, states[0], states[1] if lstm else None, product, dtype)
    if packed:
        output: Any = PackedSequence(data, input.batch_sizes, input.sorted_indices, input.unsorted_indices)
        if input.unsorted_indices is not None:
            h, c = (None if s is None else s.index_select(1, input.unsorted_indices) for s in (h, c))
    else:
        output = data.view(len(sizes), sizes[0], -1)
        output = output.transpose(0, 1) if module.batch_first else output
        if not batched:
            output, h = output.squeeze(0 if module.batch_first else 1), h.squeeze(1)
            c = None if c is None else c.squeeze(1)
    return output, ((h, c) if lstm else h)


def _product(module: Any) -> tuple[Product, torch.dtype]:
    """A linear layer under the module's recipe, and the dtype of its result."""
    state: ModuleState = module._lowprec
    device = next(module.parameters()).device.type
    spec = Spec.of(state.recipe.replace(delayed=None), device)
    memory = Memory(None, state.extra["seed"], state.extra["step"], state.observer)

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return apply_linear(x, weight, bias, spec, memory, advance=module.training)

    return product, COMPUTE[state.recipe.compute]


def _high(base: type[nn.Module], module: nn.Module, *arguments: Any) -> Any:
    """torch's own layer in fp32, whatever policy is on."""
    wide = tuple(_float(a) for a in arguments)
    with torch._C._DisableAutocast():
        return base.forward(module, *wide)


def _float(value: Any) -> Any:
    if isinstance(value, PackedSequence):
        return value._replace(data=value.data.float())
    if isinstance(value, tuple):
        return tuple(_float(v) for v in value)
    return value.float() if isinstance(value, Tensor) else value


def _plan(site: Site, handler: type[nn.Module]) -> Row | str:
    recipe = site.recipe
    if recipe.rnn == "high" and recipe.compute in ("bf16", "fp16"):
        words = dict.fromkeys(("output", "grad_input", "grad_weight"), "fp32 x fp32")
        return site.row(handler, carrier="torch's own layer in fp32", note="rnn=high", **words)
    if not recipe.quantized and recipe.compute not in ("tf32", "fp16"):
        return f"no cast to make: runs in {recipe.compute} by the op policy"
    note = "current scales instead of delayed ones" if recipe.delayed is not None else ""
    return site.row(handler, carrier="products of its cells as a linear layer's; state in fp32", note=note)


class _Mixin:
    lowprec_products = True
    _lowprec: ModuleState

    def lowprec_setup(self: Any) -> None:
        """A random stream; nothing else is kept."""
        state = self._lowprec
        state.extra["seed"] = zlib.crc32(state.name.encode())
        state.extra["step"] = torch.zeros((), dtype=torch.int64)


class _Layer(_Mixin):
    """The forward pass of the three kinds of layers."""

    def forward(self: Any, input: Any, hx: Any = None) -> Any:
        if self._lowprec.recipe.rnn == "high":
            return _high(self._lowprec.original, self, input, hx)
        return _run(self, input, hx)


class _Cell(_Mixin):
    """The forward pass of the three kinds of cells: one step."""

    def forward(self: Any, input: Tensor, hx: Any = None) -> Any:
        if self._lowprec.recipe.rnn == "high":
            return _high(self._lowprec.original, self, input, hx)
        product, dtype = _product(self)
        batched = input.dim() == 2
        x = input if batched else input.unsqueeze(0)
        lstm = isinstance(self, nn.LSTMCell)
        mode = "LSTM" if lstm else "GRU" if isinstance(self, nn.GRUCell) else f"RNN_{self.nonlinearity.upper()}"
        given = [hx] if hx is not None and not lstm else list(hx or ())
        states = [(s if batched else s.unsqueeze(0)).float() for s in given]
        states = states or [torch.zeros(x.shape[0], self.hidden_size, device=x.device)] * (2 if lstm else 1)
        inputs = product(x, self.weight_ih, self.bias_ih)
        gates = product(states[0], self.weight_hh, self.bias_hh)
        h, c = _cell(mode, inputs, states[0], states[1] if lstm else None, gates)
        h = (h if batched else h.squeeze(0)).to(dtype)
        if c is None:
            return h
        return h, (c if batched else c.squeeze(0))


def _class(name: str, mixin: type, base: type[nn.Module]) -> type[nn.Module]:
    made: Any = type(name, (mixin, base), {"__module__": __name__, "__doc__": f"`nn.{base.__name__}` with casts."})
    made.lowprec_plan = staticmethod(lambda site: _plan(site, made))
    handler: type[nn.Module] = handles(base)(made)
    return handler


LowPrecLSTM = _class("LowPrecLSTM", _Layer, nn.LSTM)
LowPrecGRU = _class("LowPrecGRU", _Layer, nn.GRU)
LowPrecRNN = _class("LowPrecRNN", _Layer, nn.RNN)
LowPrecLSTMCell = _class("LowPrecLSTMCell", _Cell, nn.LSTMCell)
LowPrecGRUCell = _class("LowPrecGRUCell", _Cell, nn.GRUCell)
LowPrecRNNCell = _class("LowPrecRNNCell", _Cell, nn.RNNCell)

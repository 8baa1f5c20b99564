"""A model as shapes alone: what a plan needs of one that is too large, or not here.

Everything is on the meta device, so 70 billion parameters cost nothing. Three sources:

* sizes: layers, hidden width, vocabulary; the width of the MLP follows from the number of parameters;
* a safetensors file (or a folder of them, or its index): every ``a.b.weight`` becomes a layer by its shape and name,
  which is what handlers and globs look at;
* ``config.json`` beside it, for heads and context.
"""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["Sizes", "from_safetensors", "from_sizes", "sizes_of"]


@dataclass(frozen=True)
class Sizes:
    """What activations depend on.

    Args:
        layers, hidden, vocab, context: of the transformer.
        mlp: inner width of the MLP.
        gated: whether the MLP has a gate beside its up projection.
    """

    layers: int
    hidden: int
    vocab: int
    context: int
    mlp: int
    gated: bool = False


class _Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(sizes.hidden)
        self.qkv = nn.Linear(sizes.hidden, 3 * sizes.hidden, bias=False)
        self.out = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.norm2 = nn.LayerNorm(sizes.hidden)
        self.up = nn.Linear(sizes.hidden, sizes.mlp, bias=False)
        self.down = nn.Linear(sizes.mlp, sizes.hidden, bias=False)


class _Transformer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocab, sizes.hidden)
        self.blocks = nn.ModuleList(_Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.hidden)
        self.lm_head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)


def from_sizes(parameters: float, layers: int, hidden: int, vocab: int, context: int) -> tuple[nn.Module, Sizes]:
    """A transformer of that many parameters on the meta device.

    Raises:
        ValueError: where layers and hidden width alone have more parameters than asked for.
    """
    fixed = 2 * vocab * hidden + layers * 4 * hidden * hidden
    mlp = round((parameters - fixed) / (2 * layers * hidden))
    if mlp < 1:
        raise ValueError(
            f"{layers} layers of width {hidden} with a vocabulary of {vocab} have {fixed:.3g} parameters without any "
            f"MLP, more than {parameters:.3g}; check --params, --layers, --hidden and --vocab."
        )
    sizes = Sizes(layers, hidden, vocab, context, mlp)
    with torch.device("meta"):
        return _Transformer(sizes), sizes


# -- from a file -------------------------------------------------------------------------------------------------------


def _header(path: Path) -> dict[str, list[int]]:
    """Names and shapes in a safetensors file, without reading any tensor."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > 200_000_000:
                raise ValueError
            header = json.loads(file.read(length))
    except OSError as error:
        raise OSError(f"{path} could not be read: {(error.strerror or str(error)).lower()}.") from error
    except (ValueError, struct.error):
        raise ValueError(f"{path} is not a safetensors file.") from None
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        found = sorted(path.glob("*.safetensors"))
        if not found:
            raise FileNotFoundError(f"{path} holds no .safetensors file.")
        return found
    if path.name.endswith(".index.json"):
        return sorted({path.parent / name for name in json.loads(path.read_text())["weight_map"].values()})
    return [path]


def from_safetensors(path: Path, config: Path | None) -> tuple[nn.Module, Sizes | None]:
    """A model of layers with the names and shapes of a safetensors file, and its sizes where a config is there."""
    shapes: dict[str, list[int]] = {}
    for file in _files(path):
        shapes |= _header(file)
    own: dict[str, dict[str, list[int]]] = defaultdict(dict)
    for name, shape in shapes.items():
        module, _, parameter = name.rpartition(".")
        own[module][parameter] = shape
    root = nn.Module()
    with torch.device("meta"):
        for module, parameters in own.items():
            _place(root, module, _layer(module, parameters))
    config = config or (path if path.is_dir() else path.parent) / "config.json"
    return root, sizes_of(json.loads(config.read_text()), shapes) if config.exists() else None


def _layer(name: str, parameters: dict[str, list[int]]) -> nn.Module:
    """The layer that a module's parameters make."""
    weight = parameters.get("weight")
    known = set(parameters) <= {"weight", "bias"}
    if known and weight is not None and len(weight) == 2:
        if "emb" in name or name.endswith(("wte", "wpe")):
            return nn.Embedding(weight[0], weight[1])
        return nn.Linear(weight[1], weight[0], bias="bias" in parameters)
    if known and weight is not None and len(weight) == 4:
        return nn.Conv2d(weight[1], weight[0], (weight[2], weight[3]), bias="bias" in parameters)
    if known and weight is not None and len(weight) == 1:
        return nn.LayerNorm(weight[0], bias="bias" in parameters)
    made = nn.Module()
    for parameter, shape in parameters.items():
        made.register_parameter(parameter.replace(".", "_"), nn.Parameter(torch.empty(shape)))
    return made


def _place(root: nn.Module, name: str, layer: nn.Module) -> None:
    *above, last = name.split(".") if name else ["all"]
    at = root
    for part in above:
        if part not in at._modules:
            at.add_module(part, nn.Module())
        at = at._modules[part]  # type: ignore[assignment]
    if last in at._modules:
        for child, module in at._modules[last]._modules.items():  # type: ignore[union-attr]
            layer.add_module(child, module)
    at.add_module(last, layer)


def sizes_of(config: dict[str, Any], shapes: dict[str, list[int]] | None = None) -> Sizes | None:
    """The sizes in a transformers config.json, under the names different models give them."""

    def first(*names: str) -> int | None:
        return next((int(config[n]) for n in names if config.get(n)), None)

    hidden, layers = first("hidden_size", "n_embd", "d_model"), first("num_hidden_layers", "n_layer", "num_layers")
    if hidden is None or layers is None:
        return None
    mlp = first("intermediate_size", "n_inner", "d_ff") or 4 * hidden
    gated = any("gate" in name for name in shapes or {})
    context = first("max_position_embeddings", "n_positions", "n_ctx") or 2048
    return Sizes(layers, hidden, first("vocab_size") or 32000, context, mlp, gated)

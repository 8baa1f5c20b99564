"""Optimizers whose states, masters and weights live in the formats they are told to.

`SGD`, `Adam`, `AdamW`, `Lion`, `Adafactor` and `Muon` are each a rule on one mechanism (`lowprec.optim.base`): the
settings of AnyPrecision (bf16 moments, Kahan), MS-AMP (fp8 and fp16 moments) and 8-bit Adam are arguments here, not
optimizers of their own. `from_torch` turns a torch optimizer into one of these.
"""

from __future__ import annotations

from lowprec.optim.adafactor import Adafactor
from lowprec.optim.adam import Adam
from lowprec.optim.adamw import AdamW
from lowprec.optim.base import LowPrecOptimizer
from lowprec.optim.convert import from_torch, load_torch_state, torch_state
from lowprec.optim.lion import Lion
from lowprec.optim.muon import Muon
from lowprec.optim.sgd import SGD

__all__ = [
    "SGD",
    "Adafactor",
    "Adam",
    "AdamW",
    "Lion",
    "LowPrecOptimizer",
    "Muon",
    "from_torch",
    "load_torch_state",
    "torch_state",
]

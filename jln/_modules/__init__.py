"""What the modules share: a framework's call put in the operators' terms, or the reason why it cannot be.

A module overrides nothing of its framework's class but the call. It describes the call to `prepared`, which answers
with a `Deferred` norm, ready for the operators, or with a sentence that says why the framework's own code must run.
Every call notes the answer, and so `explain` tells what a call does by making one.
"""

from __future__ import annotations

from jln._modules.arguments import Gate, Products, Summed, axes, summed, taken
from jln._modules.calls import (
    Fused,
    computed,
    deferred,
    fused,
    layers_computed,
    linears_computed,
    named,
    pair,
    prepared,
)
from jln._modules.norms import Deferred, Linear, NoArray

__all__ = [
    "Deferred",
    "Fused",
    "Gate",
    "Linear",
    "NoArray",
    "Products",
    "Summed",
    "axes",
    "computed",
    "deferred",
    "fused",
    "layers_computed",
    "linears_computed",
    "missing",
    "named",
    "pair",
    "prepared",
    "summed",
    "taken",
]


def missing(module: str, framework: str, extra: str) -> str:
    """The message of a module's ImportError."""
    return f'{module} needs {framework}: pip install "jln[{extra}]"'

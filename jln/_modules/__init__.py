"""The common part of all modules: a framework's call put in the operators' terms, or the reason why it cannot be.

A module overrides nothing of its framework's class but the call. It describes the call to `prepared`, which answers
with a `Prepared` norm, ready for the operators, or with a sentence that says why the framework's own code must run.
Every call notes the answer, and so `explain` tells what a call does by making one.
"""

from __future__ import annotations

from jln._modules.arguments import Gate, Products, Summed, axes, summed, taken
from jln._modules.calls import (
    Fused,
    computed,
    fused,
    layers_computed,
    named,
    noted,
    pair,
    prepared,
)
from jln._modules.norms import Linear, Prepared

__all__ = [
    "Fused",
    "Gate",
    "Linear",
    "Prepared",
    "Products",
    "Summed",
    "axes",
    "computed",
    "fused",
    "layers_computed",
    "missing",
    "named",
    "noted",
    "pair",
    "prepared",
    "summed",
    "taken",
]


def missing(module: str, framework: str, extra: str) -> str:
    """The message of a module's ImportError."""
    return f'{module} needs {framework}: pip install -e ".[{extra}]" in a clone of jln'

"""The common part of all modules: a framework's call put in the operators' terms, or the reason why it cannot be.

A module overrides nothing of its framework's class but the call. It describes the call to `prepare`, which answers
with a `Prepared` norm, ready for the operators, or with a sentence that says why the framework's own code must run.
Every call notes the answer, and so `explain` tells what a call does by making one.
"""

from __future__ import annotations

from jln._modules.arguments import Gate, Inputs, Products, axes, summed, taken
from jln._modules.calls import (
    Fused,
    compute_layers,
    compute_norm,
    fused,
    named,
    pair,
    prepare,
    run_plain,
)
from jln._modules.norms import Linear, Prepared

__all__ = [
    "Fused",
    "Gate",
    "Inputs",
    "Linear",
    "Prepared",
    "Products",
    "axes",
    "compute_layers",
    "compute_norm",
    "fused",
    "missing",
    "named",
    "pair",
    "prepare",
    "run_plain",
    "summed",
    "taken",
]


def missing(module: str, framework: str, extra: str) -> str:
    """The message of a module's ImportError."""
    return f'{module} needs {framework}: pip install -e ".[{extra}]" in a clone of jln'

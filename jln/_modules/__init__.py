"""The common part of all modules: a framework's call put in the operators' terms, or the reason why it cannot be.

A module overrides nothing of its framework's class but the call, and hands it to its `Adapter`, which knows how the
framework's layers are read. The walk from there is the same for all: the call's arguments are checked, the norm is
prepared for the operators, or a sentence says why the framework's own code must run. Every call notes which, and so
`explain` tells what a call does by making one.
"""

from __future__ import annotations

from jln._modules.adapter import Adapter, axes, named
from jln._modules.norms import Linear, Prepared, prepare

__all__ = [
    "Adapter",
    "Linear",
    "Prepared",
    "axes",
    "missing",
    "named",
    "prepare",
]


def missing(module: str, framework: str, extra: str) -> str:
    """The message of a module's ImportError."""
    return f'{module} needs {framework}: pip install -e ".[{extra}]" in a clone of jln'

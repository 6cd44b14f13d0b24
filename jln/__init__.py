"""LayerNorm and RMSNorm for JAX, as custom_vjp operators whose rules are Triton kernels on NVIDIA GPUs."""

import importlib
from typing import Any

from jln import _operators, reference
from jln._core.derivatives import PRODUCT, STATISTICS
from jln._explain import Route, explain
from jln._fuse.transformation import fuse
from jln._operators import *  # noqa: F403

__all__ = ["PRODUCT", "STATISTICS", "Route", "explain", "fuse", "reference"]
__all__ += _operators.__all__
__version__ = "0.2.0"

_ON_DEMAND = ("checkpoint_policies", "equinox", "haiku", "linen", "nnx", "testing")


def __getattr__(name: str) -> Any:
    """Import the modules beside the operators, which may need a framework, when they are asked for."""
    if name in _ON_DEMAND:
        return importlib.import_module(f"jln.{name}")
    raise AttributeError(f"module 'jln' has no attribute {name!r}")

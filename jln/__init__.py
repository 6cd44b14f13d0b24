"""LayerNorm and RMSNorm for JAX, as custom_vjp operators whose rules are Triton kernels on NVIDIA GPUs."""

import importlib
from typing import Any

from jln import reference
from jln._core.derivatives import PRODUCT, STATISTICS
from jln._explain import Route, explain
from jln._fuse.transformation import fuse
from jln._operators import (
    Float8,
    MXFloat8,
    Quantized,
    Scaled,
    add_layer_norm,
    add_layer_norm_linear,
    add_rms_norm,
    add_rms_norm_linear,
    layer_norm,
    layer_norm_add,
    layer_norm_linear,
    rms_norm,
    rms_norm_add,
    rms_norm_add_rms_norm,
    rms_norm_add_rms_norm_linear,
    rms_norm_gated,
    rms_norm_linear,
)

__all__ = [
    "PRODUCT",
    "STATISTICS",
    "Float8",
    "MXFloat8",
    "Quantized",
    "Route",
    "Scaled",
    "add_layer_norm",
    "add_layer_norm_linear",
    "add_rms_norm",
    "add_rms_norm_linear",
    "explain",
    "fuse",
    "layer_norm",
    "layer_norm_add",
    "layer_norm_linear",
    "reference",
    "rms_norm",
    "rms_norm_add",
    "rms_norm_add_rms_norm",
    "rms_norm_add_rms_norm_linear",
    "rms_norm_gated",
    "rms_norm_linear",
]
__version__ = "0.2.0"

_ON_DEMAND = ("checkpoint_policies", "equinox", "haiku", "linen", "nnx", "testing")


def __getattr__(name: str) -> Any:
    """Import the modules beside the operators, which may need a framework, when they are asked for."""
    if name in _ON_DEMAND:
        return importlib.import_module(f"jln.{name}")
    raise AttributeError(f"module 'jln' has no attribute {name!r}")

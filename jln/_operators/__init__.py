"""The public operators: a signature and its docstring each, and one call of the junction."""

from jln._operators.eight_bits import Float8, MXFloat8, Quantized, Scaled
from jln._operators.linears import (
    add_layer_norm_linear,
    add_rms_norm_linear,
    layer_norm_linear,
    rms_norm_add_rms_norm_linear,
    rms_norm_linear,
)
from jln._operators.norms import layer_norm, layer_norm_add, rms_norm, rms_norm_add, rms_norm_gated
from jln._operators.sums import add_layer_norm, add_rms_norm, rms_norm_add_rms_norm

__all__ = [
    "Float8",
    "MXFloat8",
    "Quantized",
    "Scaled",
    "add_layer_norm",
    "add_layer_norm_linear",
    "add_rms_norm",
    "add_rms_norm_linear",
    "layer_norm",
    "layer_norm_add",
    "layer_norm_linear",
    "rms_norm",
    "rms_norm_add",
    "rms_norm_add_rms_norm",
    "rms_norm_add_rms_norm_linear",
    "rms_norm_gated",
    "rms_norm_linear",
]

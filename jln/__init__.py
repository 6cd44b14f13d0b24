"""LayerNorm and RMSNorm for JAX, as custom_vjp operators whose rules are Triton kernels on NVIDIA GPUs."""

from jln import reference
from jln.layer_norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from jln.layer_norm_linear import layer_norm_linear, rms_norm_linear

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "layer_norm",
    "layer_norm_linear",
    "reference",
    "rms_norm",
    "rms_norm_linear",
]
__version__ = "0.1.0"

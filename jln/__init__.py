"""LayerNorm and RMSNorm for JAX, as custom_vjp operators whose rules are Triton kernels on NVIDIA GPUs."""

from jln import reference
from jln.layer_norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm

__all__ = ["add_layer_norm", "add_rms_norm", "layer_norm", "reference", "rms_norm"]
__version__ = "0.1.0"

"""Flax Linen's LayerNorm and RMSNorm on jln's operators, and either of them fused with the Denses behind it.

    from jln.linen import LayerNorm, RMSNorm    # instead of: from flax.linen import LayerNorm, RMSNorm

Fields, parameters, initial values, automatic names and checkpoints are Flax's own: the classes are Flax's with another
call. A call that the operators cannot compute runs Flax's own code: one with `mask`, `axis_name`,
`force_float32_reductions=False`, or over other axes than the last. So does `init`. `jln.explain(layer, x)` tells which
of the two a call takes, and why. Results differ by rounding, and the variance is two-pass whatever `use_fast_variance`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen import initializers

from jln import _modules

__all__ = ["LayerNorm", "LayerNormDense", "RMSNorm", "RMSNormDense"]


class LayerNorm(nn.LayerNorm):
    """`flax.linen.LayerNorm` on `jln.layer_norm`: the same fields, parameters, results and errors."""

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None, residual: jax.Array | None = None) -> Any:
        """Return `y` of `x`'s shape, the norm of `x`; with a residual `(y, total)`, the norm of the sum and the sum.

        Args:
          x: `[..., H]`, or as `reduction_axes` and `feature_axes` say.
          mask: as of `flax.linen.LayerNorm`, whose code then runs.
          residual: `x`'s shape. The norm is of `total = x + residual`, which is made and read once.
        """
        own = functools.partial(super().__call__, mask=mask)
        return _modules.Layer(self, own, lambda x: _read_norm(self, x, mask)).call(x, residual)


class RMSNorm(nn.RMSNorm):
    """`flax.linen.RMSNorm` on `jln.rms_norm`: the same fields, parameters, results and errors."""

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None, residual: jax.Array | None = None) -> Any:
        """Return `y` of `x`'s shape, the norm of `x`; with a residual `(y, total)`, the norm of the sum and the sum.

        Args:
          x, mask, residual: those of a call of `LayerNorm`.
        """
        own = functools.partial(super().__call__, mask=mask)
        return _modules.Layer(self, own, lambda x: _read_norm(self, x, mask)).call(x, residual)


class _NormDense(nn.Module):
    """A norm named "norm", and behind it a `flax.linen.DenseGeneral` named "dense", or several by their own names."""

    features: int | Sequence[int] | Mapping[str, int | Sequence[int]]
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: nn.initializers.Initializer = nn.linear.default_kernel_init
    bias_init: nn.initializers.Initializer = initializers.zeros_init()
    epsilon: float = 1e-6
    use_scale: bool = True
    scale_init: nn.initializers.Initializer = initializers.ones

    def __post_init__(self) -> None:
        if isinstance(self.features, Mapping):  # of mappings Flax and JAX would compare and hash no order
            object.__setattr__(self, "features", tuple(_modules.linear_sizes(self.features, "").items()))
        super().__post_init__()

    @nn.compact
    def __call__(self, x: jax.Array, *, residual: jax.Array | None = None, quantize: Any = None) -> Any:
        """Return `y` `[..., *features]`, of several Denses a tuple in their order; with a residual `(y, total)`.

        Args:
          x: `[..., H]`.
          residual: as of the norm.
          quantize: as of `jln.layer_norm_linear`. An error where the operators cannot compute the call.
        """
        both = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        norm = self._norm(epsilon=self.epsilon, use_scale=self.use_scale, scale_init=self.scale_init, **both)
        options = {"use_bias": self.use_bias, "kernel_init": self.kernel_init, "bias_init": self.bias_init}
        several = isinstance(self.features, tuple) and any(isinstance(a, tuple) for a in self.features)
        sizes: Any = self.features if several else [("dense", self.features)]
        denses = [nn.DenseGeneral(n, precision=self.precision, name=name, **options, **both) for name, n in sizes]
        own = _modules.in_turn(norm, denses, several)
        read = functools.partial(_read_norm, norm), functools.partial(_read_denses, denses, several)
        layer = _modules.Layer(self, own, *read, in_init=self.is_initializing())
        return layer.call(x, residual, quantize)


class LayerNormDense(_NormDense):
    """A `LayerNorm` and the Dense behind it, `dense(norm(x))`, as one operator that keeps only `x` for the backward.

    Parameters and initial values are those of Flax's two layers, named "norm" and "dense" (a
    `flax.linen.DenseGeneral`). Several Denses may read one norm, under names of their own:

        layer = LayerNormDense({"q": 1024, "k": 256, "v": 256})  # parameters norm/scale, q/kernel, k/kernel ...
        q, k, v = layer.apply(variables, x)
        (q, k, v), total = layer.apply(variables, x, residual=residual)  # of total = x + residual

    As one operator the layers are not called: `nn.intercept_methods` and `capture_intermediates` see this layer alone.

    Attributes:
      features: int or tuple, the number of output features. For several Denses a mapping from each one's name to it.
      use_bias, precision, kernel_init, bias_init: of the Dense, or of each.
      epsilon, use_scale, scale_init: of the norm.
      use_offset, offset_init: the norm's `use_bias` and `bias_init`.
      dtype, param_dtype: of all layers.
    """

    use_offset: bool = True
    offset_init: nn.initializers.Initializer = initializers.zeros

    @nn.nowrap
    def _norm(self, **options: Any) -> LayerNorm:
        return LayerNorm(use_bias=self.use_offset, bias_init=self.offset_init, name="norm", **options)


class RMSNormDense(_NormDense):
    """An `RMSNorm` and the Dense behind it, as of `LayerNormDense` without `use_offset` and `offset_init`."""

    @nn.nowrap
    def _norm(self, **options: Any) -> RMSNorm:
        return RMSNorm(name="norm", **options)


def _read_norm(layer: LayerNorm | RMSNorm, x: jax.Array, mask: jax.Array | None = None) -> _modules.Norm | str:
    if mask is not None:
        return "mask is given"
    if layer.axis_name is not None:
        return f"statistics are averaged over the mesh axis {layer.axis_name!r}"
    if not layer.force_float32_reductions:
        return "force_float32_reductions=False: statistics in x's own dtype"
    if not all(_modules.is_last(axes, x) for axes in (layer.reduction_axes, layer.feature_axes)):
        return "the norm is not over the last axis alone"
    subtract_mean = isinstance(layer, LayerNorm)
    used = {"scale": layer.use_scale, "bias": subtract_mean and layer.use_bias}
    parameters = {name: nn.meta.unbox(layer.get_variable("params", name)) for name in used if used[name]}
    if any(a is None for a in parameters.values()):
        return "Flax's own code makes the parameters"
    scale, offset = (parameters.get(name) for name in used)
    return _modules.Norm(scale, offset, layer.epsilon, subtract_mean, layer.dtype)


def _read_denses(denses: Sequence[nn.DenseGeneral], several: bool, x: jax.Array) -> _modules.Linears | str:
    kernels, biases = [], []
    for dense in denses:
        parameters = nn.meta.unbox(dense.variables.get("params", {}))
        features = tuple(dense.features) if isinstance(dense.features, Sequence) else (dense.features,)
        shapes = {"kernel": (x.shape[-1], *features)} | ({"bias": features} if dense.use_bias else {})
        if {name: jnp.shape(a) for name, a in parameters.items()} != shapes:
            return "Flax's own code makes the parameters, or another library has made others"
        kernels.append(parameters["kernel"])
        biases.append(parameters.get("bias"))
    return _modules.Linears(kernels, biases, several, denses[0].dtype, denses[0].precision)

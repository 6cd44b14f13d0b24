"""Haiku's LayerNorm and RMSNorm on jln's operators, and either of them fused with the Linears behind it.

    from jln.haiku import LayerNorm, RMSNorm    # instead of: from haiku import LayerNorm, RMSNorm

Constructors, parameters, initial values, module names and checkpoints are Haiku's own: the classes are Haiku's with
another call. A call that the operators cannot compute runs Haiku's own code: one with `scale` or `offset`, or over
other axes than the last. So does `init`, which makes the parameters. `jln.explain` tells which of the two a call takes,
and why. Haiku computes in the dtype of its inputs. Here all is in float32, rounded once, and the variance is two-pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import haiku as hk
import jax
import numpy as np

from jln import _modules

__all__ = ["LayerNorm", "LayerNormLinear", "RMSNorm", "RMSNormLinear"]


def _read_norm(layer: LayerNorm | RMSNorm, x: jax.Array) -> _modules.Norm | str:
    if not all(_modules.is_last(axes, x) for axes in (layer.axis, layer.param_axis)):
        return "the norm is not over the last axis alone"
    if type(layer.eps) not in (int, float):  # numpy's promote what Haiku's RMSNorm adds them to
        return f"eps is a {type(layer.eps).__name__}"
    subtract_mean = isinstance(layer, LayerNorm)
    used = {"scale": layer.create_scale, "offset": subtract_mean and layer.create_offset}
    scale, offset = (hk.get_parameter(name, x.shape[-1:], x.dtype) if used[name] else None for name in used)
    epsilon = float(np.asarray(layer.eps, x.dtype))  # Haiku adds it in the dtype of the inputs
    return _modules.Norm(scale, offset, epsilon, subtract_mean)


def _layer(module: hk.Module, own: Any, read_norm: Any, read_linears: Any = None) -> _modules.Layer:
    return _modules.Layer(module, own, read_norm, read_linears, hk.running_init())


class LayerNorm(hk.LayerNorm):
    """`haiku.LayerNorm` on `jln.layer_norm`: the same arguments, parameters, results and errors."""

    def __call__(
        self,
        inputs: jax.Array,
        scale: jax.Array | None = None,
        offset: jax.Array | None = None,
        *,
        residual: jax.Array | None = None,
    ) -> Any:
        """Return `y` of the inputs' shape, their norm; with a residual `(y, total)`, the norm of the sum and the sum.

        Args:
          inputs: `[..., H]`, or as `axis` says.
          scale, offset: as of `haiku.LayerNorm`, whose code then runs.
          residual: the inputs' shape. The norm is of `total = inputs + residual`, which is made and read once.
        """
        given = None if scale is None and offset is None else "scale or offset is given: jln.layer_norm takes them"
        own = functools.partial(super().__call__, scale=scale, offset=offset)
        return _layer(self, own, lambda x: given or self._read(x)).call(inputs, residual)

    _read = _read_norm


class RMSNorm(hk.RMSNorm):
    """`haiku.RMSNorm` on `jln.rms_norm`: the same arguments, parameters, results and errors."""

    def __call__(self, inputs: jax.Array, *, residual: jax.Array | None = None) -> Any:
        """Return `y` of the inputs' shape, their norm; with a residual `(y, total)`, the norm of the sum and the sum.

        Args:
          inputs, residual: those of a call of `LayerNorm`.
        """
        return _layer(self, super().__call__, self._read).call(inputs, residual)

    _read = _read_norm


class _Linear(hk.Linear):
    """A Linear with a method that reads its parameters, which so have its name and go through the user's getters."""

    def _read(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        w = hk.get_parameter("w", [x.shape[-1], self.output_size], x.dtype)
        b = hk.get_parameter("b", [self.output_size], x.dtype) if self.with_bias else None
        return w, b


class _NormLinear(hk.Module):
    """A norm over the last axis, and behind it a Linear named "linear", or several by their own names."""

    make_norm: Callable[[], LayerNorm | RMSNorm]
    linear_options: Mapping[str, Any]
    output_size: int | Mapping[str, int]

    def __call__(
        self,
        inputs: jax.Array,
        *,
        precision: jax.lax.PrecisionLike = None,
        residual: jax.Array | None = None,
        quantize: Any = None,
    ) -> Any:
        """Return `y` `[..., output_size]`, of several Linears a tuple in their order; with a residual `(y, total)`.

        Args:
          inputs: `[..., H]`.
          precision: of the Linears.
          residual: as of the norm.
          quantize: as of `jln.layer_norm_linear`. An error where the operators cannot compute the call.
        """
        several = isinstance(self.output_size, Mapping)
        sizes = _modules.linear_sizes(self.output_size, "linear")
        norm = self.make_norm()
        linears = [_Linear(n, **self.linear_options, name=name) for name, n in sizes.items()]

        def read_linears(x: jax.Array) -> _modules.Linears:
            kernels, biases = zip(*(linear._read(x) for linear in linears), strict=True)
            return _modules.Linears(kernels, biases, several, precision=precision)

        own = _modules.in_turn(norm, [functools.partial(linear, precision=precision) for linear in linears], several)
        return _layer(self, own, norm._read, read_linears).call(inputs, residual, quantize)


class LayerNormLinear(_NormLinear):
    """A LayerNorm over the last axis and the Linear behind it, as one operator that keeps only the inputs.

    Parameters and initial values are those of Haiku's two modules, "layer_norm" and "linear". Several Linears may read
    one norm, under names of their own:

        layer = LayerNormLinear({"q": 1024, "k": 256, "v": 256})  # modules "layer_norm", "q", "k" and "v"
        q, k, v = layer(x)
        (q, k, v), total = layer(x, residual=residual)  # of total = x + residual

    As one operator the modules are not called, and interceptors see only how their parameters are read.

    Args:
      output_size: as of `haiku.Linear`. For several Linears a mapping from each one's name to its size.
      create_scale, create_offset, eps, scale_init, offset_init: as of `haiku.LayerNorm`.
      with_bias, w_init, b_init: as of `haiku.Linear`.
      name: of the module.
    """

    def __init__(
        self,
        output_size: int | Mapping[str, int],
        create_scale: bool = True,
        create_offset: bool = True,
        eps: float = 1e-5,
        scale_init: hk.initializers.Initializer | None = None,
        offset_init: hk.initializers.Initializer | None = None,
        with_bias: bool = True,
        w_init: hk.initializers.Initializer | None = None,
        b_init: hk.initializers.Initializer | None = None,
        name: str | None = None,
    ):
        super().__init__(name=name)
        norm = (-1, create_scale, create_offset, eps, scale_init, offset_init)
        self.make_norm = functools.partial(LayerNorm, *norm, param_axis=-1, name="layer_norm")
        self.linear_options = {"with_bias": with_bias, "w_init": w_init, "b_init": b_init}
        self.output_size = output_size


class RMSNormLinear(_NormLinear):
    """An RMSNorm over the last axis, named "rms_norm", and the Linear behind it, or several, as of `LayerNormLinear`.

    Args:
      output_size, create_scale, eps, scale_init, with_bias, w_init, b_init, name: as of `LayerNormLinear`.
    """

    def __init__(
        self,
        output_size: int | Mapping[str, int],
        create_scale: bool = True,
        eps: float = 1e-5,
        scale_init: hk.initializers.Initializer | None = None,
        with_bias: bool = True,
        w_init: hk.initializers.Initializer | None = None,
        b_init: hk.initializers.Initializer | None = None,
        name: str | None = None,
    ):
        super().__init__(name=name)
        self.make_norm = functools.partial(RMSNorm, -1, eps, scale_init, "rms_norm", create_scale, param_axis=-1)
        self.linear_options = {"with_bias": with_bias, "w_init": w_init, "b_init": b_init}
        self.output_size = output_size

"""Flax NNX's LayerNorm and RMSNorm on jln's operators, and either of them fused with the Linears behind it.

    from jln.nnx import LayerNorm, RMSNorm    # instead of: from flax.nnx import LayerNorm, RMSNorm

Constructors, parameters, initial values, metadata and checkpoints are Flax's own: the classes are Flax's with another
call. A call that the operators cannot compute runs Flax's own code: one with `mask`, `axis_name`, a `promote_dtype` of
one's own, or over other axes than the last. `jln.explain` tells which of the two a call takes, and why. Results differ
by rounding: with `dtype=bfloat16` Flax rounds `x` before it normalises, here the result alone is rounded. The variance
is two-pass whatever `use_fast_variance`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import FrozenDict
from flax.nnx.nn import dtypes, linear

from jln import _modules

__all__ = ["LayerNorm", "LayerNormLinear", "RMSNorm", "RMSNormLinear"]


class LayerNorm(nnx.LayerNorm):
    """`flax.nnx.LayerNorm` on `jln.layer_norm`: the same arguments, parameters, results and errors."""

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None, residual: jax.Array | None = None) -> Any:
        """Return `y` of `x`'s shape, the norm of `x`; with a residual `(y, total)`, the norm of the sum and the sum.

        Args:
          x: `[..., num_features]`, or as `reduction_axes` and `feature_axes` say.
          mask: as of `flax.nnx.LayerNorm`, whose code then runs.
          residual: `x`'s shape. The norm is of `total = x + residual`, which is made and read once.
        """
        own = functools.partial(super().__call__, mask=mask)
        return _modules.Layer(self, own, lambda x: _read_norm(self, x, mask)).call(x, residual)


class RMSNorm(nnx.RMSNorm):
    """`flax.nnx.RMSNorm` on `jln.rms_norm`: the same arguments, parameters, results and errors."""

    def __call__(self, x: jax.Array, mask: jax.Array | None = None, *, residual: jax.Array | None = None) -> Any:
        """Return `y` of `x`'s shape, the norm of `x`; with a residual `(y, total)`, the norm of the sum and the sum.

        Args:
          x, mask, residual: those of a call of `LayerNorm`.
        """
        own = functools.partial(super().__call__, mask=mask)
        return _modules.Layer(self, own, lambda x: _read_norm(self, x, mask)).call(x, residual)


# out_features of one Linear, or by the name of each of several.
Features = int | Sequence[int] | Mapping[str, int | Sequence[int]]


class _NormLinear(nnx.Module):
    """A norm, and behind it a Linear named "linear", or several by their own names."""

    def __init__(self, norm: LayerNorm | RMSNorm, in_features: int, out_features: Features, **options: Any):
        self.norm = norm
        self.several = isinstance(out_features, Mapping)
        linears = _modules.linear_sizes(out_features, "linear")
        self.names = tuple(linears)
        for name, n in linears.items():
            if hasattr(self, name):
                raise ValueError(f"out_features cannot name a Linear {name!r}: {type(self).__name__} has such a name")
            cls: Any = nnx.Linear if isinstance(n, int) else nnx.LinearGeneral
            setattr(self, name, cls(in_features, n, **options))

    def __call__(self, x: jax.Array, *, residual: jax.Array | None = None, quantize: Any = None) -> Any:
        """Return `y` `[..., *features]`, of several Linears a tuple in their order; with a residual `(y, total)`.

        Args:
          x: `[..., H]`.
          residual: as of the norm.
          quantize: as of `jln.layer_norm_linear`. An error where the operators cannot compute the call.
        """
        linears = [getattr(self, name) for name in self.names]

        def read_norm(x: jax.Array) -> _modules.Norm | str:
            if any(type(a) not in (LayerNorm, RMSNorm, nnx.Linear, nnx.LinearGeneral) for a in (self.norm, *linears)):
                return "a layer has been replaced"
            return _read_norm(self.norm, x)

        def read_linears(_: jax.Array) -> _modules.Linears | str:
            settings = _SETTINGS | {name: (getattr(linears[0], name),) for name in ("dtype", "precision")}
            if any(getattr(a, name, some[0]) not in some for a in linears for name, some in settings.items()):
                return "a Linear has other settings than the operator or than its neighbour"
            kernels = [layer.kernel[...] for layer in linears]
            biases = [None if layer.bias is None else layer.bias[...] for layer in linears]
            return _modules.Linears(kernels, biases, self.several, linears[0].dtype, linears[0].precision)

        own = _modules.in_turn(self.norm, linears, self.several)
        return _modules.Layer(self, own, read_norm, read_linears).call(x, residual, quantize)


class LayerNormLinear(_NormLinear):
    """A `LayerNorm` and the Linear behind it, `linear(norm(x))`, as one operator that keeps only `x` for the backward.

    Parameters and initial values are those of Flax's two layers, "norm" and "linear", made in this order from `rngs`.
    Several Linears may read one norm, under names of their own:

        layer = LayerNormLinear(1024, {"q": 1024, "k": 256, "v": 256}, rngs=rngs)  # norm.scale, q.kernel, k.kernel ...
        q, k, v = layer(x)
        (q, k, v), total = layer(x, residual=residual)  # of total = x + residual

    A layer that you replace, as by `flax.nnx.LoRALinear`, is called, and so are the others.

    Args:
      in_features: H.
      out_features: N, or a tuple: then the Linear is a `flax.nnx.LinearGeneral`. For several Linears a mapping from
        each one's attribute name to either of these.
      epsilon, use_scale, scale_init: as of `flax.nnx.LayerNorm`.
      use_offset, offset_init: `flax.nnx.LayerNorm`'s `use_bias` and `bias_init`.
      use_bias, kernel_init, bias_init, precision: of the Linear, or of each. For metadata wrap an initialiser, by
        `flax.nnx.with_partitioning`.
      dtype, param_dtype, rngs: of all layers.
    """

    def __init__(
        self,
        in_features: int,
        out_features: Features,
        *,
        epsilon: float = 1e-6,
        use_scale: bool = True,
        use_offset: bool = True,
        scale_init: nnx.Initializer = nnx.initializers.ones,
        offset_init: nnx.Initializer = nnx.initializers.zeros,
        use_bias: bool = True,
        kernel_init: nnx.Initializer = linear.default_kernel_init,
        bias_init: nnx.Initializer = nnx.initializers.zeros,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        rngs: nnx.Rngs,
    ):
        both = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        of_norm = {"use_scale": use_scale, "scale_init": scale_init, "use_bias": use_offset, "bias_init": offset_init}
        options = {"use_bias": use_bias, "kernel_init": kernel_init, "bias_init": bias_init, "precision": precision}
        norm = LayerNorm(in_features, epsilon=epsilon, **of_norm, **both)
        super().__init__(norm, in_features, out_features, **options, **both)


class RMSNormLinear(_NormLinear):
    """An `RMSNorm` and the Linear behind it, or several, as of `LayerNormLinear`.

    Args:
      in_features, out_features, epsilon, use_scale, scale_init: as of `LayerNormLinear`.
      use_bias, kernel_init, bias_init, precision, dtype, param_dtype, rngs: as of `LayerNormLinear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: Features,
        *,
        epsilon: float = 1e-6,
        use_scale: bool = True,
        scale_init: nnx.Initializer = nnx.initializers.ones,
        use_bias: bool = True,
        kernel_init: nnx.Initializer = linear.default_kernel_init,
        bias_init: nnx.Initializer = nnx.initializers.zeros,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        rngs: nnx.Rngs,
    ):
        both = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        options = {"use_bias": use_bias, "kernel_init": kernel_init, "bias_init": bias_init, "precision": precision}
        norm = RMSNorm(in_features, epsilon=epsilon, use_scale=use_scale, scale_init=scale_init, **both)
        super().__init__(norm, in_features, out_features, **options, **both)


# The settings of a Linear by which the operators compute. Some are of a LinearGeneral alone.
_SETTINGS: dict[str, tuple[Any, ...]] = {"dot_general": (jax.lax.dot_general, None), "dot_general_cls": (None,)}
_SETTINGS |= {"promote_dtype": (dtypes.promote_dtype,), "preferred_element_type": (None,)}
_SETTINGS |= {"axis": ((-1,),), "batch_axis": (FrozenDict(),)}


def _read_norm(layer: LayerNorm | RMSNorm, x: jax.Array, mask: jax.Array | None = None) -> _modules.Norm | str:
    if mask is not None:
        return "mask is given"
    if layer.axis_name is not None:
        return f"statistics are averaged over the mesh axis {layer.axis_name!r}"
    if layer.promote_dtype is not dtypes.promote_dtype:
        return "promote_dtype is not Flax's"
    if not all(_modules.is_last(axes, x) for axes in (layer.reduction_axes, layer.feature_axes)):
        return "the norm is not over the last axis alone"
    subtract_mean = isinstance(layer, LayerNorm)
    bias = layer.bias if subtract_mean else None
    scale, offset = (None if a is None else a[...] for a in (layer.scale, bias))
    return _modules.Norm(scale, offset, layer.epsilon, subtract_mean, layer.dtype)


def on_objects(function: Callable[..., Any], transform: Callable[..., Any]) -> Callable[..., Any]:
    """Return `transform(function)` of arguments with Flax NNX objects, in which it changes what `function` changes."""

    def pure(_: Any, tree: Any) -> tuple[Any, Any]:
        args, kwargs = nnx.from_tree(tree, ctxtag=_FUSE, is_inner=True)
        objects = [a for a in jax.tree.leaves((args, kwargs), is_leaf=_is_object) if _is_object(a)]
        before, leaves = _parts(objects)
        results = function(*args, **kwargs)
        after, others = _parts(objects)
        is_same = before == after and all(map(operator.is_, leaves, others))
        return results, None if is_same else nnx.to_tree(objects, ctxtag=_FUSE)

    pure.__name__ = getattr(function, "__name__", type(function).__name__)
    program = transform(pure)

    def call(*args: Any, **kwargs: Any) -> Any:
        with nnx.update_context(_FUSE):
            tree = nnx.to_tree((args, kwargs), split_fn=_split, ctxtag=_FUSE)
            results, objects = program(_UNHASHABLE, tree)
            if objects is not None:  # into the caller's, if it may be changed here, of which Flax asks too late
                for _, a in nnx.iter_graph((args, kwargs)):
                    getattr(a, "_check_can_update", lambda: None)()  # of Variables, from some Flax 0.12 on
                nnx.from_tree(objects, ctxtag=_FUSE, is_inner=False)
        return results

    return call


_FUSE = "jln.fuse"  # the name of Flax's context, in which it knows an object from its copy inside of a function
# With an argument that has no hash no program is kept: an object's attributes may change without being unequal.
_UNHASHABLE: set[Any] = set()


def _is_object(a: Any) -> bool:
    return isinstance(a, nnx.Pytree)


def _parts(objects: list[Any]) -> tuple[Any, list[Any]]:
    graphdef, state = nnx.split(objects)
    return graphdef, jax.tree.leaves(state)


def _split(context: Any, path: Any, prefix: Any, a: Any) -> Any:
    """An object's graph and state. A Variable outside of objects, as in a State, stays what it is to JAX."""
    return nnx.NodeStates.from_split(*context.split(a)) if _is_object(a) else a

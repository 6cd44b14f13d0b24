"""The launchers, called as the operators call them at a workload's size, for `python -m jln tune`.

A fused Linear is its own launcher. Any other is represented by its norm's launcher: XLA's products around it are not
tuned, and their time would hide that of the norm.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jln._junction.arrays import Arrays, Junction, Norm, Switches
from jln._junction.linears import tiles
from jln._tools.catalogue import EPSILON
from jln._tools.workload import Workload
from jln._triton.target import Target


def call(workload: Workload, direction: str, target: Target) -> tuple[Callable[..., Any], Any]:
    """Return a launcher that takes nothing but its operands, and the operands' shapes."""
    from jln._junction import launches as norm_launcher
    from jln._junction.linears import launches as linear_launcher

    assert not workload.extras and not workload.entry.is_gated, "their tiles are by rules alone"
    shapes = workload.arrays()
    axis = workload.axis % len(workload.shape) - len(workload.shape)
    norm = Norm(axis, EPSILON, Switches(subtract_mean=workload.entry.centres))
    x, residual, scale, offset = (shapes.get(name) for name in ("x", "residual", "scale", "offset"))
    residual, added = (None, residual) if workload.entry.adds_behind else (residual, None)
    dtype = jnp.dtype(workload.dtype)
    accumulator = jnp.promote_types(dtype, jnp.float32)
    assert x is not None and scale is not None
    statistic = jax.ShapeDtypeStruct([1 if i == axis % x.ndim else n for i, n in enumerate(x.shape)], accumulator)
    along = [n if i == axis % x.ndim else 1 for i, n in enumerate(x.shape)]
    scale, offset = (None if p is None else jax.ShapeDtypeStruct(along, p.dtype) for p in (scale, offset))
    saved: dict[str, Any] = {
        "dtotal": None if residual is None else x,
        "total": x,
        "mean": statistic if norm.switches.subtract_mean else None,
        "rstd": statistic,
    }
    kept = {"mean": accumulator.name if norm.switches.subtract_mean else None, "rstd": accumulator.name}
    alone: dict[str, Any] = {"batch_dims": 0, "target": target}

    def dtypes_of(arrays: Any) -> Any:
        return jax.tree.map(lambda a: a.dtype.name, arrays)

    if workload.is_linear:
        features = workload.all_features
        kernels, y = tuple(jax.tree.leaves(shapes["kernel"])), tuple(jax.tree.leaves(shapes["y"]))
        biases = tuple(jax.tree.leaves(shapes.get("bias"))) or (None,) * len(features)
        junction = Junction(norm, features=(1,) * len(features), in_one=True)
        sizes = workload.rows, workload.width, sum(features), dtype.name, target.chip
        keeps = tiles.keeps_product(Arrays(x=x, kernel=kernels), junction)
        product = tuple(jax.ShapeDtypeStruct(a.shape, accumulator) for a in y) if keeps else None
        if direction == "forward" and tiles.forward_tile(*sizes) is not None:
            dtypes = Arrays(y=dtypes_of(y), total=dtypes_of(residual), product=dtypes_of(product), **kept)
            operands = Arrays(x, residual, scale, offset, kernel=kernels, bias=biases)
            return functools.partial(linear_launcher.forward, junction=junction, dtypes=dtypes, **alone), operands
        if direction == "backward" and tiles.backward_plan(*sizes) is not None:
            dtypes = dtypes_of(Arrays(x, scale=scale, offset=offset, kernel=kernels, bias=biases))
            operands = Arrays(dy=y, scale=scale, offset=offset, kernel=kernels, product=product, **saved)
            return functools.partial(linear_launcher.backward, junction=junction, dtypes=dtypes, **alone), operands
    if direction == "forward":
        kept = kept if "backward" in workload.directions else {"mean": None, "rstd": None}
        dtypes = Arrays(y=dtype.name, total=dtypes_of(residual), **kept)
        operands = Arrays(x=x, residual=residual, scale=scale, offset=offset, added=added)
        return functools.partial(norm_launcher.forward, norm=norm, dtypes=dtypes, **alone), operands
    # Behind the products of a Linear, dz, in the dtype in which they leave it, and its z is made again.
    dy = jax.ShapeDtypeStruct(x.shape, accumulator) if workload.is_linear and dtype != jnp.bfloat16 else x
    y_dtype = dtype.name if workload.is_linear else None
    dtypes = Arrays(dtype.name, scale=dtypes_of(scale), offset=dtypes_of(offset), y=y_dtype)
    operands = Arrays(dy=dy, scale=scale, offset=offset if workload.is_linear else None, **saved)
    return functools.partial(norm_launcher.backward, norm=norm, dtypes=dtypes, **alone), operands

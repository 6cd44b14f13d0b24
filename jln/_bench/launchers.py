"""The launchers, called as the operators call them at a workload's size: what `python -m jln tune` compiles and times.

A Linear's launcher where its kernels are fused; where they are not, the norm's beside XLA's products, which are none of
tuning's business and would drown what is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jln._bench.workloads import Workload
from jln._triton import config

Shapes = tuple[jax.ShapeDtypeStruct | None, ...]


def call(workload: Workload, direction: str, chip: config.Chip) -> tuple[Callable[..., Any], Shapes]:
    """-> (a launcher that wants nothing but arrays, the shapes of these; None for one that is absent)"""
    from jln._triton import layer_norm as norm
    from jln._triton import layer_norm_linear as linear

    shapes = workload.arrays()
    axis = workload.axis % len(workload.shape) - len(workload.shape)
    x, residual, scale, offset = (shapes.get(name) for name in ("x", "residual", "scale", "offset"))
    dtype = jnp.dtype(workload.dtype)
    accumulator = jnp.promote_types(dtype, jnp.float32)
    assert x is not None and scale is not None
    options: dict[str, Any] = {
        "epsilon": 1e-6,
        "subtract_mean": workload.entry.centres,
        "zero_centered_scale": False,
        "batch_dims": 0,
        "chip": chip,
    }
    statistic = jax.ShapeDtypeStruct([1 if i == axis % x.ndim else n for i, n in enumerate(x.shape)], accumulator)
    along = [n if i == axis % x.ndim else 1 for i, n in enumerate(x.shape)]
    mean = statistic if options["subtract_mean"] else None
    if workload.is_linear:
        options["precision"] = None
        kernel, bias, y = shapes["kernel"], shapes.get("bias"), shapes["y"]
        h, n = kernel.shape
        if direction == "forward" and config.fused_forward(workload.rows, h, n, dtype.name, chip) is not None:
            return functools.partial(linear.forward, **options), (x, scale, offset, kernel, bias)
        if direction == "backward" and config.fused_backward(workload.rows, h, n, dtype.name, chip) is not None:
            dbias_dtype = None if bias is None else bias.dtype
            function = functools.partial(linear.backward, dbias_dtype=dbias_dtype, **options)
            return function, (y, x, scale, offset, kernel, mean, statistic)
        del options["precision"]
    scale, offset = (None if p is None else jax.ShapeDtypeStruct(along, p.dtype) for p in (scale, offset))
    doffset_dtype = None if offset is None else offset.dtype
    if direction == "forward":
        wanted = ("y", "total", *(("mean", "rstd") if "backward" in workload.directions else ()))
        return functools.partial(norm.forward, axis=axis, wanted=wanted, **options), (x, residual, scale, offset)
    if workload.is_linear:
        del options["epsilon"]
        dz = jax.ShapeDtypeStruct(x.shape, dtype if dtype == jnp.bfloat16 else accumulator)
        function = functools.partial(norm.backward_and_forward, y_dtype=dtype, **options)
        return function, (dz, x, scale, offset, mean, statistic)
    function = functools.partial(norm.backward, axis=axis, doffset_dtype=doffset_dtype, **options)
    return function, (x, x if residual is not None else None, x, scale, mean, statistic)

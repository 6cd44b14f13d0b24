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
from jln._norm import signature as norms
from jln._norm_linear import signature as linears
from jln._norm_linear import tiles
from jln._triton.target import Target


def call(workload: Workload, direction: str, target: Target) -> tuple[Callable[..., Any], Any]:
    """-> (a launcher that wants nothing but its operands, their shapes)"""
    from jln._norm import launcher as norm_launcher
    from jln._norm_linear import launcher as linear_launcher

    shapes = workload.arrays()
    axis = workload.axis % len(workload.shape) - len(workload.shape)
    norm = norms.Norm(axis, 1e-6, workload.entry.centres, zero_centered_scale=False)
    x, residual, scale, offset = (shapes.get(name) for name in ("x", "residual", "scale", "offset"))
    dtype = jnp.dtype(workload.dtype)
    accumulator = jnp.promote_types(dtype, jnp.float32)
    assert x is not None and scale is not None
    statistic = jax.ShapeDtypeStruct([1 if i == axis % x.ndim else n for i, n in enumerate(x.shape)], accumulator)
    along = [n if i == axis % x.ndim else 1 for i, n in enumerate(x.shape)]
    scale, offset = (None if p is None else jax.ShapeDtypeStruct(along, p.dtype) for p in (scale, offset))
    mean = statistic if norm.subtract_mean else None
    dtotal = None if residual is None else x
    saved_statistics = None if mean is None else accumulator.name, accumulator.name

    def dtype_of(a: jax.ShapeDtypeStruct | None) -> str | None:
        return None if a is None else a.dtype.name

    def made(launcher: Callable[..., Any], settings: tuple[str, Any], dtypes: Any) -> Callable[..., Any]:
        return functools.partial(launcher, **{settings[0]: settings[1]}, dtypes=dtypes, batch_dims=0, target=target)

    if workload.is_linear:
        features = workload.all_features
        kernels, y = tuple(jax.tree.leaves(shapes["kernel"])), tuple(jax.tree.leaves(shapes["y"]))
        biases = tuple(jax.tree.leaves(shapes.get("bias"))) or (None,) * len(features)
        settings = ("settings", linears.NormLinear(norm, None, (1,) * len(features), in_one=True))
        sizes = workload.rows, workload.width, sum(features), dtype.name, target.chip
        if direction == "forward" and tiles.forward_tile(*sizes) is not None:
            dtypes = linears.Outcome((dtype.name,) * len(y), dtype_of(residual), *saved_statistics)
            of_norm = norms.Operands(x, residual, scale=scale, offset=offset)
            operands = linears.Operands(**of_norm._asdict(), kernel=kernels, bias=biases)
            return made(linear_launcher.forward, settings, dtypes), operands
        if direction == "backward" and tiles.backward_plan(*sizes) is not None:
            of_each = (tuple(map(dtype_of, arrays)) for arrays in (kernels, biases))
            dtypes = linears.Gradients(*map(dtype_of, (x, scale, offset)), *of_each)
            operands = linears.Cotangents(y, dtotal, x, scale, offset, kernels, mean, statistic)
            return made(linear_launcher.backward, settings, dtypes), operands
    settings = ("norm", norm)
    if direction == "forward":
        kept = saved_statistics if "backward" in workload.directions else (None, None)
        dtypes = norms.Outcome(dtype.name, dtype_of(residual), *kept)
        return made(norm_launcher.forward, settings, dtypes), norms.Operands(x, residual, scale=scale, offset=offset)
    # Behind the products of a Linear, dz, in the dtype in which they leave it, and its z is made again.
    dy = jax.ShapeDtypeStruct(x.shape, accumulator) if workload.is_linear and dtype != jnp.bfloat16 else x
    y_dtype = dtype.name if workload.is_linear else None
    gradients = norms.Gradients(dtype.name, dtype_of(scale), dtype_of(offset), y_dtype)
    read = norms.Cotangents(dy, dtotal, x, scale, offset if workload.is_linear else None, mean, statistic)
    return made(norm_launcher.backward, settings, gradients), read

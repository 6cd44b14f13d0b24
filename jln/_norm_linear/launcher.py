"""Launchers of LayerNorm+Linear: fused kernels for few features (`tiles`), else norm kernels around XLA's products.

Shapes are those of `jln._norm_linear.signature` with one axis of features, N.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jln._norm import launcher as norms
from jln._norm import signature as norm_signature
from jln._norm_linear import formulas, kernels, tiles
from jln._norm_linear.signature import Cotangents, Gradients, NormLinear, Operands, Outcome
from jln._triton.launch import launch
from jln._triton.target import Target
from jln._triton.tile import Tile, ceil_div

_Plan = TypeVar("_Plan")


def forward(operands: Operands, settings: NormLinear, dtypes: Outcome, batch_dims: int, target: Target) -> Outcome:
    batch = _common_batch(batch_dims, *operands)
    x, *parameters = operands
    if all(p is None or math.prod(p.shape[:batch_dims]) == 1 for p in parameters):
        # Where every example has the same parameters, examples are rows like any other.
        operands = Operands(x, *(None if p is None else p.reshape(p.shape[batch_dims:]) for p in parameters))
        batch_dims = 0
    x, scale, offset, kernel, bias = operands
    if dtypes.y is not None:
        sizes = math.prod(x.shape[:-1]), *kernel.shape[-2:]
        tile = _fused(tiles.forward, sizes, jnp.dtype(dtypes.y), settings, batch_dims, target)
        if tile is not None:
            return _fused_forward(operands, settings, dtypes, tile, target)
    y, _, mean, rstd = norms.forward(
        norm_signature.Operands(x, None, _to_rank_of(x, scale), _to_rank_of(x, offset)),
        settings.norm,
        norm_signature.Outcome(dtypes.y, None, dtypes.mean, dtypes.rstd),
        batch_dims,
        target,
    )
    if y is not None:  # the product's operand so far, in the product's dtype
        y = _affine(_rows(y, batch_dims), kernel, bias, settings.precision)
        y = y.reshape(*y.shape[:batch_dims], *x.shape[batch_dims:-1], y.shape[-1])
    return Outcome(*(None if a is None else _with_batch(a, batch) for a in (y, mean, rstd)))


def backward(
    operands: Cotangents, settings: NormLinear, dtypes: Gradients, batch_dims: int, target: Target
) -> Gradients:
    if dtypes.dx is None and dtypes.dscale is None and dtypes.dkernel is None:
        return _sums_of_dy(operands, dtypes, batch_dims)
    dy, x = operands.dy, operands.x
    sizes = math.prod(x.shape[:-1]), x.shape[-1], dy.shape[-1]
    plan = _fused(tiles.backward, sizes, dy.dtype, settings, batch_dims, target)
    if plan is not None:
        return _fused_backward(operands, settings, dtypes, plan, target)
    return _composed_backward(operands, settings, dtypes, batch_dims, target)


def _composed_backward(
    operands: Cotangents, settings: NormLinear, dtypes: Gradients, batch_dims: int, target: Target
) -> Gradients:
    dy, x, scale, offset, kernel, mean, rstd = operands
    batch = _common_batch(batch_dims, *operands)
    dtype, precision = dy.dtype, settings.precision
    row_scale, row_offset = _to_rank_of(x, scale), _to_rank_of(x, offset)
    dy_rows = _rows(dy, batch_dims)
    dx = dscale = doffset = dkernel = z = None
    if dtypes.dx is not None or dtypes.dscale is not None:
        # dz goes through memory. bfloat16 only rounds it there; in float16 what is under 6e-8 would vanish.
        dz = jnp.matmul(
            dy_rows,
            jnp.swapaxes(kernel.astype(dtype), -1, -2),
            precision=precision,
            preferred_element_type=dtype if dtype == jnp.bfloat16 else jnp.promote_types(dtype, jnp.float32),
        )
        dz = dz.reshape(*dz.shape[:batch_dims], *dy.shape[batch_dims:-1], dz.shape[-1])
        dx, dscale, doffset, z = norms.backward_and_forward(
            norm_signature.Cotangents(dz, None, x, row_scale, mean, rstd),
            row_offset,
            settings.norm,
            norms.BackwardAndForward(
                dtypes.dx, dtypes.dscale, dtypes.doffset, None if dtypes.dkernel is None else dtype.name
            ),
            batch_dims,
            target,
            y_dtype=dtype,
        )
        # The shares of dscale and doffset are added up first, so that dkernel's memory can hold them until then.
        z, dscale, doffset = jax.lax.optimization_barrier((z, dscale, doffset))
        dscale, doffset = (None if a is None else a.reshape(*a.shape[:batch_dims], -1) for a in (dscale, doffset))
    elif dtypes.dkernel is not None:
        z = norms.forward(
            norm_signature.Operands(x, None, row_scale, row_offset),
            settings.norm,
            norm_signature.Outcome(dtype.name, None, None, None),
            batch_dims,
            target,
        ).y
    if z is not None:
        left = jnp.swapaxes(_rows(z, batch_dims), -1, -2)
        dkernel = jnp.matmul(left, dy_rows, precision=precision, preferred_element_type=dtypes.dkernel)
    if doffset is not None:
        dtypes = dtypes._replace(doffset=None)
    _, _, alone, _, dbias = _sums_of_dy(operands, dtypes, batch_dims)
    doffset = alone if doffset is None else doffset
    return Gradients(*(None if a is None else _with_batch(a, batch) for a in (dx, dscale, doffset, dkernel, dbias)))


def _sums_of_dy(operands: Cotangents, dtypes: Gradients, batch_dims: int) -> Gradients:
    """doffset and dbias, of which XLA makes one read of dy: (12), and (15) by its second form, which needs no dz."""
    rows = _rows(operands.dy, batch_dims)
    doffset = dbias = None
    if dtypes.doffset is not None:
        sums = norms.column_sums(rows, jnp.promote_types(rows.dtype, jnp.float32))
        doffset = formulas.doffset_from(sums, operands.kernel).astype(dtypes.doffset)
    if dtypes.dbias is not None:
        dbias = norms.column_sums(rows, dtypes.dbias)
    batch = _common_batch(batch_dims, *operands)
    return Gradients(None, None, *(None if a is None else _with_batch(a, batch) for a in (doffset, None, dbias)))


def _fused_forward(operands: Operands, settings: NormLinear, dtypes: Outcome, tile: Tile, target: Target) -> Outcome:
    """`forward` without a batch, in one kernel."""
    x, kernel = operands.x, operands.kernel
    rows = math.prod(x.shape[:-1])

    def statistic(dtype: str | None) -> jax.ShapeDtypeStruct | None:
        return None if dtype is None else jax.ShapeDtypeStruct((*x.shape[:-1], 1), dtype)

    y = jax.ShapeDtypeStruct((*x.shape[:-1], kernel.shape[-1]), dtypes.y)
    written = launch(
        target,
        kernels.forward_kernel,
        {**operands._asdict(), "rows": rows},
        {"y": y, "mean": statistic(dtypes.mean), "rstd": statistic(dtypes.rstd)},
        programs=ceil_div(rows, tile.rows),
        tile=tile,
        BY_REGISTERS=target.chip.capability >= 90 and y.dtype == jnp.float32,
        SUBTRACT_MEAN=settings.norm.subtract_mean,
        EPSILON=settings.norm.epsilon,
        **_constants(settings, *kernel.shape),
    )
    return Outcome(**written)


def _fused_backward(
    operands: Cotangents, settings: NormLinear, dtypes: Gradients, plan: tiles.BackwardPlan, target: Target
) -> Gradients:
    """`backward` without a batch, in up to three kernels: row sums and shares of dbias, where dx is wanted; dx and
    shares of G and dscale; and what adds up the shares.
    """
    dy, x, offset = operands.dy, operands.x, operands.offset
    rows, h, n = math.prod(x.shape[:-1]), x.shape[-1], dy.shape[-1]
    constants = _constants(settings, h, n)

    def float32(wanted: object, *shape: int) -> jax.ShapeDtypeStruct | None:
        return jax.ShapeDtypeStruct(shape, jnp.float32) if wanted else None

    def like(dtype: str | None, *shape: int) -> jax.ShapeDtypeStruct | None:
        return None if dtype is None else jax.ShapeDtypeStruct(shape, dtype)

    programs, parts, splits = plan.row_programs, plan.parts, plan.splits
    given = {name: a for name, a in operands._asdict().items() if name != "offset"}
    wants_dbias = dtypes.dbias or dtypes.doffset or (dtypes.dkernel and offset is not None)
    sums: dict[str, Any] = {"c1": None, "c2": None, "dbias": None}
    if dtypes.dx:
        sums = launch(
            target,
            kernels.row_sums_kernel,
            {**given, "rows": rows, "programs": programs},
            {
                "c1": float32(settings.norm.subtract_mean, parts, rows),
                "c2": float32(True, parts, rows),
                "dbias": float32(wants_dbias, programs, n),
            },
            programs=programs * parts,
            tile=plan.row_sums,
            PARTS=parts,
            **constants,
        )
    elif wants_dbias:
        sums["dbias"] = norms.column_shares(_rows(dy, 0), jnp.float32)
        programs = len(sums["dbias"])
    written = launch(
        target,
        kernels.backward_kernel,
        {**given, "c1": sums["c1"], "c2": sums["c2"], "rows": rows, "splits": splits},
        {
            "dx": like(dtypes.dx, *x.shape),
            "g": float32(dtypes.dkernel, splits, h, n),
            "dscale": float32(dtypes.dscale, splits, h),
        },
        programs=splits * ceil_div(h, plan.backward.columns),
        tile=plan.backward,
        PARTS=parts,
        **constants,
    )
    gradients: dict[str, Any] = {
        "dkernel": like(dtypes.dkernel, h, n),
        "dscale": like(dtypes.dscale, h),
        "doffset": like(dtypes.doffset, h),
        "dbias": like(dtypes.dbias, n),
    }
    if any(a is not None for a in gradients.values()):
        gradients = launch(
            target,
            kernels.parameters_kernel,
            {
                "g_partial": written["g"],
                "dscale_partial": written["dscale"],
                "dbias_partial": sums["dbias"],
                "scale": operands.scale if dtypes.dkernel else None,
                "offset": offset if dtypes.dkernel else None,
                "kernel": operands.kernel if dtypes.doffset else None,
                "splits": splits,
                "programs": programs,
            },
            gradients,
            programs=ceil_div(h, plan.parameters.columns),
            tile=plan.parameters,
            **constants,
        )
    return Gradients(dx=written["dx"], **gradients)


# The presets of `jax.lax.DotAlgorithmPreset` that name what the fused kernels do.
_ALGORITHMS = {
    "bfloat16": jax.lax.DotAlgorithmPreset.BF16_BF16_F32,
    "float16": jax.lax.DotAlgorithmPreset.F16_F16_F32,
    "float32": jax.lax.DotAlgorithmPreset.TF32_TF32_F32,
}


def _multiplied_as_asked(precision: Any, dtype: jnp.dtype) -> bool:
    """Whether the fused kernels' products of operands of this dtype are what `precision` means on a GPU, where float32
    is multiplied in TF32 by default, and 16 bits alike at all levels.
    """
    if isinstance(precision, jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset):
        return precision == _ALGORITHMS.get(dtype.name)
    levels = precision if isinstance(precision, tuple) else (precision,)
    return dtype.itemsize == 2 or all(level in (None, jax.lax.Precision.DEFAULT) for level in levels)


def _fused(
    plan: Callable[..., _Plan | None],
    sizes: tuple[int, int, int],
    dtype: jnp.dtype,
    settings: NormLinear,
    batch_dims: int,
    target: Target,
) -> _Plan | None:
    """What `plan` makes of M, H and N; None if parameters differ over a batch or another precision is asked for."""
    if batch_dims or not _multiplied_as_asked(settings.precision, dtype):
        return None
    return plan(*sizes, dtype.name, target)


def _constants(settings: NormLinear, h: int, n: int) -> dict[str, Any]:
    """What all fused kernels are told."""
    return {
        "compute": jnp.dtype("float32"),
        "H": h,
        "N": n,
        "BLOCK_N": tiles.features(n),
        "ZERO_CENTERED": settings.norm.zero_centered_scale,
    }


def _affine(z: jax.Array, kernel: jax.Array, bias: jax.Array | None, precision: jax.lax.PrecisionLike) -> jax.Array:
    """z @ kernel + bias over [*batch, rows, H], rounded once; in bfloat16 with a bfloat16 bias, twice.

    XLA adds a 16-bit bias inside its product only if the product is rounded to 16 bits first, else it writes the
    product in float32 and reads it again: (8192, 4096, 12288) in bfloat16 moves 503 MB forward or 1309. That is
    bfloat16's price, whose range is float32's; a float16 product may overflow where y does not. A float32 bias it adds
    to the float32 product inside, if the bias is an argument of the program.
    """
    kernel = kernel.astype(z.dtype)
    if bias is None:
        return jnp.matmul(z, kernel, precision=precision)
    rounded_first = z.dtype == bias.dtype == jnp.bfloat16
    compute = z.dtype if rounded_first else jnp.promote_types(z.dtype, jnp.float32)
    y = jnp.matmul(z, kernel, precision=precision, preferred_element_type=compute)
    return (y + jnp.expand_dims(bias.astype(compute), -2)).astype(z.dtype)


def _rows(a: jax.Array, batch_dims: int) -> jax.Array:
    """[*batch, *lead, C] as [*batch, rows, C]."""
    return a.reshape(*a.shape[:batch_dims], math.prod(a.shape[batch_dims:-1]), a.shape[-1])


def _to_rank_of(x: jax.Array, parameter: jax.Array | None) -> jax.Array | None:
    """A parameter [*batch, H] as [*batch, 1, ..., 1, H]."""
    if parameter is None:
        return None
    ones = (1,) * (x.ndim - parameter.ndim)
    return parameter.reshape(*parameter.shape[:-1], *ones, parameter.shape[-1])


def _common_batch(batch_dims: int, *operands: jax.Array | None) -> tuple[int, ...]:
    return jnp.broadcast_shapes(*(a.shape[:batch_dims] for a in operands if a is not None))


def _with_batch(a: jax.Array, batch: Sequence[int]) -> jax.Array:
    return jnp.broadcast_to(a, (*batch, *a.shape[len(batch) :]))

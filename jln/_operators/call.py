"""The call of every public operator: arguments checked and laid out, the junction, and results as users have them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.lax import PrecisionLike
from jax.sharding import PartitionSpec

from jln import _checks
from jln._checks import array, optional_array
from jln._core.derivatives import in_one_program, with_automatic_axes
from jln._junction.arguments import NormArguments, arrange, check, no_kernels, norm_of
from jln._junction.arrays import Arrays, Junction
from jln._junction.derivatives import in_plain_jnp, operator
from jln._junction.linears.eight_bits import multiplies_blocks
from jln._junction.linears.tiles import few_features
from jln._operators.eight_bits import Kind, pack, settings
from jln._triton.target import target_chip


def summands(x: Any, residual: Any, x_bias: Any = None, gate: Any = None) -> Arrays:
    """Make the arrays of a sum in front of a norm."""
    return Arrays(x=array("x", x), residual=optional_array("residual", residual), x_bias=x_bias, gate=gate)


def call(
    arrays: Arrays,
    norm: NormArguments,
    *,
    gives_total: bool = False,
    copies: int = 1,
    remat: bool = False,
    precision: PrecisionLike = None,
    implementation: str | None = None,
    forward_mode: bool = False,
    quantize: Kind[Any] | None = None,
) -> Arrays:
    """Compute the junction of the user's arrays: its y, `Quantized` with `quantize`, and total, as `Junction` has them.

    arrays: x and those of its size are JAX's already; kernel and bias are tuples, as `_checks.linears` makes them.
    """
    if _checks.flag("remat", remat) and forward_mode:
        raise ValueError("remat=True is of reverse mode: in forward mode nothing is kept that could be made again")
    axes = _checks.axes(norm.axis, arrays.x)
    arrays = check(arrays, axes)
    in_eight_bits: dict[str, Any] = {}
    if quantize is not None:
        in_eight_bits, scale = settings(quantize, arrays, axes, norm.dtype, forward_mode)
        arrays = arrays._replace(y_scale=scale)
    statics = norm_of(arrays, axes, norm, remat)
    if arrays.kernel is None:
        x = arrays.x.dtype
        promoted = x if arrays.added is None else _checks.promote(x, arrays.added.dtype)
        junction = Junction(statics, **(in_eight_bits or {"y_dtype": _checks.dtype(norm.dtype, promoted)}))
    else:
        if quantize is not None and precision is not None:
            raise ValueError(f"with quantize= the products are in eight bits; got precision={precision!r}")
        features = tuple(kernel.ndim - 1 for kernel in arrays.kernel)
        by_cudnn = in_eight_bits.get("eight_bits") == "blocks" and multiplies_blocks(target_chip())
        how: Any = {"precision": _checks.precision(precision), "by_cudnn": by_cudnn}
        how |= in_eight_bits or {"y_dtype": None if norm.dtype is None else _checks.dtype(norm.dtype, arrays.x.dtype)}
        junction = Junction(statics, features=features, **how)
    junction = dataclasses.replace(
        junction, gives_total=gives_total, copies=copies, implementation=_checks.implementation(implementation)
    )
    results = _on_any_mesh(junction, axes, _checks.flag("forward_mode", forward_mode), arrays)
    return results if quantize is None or arrays.kernel else Arrays(y=pack(results, quantize), total=results.total)


@in_one_program(static=3)
def _on_any_mesh(junction: Junction, axes: tuple[int, ...], forward_mode: bool, arrays: Arrays) -> Arrays:
    def specs_of_results(specs: Arrays) -> Arrays:
        y = specs.x if junction.copies == 1 else (specs.x,) * junction.copies
        if specs.kernel is not None:
            y = tuple(_spec_of_product(specs.x[:-1], kernel) for kernel in specs.kernel)
        results = Arrays(y=y, total=specs.x if junction.gives_total else None)
        if junction.features:
            return results if specs.y_scale is None else results._replace(y_max=PartitionSpec())
        if junction.eight_bits == "blocks":
            return results._replace(carrier=specs.x, block_scale=PartitionSpec(*specs.x[:-1]))
        if junction.eight_bits == "one":
            return results._replace(carrier=specs.x, y_scale=PartitionSpec(), y_max=PartitionSpec())
        return results

    def compute(arrays: Arrays) -> Arrays:
        given = arrange(arrays, axes, junction.norm, junction.may_be_plain)
        reason, settled = no_kernels(arrays, axes, given is not None), junction
        if reason is not None:
            if junction.implementation == "triton":
                raise ValueError(f"implementation='triton' {reason}")
            settled = dataclasses.replace(settled, implementation="xla")
        if given is None:
            if junction.eight_bits:
                raise ValueError(f"quantize= {reason}")
            return in_plain_jnp(settled, arrays, axes)
        operands, norm = given
        settled = dataclasses.replace(settled, norm=norm)
        if junction.features:
            settled = dataclasses.replace(settled, in_one=few_features(operands, settled))
        results = operator(settled, operands, forward_mode)
        like_x = results.only(("total",) if junction.features else ("y", "total", "carrier"))
        like_x = jax.tree.map(lambda a: a.reshape(arrays.x.shape), like_x)
        return results._replace(**like_x.present())

    return with_automatic_axes(compute, specs_of_results, arrays)


def _spec_of_product(rows: Any, kernel: Any) -> PartitionSpec:
    """The spec of rows of features: a mesh axis that splits the rows splits no features."""
    taken = {name for axes in rows for name in _mesh_axes(axes)}
    return PartitionSpec(*rows, *(None if taken & _mesh_axes(axes) else axes for axes in kernel[1:]))


def _mesh_axes(entry: Any) -> set[Any]:
    return {*entry} if isinstance(entry, tuple) else {entry} - {None}

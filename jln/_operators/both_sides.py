"""RMSNorm on both sides of a sum: one public function."""

from __future__ import annotations

import dataclasses

import jax
from jax.typing import DTypeLike

from jln import _checks
from jln._core.derivatives import in_one_program, with_automatic_axes
from jln._junction.arguments import Axis, Given, arranged, checked, on_several_axes
from jln._junction.both_sides import rules
from jln._junction.both_sides.signature import Operands, Results
from jln._junction.signature import Settings
from jln._routes import listed


@listed("norm")
def rms_norm_add_rms_norm(
    x: jax.Array,
    residual: jax.Array,
    x_scale: jax.Array | None = None,
    scale: jax.Array | None = None,
    *,
    axis: Axis = -1,
    epsilon: float = 1e-6,
    zero_centered_scale: bool = False,
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
    forward_mode: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Return `(rms_norm(total, scale), total)` with `total = residual + rms_norm(x, x_scale)`.

    These are the norm behind one sublayer, the sum, and the norm in front of the next (Gemma 2 and 3), with every large
    array read and written once each way. Zhang, Sennrich, "Root Mean Square Layer Normalization" (2019).

    The sum is in the promoted dtype of `x` and `residual`, made in float32 (float64 for float64) and rounded once; it
    is the rounded sum that is normalised. `x`, `total` and a row's two statistics are kept for the backward pass.
    Guarantees and errors are those of `layer_norm`.

    Rows along the last axis take one Triton kernel forward and two backward, up to 8192 elements (up to 4096 where they
    do not start on 16 bytes or the dtypes differ; of float64 a quarter of these). Wider rows, other axes, and scales
    that vary along the axis before the normalised one take one more each way, which reads the sum or its gradient
    again.

    Args:
      x: as in `layer_norm`.
      residual: `x`'s shape; any supported dtype.
      x_scale: the scale of `x`'s norm; shapes and dtypes as of `scale` in `layer_norm`.
      scale: the scale of the sum's norm; shapes and dtypes as in `layer_norm`.
      axis: as in `layer_norm`, of both norms.
      epsilon: as in `layer_norm`, of both norms.
      zero_centered_scale: multiply by `1 + x_scale` and by `1 + scale`.
      dtype: of `y`, as in `layer_norm`.
      implementation: as in `layer_norm`.
      forward_mode: as in `layer_norm`.

    Returns:
      y: `x`'s shape, in `dtype`.
      total: `x`'s shape, in the promoted dtype of `x` and `residual`.
    """
    given, axes, norm = checked(x=x, residual=residual, scale=scale, axis=axis, epsilon=epsilon, subtract_mean=False)
    x = given.x
    x_scale = _checks.parameter("x_scale", x_scale, x, axes, tuple(x.shape[a] for a in axes))
    if _checks.flag("zero_centered_scale", zero_centered_scale) and x_scale is None and given.scale is None:
        raise ValueError("zero_centered_scale=True needs a scale; got x_scale=None, scale=None")
    switches = norm.switches._replace(zero_centered_scale=bool(zero_centered_scale))
    norm = dataclasses.replace(norm, switches=switches)
    settings = Settings(norm, _checks.dtype(dtype, x.dtype), _checks.implementation(implementation))
    forward_mode = _checks.flag("forward_mode", forward_mode)
    return tuple(_called(settings, axes, forward_mode, Operands(x, given.residual, x_scale, given.scale)))


@in_one_program(static=3)
def _called(settings: Settings, axes: tuple[int, ...], forward_mode: bool, given: Operands) -> Results:
    def arranged_and_back(given: Operands) -> Results:
        x, residual, x_scale, scale = given
        # x's scale goes where an offset would, whose shapes it has.
        laid_out, norm, back = arranged(Given(x, residual, scale, x_scale), axes, settings.norm)
        operands = Operands(laid_out.x, laid_out.residual, laid_out.offset, laid_out.scale)
        results = rules.operator(dataclasses.replace(settings, norm=norm), operands, forward_mode)
        return jax.tree.map(lambda a: on_several_axes(back(a), x.shape, axes), results)

    return with_automatic_axes(arranged_and_back, lambda specs: Results(specs.x, specs.x), given)

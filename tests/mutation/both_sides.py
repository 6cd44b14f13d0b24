"""Ways to break norms behind and on both sides of a sum."""

from targets import (
    ACCURACY,
    ARRAY_TABLE,
    ARRAYS,
    BACKWARD,
    FORWARD,
    FROZEN,
    JUNCTION_RULES,
    NORM_LAUNCH,
    XLA_GRADIENTS,
    XLA_NORM,
    Mutant,
)

FAMILY = f"{ACCURACY}test_family"
KERNEL, XLA = ((f"{FAMILY}[{how}-37-100-rms_norm_add_rms_norm-float32]",) for how in ("triton", "xla"))
BEHIND, XLA_BEHIND = ((f"{FAMILY}[{how}-37-100-rms_norm_add-float32]",) for how in ("triton", "xla"))
CHUNKS = (f"{FAMILY}[triton-2-40000-rms_norm_add_rms_norm-float32]",)
MATRIX = "tests/test_matrix.py::test_"

NORMS = [
    Mutant(
        "no residual behind a norm", FORWARD,
        "y = y + (widened(added, COMPUTE) if added.dtype == tl.bfloat16 else added)", "pass", BEHIND,
    ),
    Mutant(
        "the first example's residual behind a norm for all", FORWARD,
        """rows_at(added_ptr, "added", group,""", """rows_at(added_ptr, "added", group * 0,""",
        (f"{MATRIX}reverse_mode[rms_norm_add-s-triton-vmap(grad), over all]",),
    ),
    Mutant(
        "no residual behind a norm, XLA", XLA_NORM,
        "y = y.astype(dtype) + added.astype(dtype)", "y = y.astype(dtype)", XLA_BEHIND,
    ),
    Mutant(
        "no tangent of a residual behind a norm", XLA_GRADIENTS,
        "dy = dy.astype(to) + tangents.added.astype(to)", "pass",
        (f"{MATRIX}forward_mode[rms_norm_add-s-xla-jvp]",),
    ),
    Mutant(
        "no gradient of a residual behind a norm", JUNCTION_RULES,
        "added = None if wanted.added is None else like(dy, wanted.added)", "added = None", XLA_BEHIND,
    ),
    Mutant(
        "the branch not normalised", FORWARD, "tl.fma(x * x_rstd[:, None], x_scale", "tl.fma(x, x_scale", KERNEL,
    ),
    Mutant(
        "the unrounded sum normalised", FORWARD, "residual).to(TOTAL), x_rstd  # (32)", "residual), x_rstd  # (32)",
        ("tests/test_rounded_sum.py::test_so_it_is_between_norms_on_both_sides[triton-whole]",),
    ),
    Mutant("x's mean square over the tile's columns", FORWARD, "axis=1) * (1.0 / H) + EPS", "axis=1) * 0.01 + EPS",
        (f"{FAMILY}[triton-5-4096-rms_norm_add_rms_norm-float32]",),
    ),
    Mutant("dtotal left out", BACKWARD, "dx += tl.load(dtotal_ptr", "tl.load(dtotal_ptr", KERNEL),
    Mutant("dx without its second term", BACKWARD, "u * -(c * x_rstd)[:, None])  # (36)", "u * 0.0)  # (36)", KERNEL),
    Mutant(
        "d without its second term", BACKWARD, "dx = x_hat * -(c2 * rstd)[:, None]", "dx = x_hat * 0.0", KERNEL,
    ),
    Mutant(
        "dx_scale of dy", BACKWARD, "dx_scale = tl.fma(dx, u, dx_scale)", "dx_scale = tl.fma(dy, u, dx_scale)", KERNEL,
    ),
    Mutant(
        "dx_scale of x and not of its norm", BACKWARD, "other=0.0).to(COMPUTE) * x_rstd[:, None]  # (32)",
        "other=0.0).to(COMPUTE)  # (32)", KERNEL,
    ),
    Mutant(
        "dscale after the scale", BACKWARD, "dscale = tl.fma(dy, x_hat, dscale)",
        "dscale = tl.fma(scaled, x_hat, dscale)",
        KERNEL,
    ),
    Mutant(
        "dx without x's scale", BACKWARD, "dx *= load_scale(x_scale_ptr, column, exists, NORM, BLOCK_H, COMPUTE)",
        "dx *= tl.full([BLOCK_H], 1.0, COMPUTE)", KERNEL,
    ),
    Mutant(
        "the scales' shares exchanged", NORM_LAUNCH,
        'gradients |= {name: totals[f"d{name}"] for name in sums}',
        'gradients |= {name: totals[f"d{other}"] for name, other in zip(sums, sums[::-1], strict=True)}',
        KERNEL,
    ),
    Mutant(
        "the first example's scale of x for all", BACKWARD,
        'x_scale_ptr = columns_at(x_scale_ptr, "x_scale", group, H, INTERLEAVED, SHARED)',
        'x_scale_ptr = columns_at(x_scale_ptr, "x_scale", group * 0, H, INTERLEAVED, SHARED)',
        (f"{MATRIX}reverse_mode[rms_norm_add_rms_norm-xs-triton-vmap(grad), over all]",),
    ),
    Mutant(
        "wide rows of which the branch is not normalised", XLA_NORM,
        "Arrays(x=operands.x, scale=operands.x_scale, added=operands.residual)",
        "Arrays(operands.residual, scale=operands.x_scale, added=operands.x)", CHUNKS,
    ),
    Mutant(
        "x's gradient of the cotangent of y", XLA_GRADIENTS,
        "Arrays(dy=behind.x, total=operands.x", "Arrays(dy=operands.dy, total=operands.x", XLA,
    ),
    Mutant(
        "x_scale's tangent forgotten", XLA_GRADIENTS,
        "Arrays(x=tangents.x, scale=tangents.x_scale, added", "Arrays(tangents.x, added",
        (f"{MATRIX}forward_mode[rms_norm_add_rms_norm-xs-xla-jvp]",),
    ),
    Mutant(
        "x kept although neither its gradient nor its scale's is wanted", ARRAYS,
        "names |= {*array.more} if norm.both_sides else set()", "names |= set(_NORMED) if norm.both_sides else set()",
        (f"{FROZEN}test_held_by_norms_in_front_of_a_sum[xla-rms_norm_add_rms_norm-residual-1-1-False]",),
    ),
    Mutant(
        "x's rstd made of x alone", ARRAYS,
        "x_rstd: Annotated[Any, Array(Shape.NUMBER, _SUM, is_kept=True)]",
        'x_rstd: Annotated[Any, Array(Shape.NUMBER, ("x",), is_kept=True)]',
        (f"{ARRAY_TABLE}test_results_are_made_of_what_their_lines_say[both sides-x_rstd]",),
    ),
    Mutant(
        "y unused, and dresidual forgotten", JUNCTION_RULES,
        "Arrays(residual=None if dtypes.residual is None else dtotal.astype(dtypes.residual))", "Arrays()",
        (f"{FROZEN}test_one_result_alone_of_norms_on_both_sides[xla-1]",),
    ),
]  # fmt: skip

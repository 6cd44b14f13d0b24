"""Ways to break norms behind and on both sides of a sum."""

from targets import (
    ACCURACY,
    ALONE,
    ARRAY_TABLE,
    ARRAYS,
    BACKWARD,
    COPY,
    FROZEN,
    JUNCTION_RULES,
    LINEAR_TILES,
    NORM_LAUNCH,
    NORM_TILES,
    RECORDS,
    ROW_TERMS,
    TANGENTS,
    TERMS,
    XLA_GRADIENTS,
    XLA_NORM,
    Mutant,
    first_part_of,
)

FAMILY = f"{ACCURACY}test_family"
KERNEL, XLA = ((f"{FAMILY}[{how}-37-100-rms_norm_add_rms_norm-float32]",) for how in ("triton", "xla"))
BEHIND, XLA_BEHIND = ((f"{FAMILY}[{how}-37-100-rms_norm_add-float32]",) for how in ("triton", "xla"))
CHUNKS = (f"{FAMILY}[triton-2-40000-rms_norm_add_rms_norm-float32]",)
MATRIX = "tests/transformations/test_matrix.py::test_"
GATED_KERNEL, GATED_XLA = (
    (f"{MATRIX}reverse_mode[rms_norm_add_rms_norm, gate-xsg-{how}-value_and_grad]",) for how in ("triton", "xla")
)

NORMS = [
    Mutant(
        "no residual behind a norm", TERMS,
        "y = y + (widen(added, COMPUTE) if added.dtype == tl.bfloat16 else added)", "pass", BEHIND,
    ),
    Mutant(
        "the first example's residual behind a norm for all", RECORDS, COPY, first_part_of("added"),
        (f"{MATRIX}reverse_mode[rms_norm_add-s-triton-vmap(grad), over all]",),
    ),
    Mutant(
        "no residual behind a norm, XLA", XLA_NORM,
        "y = y.astype(dtype) + added.astype(dtype)", "y = y.astype(dtype)", XLA_BEHIND,
    ),
    Mutant(
        "no tangent of a residual behind a norm", TANGENTS,
        "tangents._replace(**behind |", "tangents._replace(added=None, **behind |",
        (f"{MATRIX}forward_mode[rms_norm_add-s-xla-jvp]",),
    ),
    Mutant(
        "no gradient of a residual behind a norm", JUNCTION_RULES,
        "added = None if wanted.added is None else like(dy, wanted.added)", "added = None", XLA_BEHIND,
    ),
    Mutant(
        "the branch not normalised", TERMS, "u = x * x_rstd[:, None]", "u = x", KERNEL,
    ),
    Mutant(
        "the unrounded sum normalised", TERMS, "return total.to(TOTAL).to(COMPUTE), x_rstd", "return total, x_rstd",
        ("tests/operators/test_rounded_sum.py::test_so_it_is_between_norms_on_both_sides[triton-whole]",),
    ),
    Mutant("x's mean square over the tile's columns", TERMS, "axis=1) * (1.0 / H) + EPS", "axis=1) * 0.01 + EPS",
        (f"{FAMILY}[triton-5-4096-rms_norm_add_rms_norm-float32]",),
    ),
    Mutant("dtotal left out", BACKWARD, "dx += tl.load(a.dtotal", "tl.load(a.dtotal", KERNEL),
    Mutant("dx without its second term", BACKWARD, "u * -(c * x_rstd)[:, None])  # (36)", "u * 0.0)  # (36)", KERNEL),
    Mutant(
        "d without its second term", ROW_TERMS, "d = x_hat * -(c2 * rstd)[:, None]", "d = x_hat * 0.0", KERNEL,
    ),
    Mutant(
        "dx_scale of dy", BACKWARD, "dx_scale = tl.fma(dx, u, dx_scale)", "dx_scale = tl.fma(dy, u, dx_scale)", KERNEL,
    ),
    Mutant(
        "dx_scale of x and not of its norm", BACKWARD, ".to(COMPUTE) * x_rstd[:, None]", ".to(COMPUTE)", KERNEL,
    ),
    Mutant(
        "dscale after the scale", ROW_TERMS, "dscale = tl.fma(dy, x_hat, dscale)",
        "dscale = tl.fma(dy * scale[None, :], x_hat, dscale)",
        KERNEL,
    ),
    Mutant(
        "dx without x's scale", BACKWARD, "dx *= load_scale(a.x_scale, column, exists, NORM, BLOCK_H, COMPUTE)",
        "dx *= tl.full([BLOCK_H], 1.0, COMPUTE)", KERNEL,
    ),
    Mutant(
        "the scales' shares exchanged", NORM_LAUNCH,
        """SUMS=sums,\n    )["d"]""", """SUMS=sums[::-1],\n    )["d"]""", KERNEL,
    ),
    Mutant(
        "the first example's scale of x for all", RECORDS, COPY, first_part_of("x_scale"),
        (f"{MATRIX}reverse_mode[rms_norm_add_rms_norm-xs-triton-vmap(grad), over all]",),
    ),
    Mutant(
        "wide rows of which the branch is not normalised", XLA_NORM,
        "summands = Arrays(x=operands.x,", "summands = Arrays(x=operands.residual,", CHUNKS,
    ),
    Mutant(
        "x's gradient of the cotangent of y", XLA_GRADIENTS,
        "gradients = gradients_from_branch(pulled.x,", "gradients = gradients_from_branch(operands.dy,", XLA,
    ),
    Mutant(
        "x_scale's tangent forgotten", TANGENTS,
        "summands, tangents.only(of_sum)", "summands, tangents.only(of_sum)._replace(x_scale=None)",
        (f"{MATRIX}forward_mode[rms_norm_add_rms_norm-xs-xla-jvp]",),
    ),
    Mutant(
        "x kept although neither its gradient nor its scale's is wanted", ARRAYS,
        "names |= {*array.more} if norm.both_sides else set()", "names |= set(_U) if norm.both_sides else set()",
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
        "residual=None if dtypes.residual is None else dtotal.astype(dtypes.residual)", "residual=None",
        (f"{ALONE}test_one_result_alone_of_norms_on_both_sides[xla-1]",),
    ),
    # A gate between both
    Mutant("x's scale left out of the gate's gradient", BACKWARD,
        "branch = u * load_scale(a.x_scale, column, exists, NORM, BLOCK_H, COMPUTE)[None, :]", "branch = u",
        GATED_KERNEL,
    ),
    Mutant(
        "x's scale left out in front of a gate", TERMS, "branch = u * x_scale[None, :]", "branch = u", GATED_KERNEL,
    ),
    Mutant(
        "no gate behind a norm of the branch", TERMS,
        "apply_gate(branch, a.gate, column, exists, COMPUTE) + residual",
        "apply_gate(branch, None, column, exists, COMPUTE) + residual", GATED_KERNEL,
    ),
    Mutant("no gate behind a norm of the branch, in two calls", XLA_NORM,
        "total = apply_gate(branch(u, both, wide), operands)", "total = branch(u, both, wide)", GATED_XLA,
    ),
    Mutant("x's gradient without the gate, in two calls", XLA_GRADIENTS,
        "            dy = apply_gate(d.astype(compute_dtype(d.dtype)), arrays)\n", "            dy = d\n",
        GATED_XLA,
    ),
    Mutant(
        "a gate's gradient of x and not of its norm", XLA_NORM,
        "    if norm.both_sides:\n        return apply_statistics(",
        "    if False:\n        return apply_statistics(", GATED_XLA,
    ),
    Mutant(
        "gradients of the total alone in the compute dtype", XLA_GRADIENTS,
        "return in_dtypes(Arrays(**gradients), dtypes.only(of_branch), batch)",
        "return Arrays(**gradients)",
        (f"{ALONE}test_one_result_alone_in_16_bits[xla-rms_norm_add_rms_norm, gate-1]",),
    ),
    Mutant(
        "the sum's norm made again on both sides", NORM_LAUNCH,
        "            norm = dataclasses.replace(norm, both_sides=False)\n", "",
        (f"{FROZEN}test_some_gradients_are_those_of_all[triton-rms_norm_add_rms_norm_linear-kernel-False]",),
    ),
    Mutant("a round of columns too few on both sides", NORM_TILES, "h > 3 * 2048", "h > 2 * 2048",
        ("tests/triton/test_launch.py::test_the_widest_row_on_both_sides_of_a_float32_stream[True-6144]",),
    ),
    Mutant("LayerNorms on both sides taken for one operator", "jln/_fuse/junctions.py",
        "not (other.centres or norm.centres)", "other.centres == norm.centres",
        ("tests/fuse/test_ways_around.py::test_it_is_found_and_nothing_changes[layer_norms_on_both_sides]",),
    ),
    Mutant("Linears behind both sides in one kernel", LINEAR_TILES,
        "norm.both_sides or norm.remat", "norm.remat",
        (f"{ACCURACY}test_optional_arguments[triton-rms_norm_add_rms_norm_linear-64-no x_scale-no scale]",),
    ),
]  # fmt: skip

"""Ways to break norms behind and on both sides of a sum."""

import targets as t
from targets import Mutant

FAMILY = f"{t.ACCURACY}test_family"
KERNEL, XLA = ((f"{FAMILY}[{how}-37-100-rms_norm_add_rms_norm-float32]",) for how in ("triton", "xla"))
BEHIND, XLA_BEHIND = ((f"{FAMILY}[{how}-37-100-rms_norm_add-float32]",) for how in ("triton", "xla"))
CHUNKS = (f"{FAMILY}[triton-2-40000-rms_norm_add_rms_norm-float32]",)
MATRIX = "tests/transformations/test_matrix.py::test_"
GATED_KERNEL, GATED_XLA = (
    (f"{MATRIX}reverse_mode[rms_norm_add_rms_norm, gate-xsg-{how}-value_and_grad]",) for how in ("triton", "xla")
)

NORMS = [
    Mutant("no residual behind a norm", t.TERMS,
           "y = y + (widen(added, COMPUTE) if added.dtype == tl.bfloat16 else added)", "pass", BEHIND),
    Mutant("the first example's residual behind a norm for all", t.RECORDS, t.COPY, t.first_part_of("added"),
           (f"{MATRIX}reverse_mode[rms_norm_add-s-triton-vmap(grad), over all]",)),
    Mutant("no residual behind a norm, XLA", t.XLA_NORM, "y = y.astype(dtype) + added.astype(dtype)",
           "y = y.astype(dtype)", XLA_BEHIND),
    Mutant("no tangent of a residual behind a norm", t.TANGENTS, "tangents._replace(**behind |",
           "tangents._replace(added=None, **behind |", (f"{MATRIX}forward_mode[rms_norm_add-s-xla-jvp]",)),
    Mutant("no gradient of a residual behind a norm", t.JUNCTION_RULES,
           "added = None if wanted.added is None else like(dy, wanted.added)", "added = None", XLA_BEHIND),
    Mutant("the branch not normalised", t.TERMS, "u = x * x_rstd[:, None]", "u = x", KERNEL),
    Mutant("the unrounded sum normalised", t.TERMS, "return total.to(TOTAL).to(COMPUTE), x_rstd",
           "return total, x_rstd",
           ("tests/operators/test_rounded_sum.py::test_so_it_is_between_norms_on_both_sides[triton-whole]",)),
    Mutant("x's mean square over the tile's columns", t.TERMS, "axis=1) * (1.0 / H) + EPS", "axis=1) * 0.01 + EPS",
           (f"{FAMILY}[triton-5-4096-rms_norm_add_rms_norm-float32]",)),
    Mutant("dtotal left out", t.BACKWARD, "dx += tl.load(a.dtotal", "tl.load(a.dtotal", KERNEL),
    Mutant("dx_scale of dy", t.BACKWARD, "dx_scale = tl.fma(dx, u, dx_scale)", "dx_scale = tl.fma(dy, u, dx_scale)",
           KERNEL),
    Mutant("dx without x's scale", t.BACKWARD, "dx *= load_scale(a.x_scale, column, exists, NORM, BLOCK_H, COMPUTE)",
           "dx *= tl.full([BLOCK_H], 1.0, COMPUTE)", KERNEL),
    Mutant("the scales' shares exchanged", t.NORM_LAUNCH, """SUMS=sums,\n    )["d"]""",
           """SUMS=sums[::-1],\n    )["d"]""", KERNEL),
    Mutant("the first example's scale of x for all", t.RECORDS, t.COPY, t.first_part_of("x_scale"),
           (f"{MATRIX}reverse_mode[rms_norm_add_rms_norm-xs-triton-vmap(grad), over all]",)),
    Mutant("wide rows of which the branch is not normalised", t.XLA_NORM, "summands = Arrays(x=operands.x,",
           "summands = Arrays(x=operands.residual,", CHUNKS),
    Mutant("x's gradient of the cotangent of y", t.XLA_GRADIENTS, "gradients = gradients_from_branch(pulled.x,",
           "gradients = gradients_from_branch(operands.dy,", XLA),
    Mutant("x_scale's tangent forgotten", t.TANGENTS, "summands, tangents.only(of_sum)",
           "summands, tangents.only(of_sum)._replace(x_scale=None)",
           (f"{MATRIX}forward_mode[rms_norm_add_rms_norm-xs-xla-jvp]",)),
    Mutant("x kept although neither its gradient nor its scale's is wanted", t.ARRAYS,
           "names |= {*array.more} if norm.both_sides else set()", "names |= set(_U) if norm.both_sides else set()",
           (f"{t.FROZEN}test_held_between_forward_and_backward[xla-rms_norm_add_rms_norm-residual-1-1-False]",)),
    Mutant("x's rstd made of x alone", t.ARRAYS, "x_rstd: Annotated[Any, Array(Shape.NUMBER, _SUM, is_kept=True)]",
           'x_rstd: Annotated[Any, Array(Shape.NUMBER, ("x",), is_kept=True)]',
           (f"{t.ARRAY_TABLE}test_results_are_made_of_what_their_lines_say[both sides-float32-x_rstd]",)),
    Mutant("y unused, and dresidual forgotten", t.JUNCTION_RULES,
           "residual=None if dtypes.residual is None else dtotal.astype(dtypes.residual)", "residual=None",
           (f"{t.JUNCTION}test_one_result_alone[xla-rms_norm_add_rms_norm-H-1-False]",)),
    # A gate between both
    Mutant("x's scale left out of the gate's gradient", t.BACKWARD,
           "branch = u * load_scale(a.x_scale, column, exists, NORM, BLOCK_H, COMPUTE)[None, :]", "branch = u",
           GATED_KERNEL),
    Mutant("x's scale left out in front of a gate", t.TERMS, "branch = u * x_scale[None, :]", "branch = u",
           GATED_KERNEL),
    Mutant("no gate behind a norm of the branch", t.TERMS,
           "apply_gate(branch, a.gate, column, exists, COMPUTE) + residual",
           "apply_gate(branch, None, column, exists, COMPUTE) + residual", GATED_KERNEL),
    Mutant("no gate behind a norm of the branch, in two calls", t.XLA_NORM,
           "total = apply_gate(branch(u, both, wide), operands)", "total = branch(u, both, wide)", GATED_XLA),
    Mutant("x's gradient without the gate, in two calls", t.XLA_GRADIENTS,
           "            dy = apply_gate(d.astype(compute_dtype(d.dtype)), arrays)\n", "            dy = d\n",
           GATED_XLA),
    Mutant("a gate's gradient of x and not of its norm", t.XLA_NORM,
           "    if norm.both_sides:\n        return apply_statistics(",
           "    if False:\n        return apply_statistics(", GATED_XLA),
    Mutant("gradients of the total alone in the compute dtype", t.XLA_GRADIENTS,
           "return in_dtypes(Arrays(**gradients), dtypes.only(of_branch), batch)", "return Arrays(**gradients)",
           (f"{t.JUNCTION}test_dtypes_where_one_result_alone_is_used[xla-rms_norm_add_rms_norm-H-float16-float16-1]",)),
    Mutant("the sum's norm made again on both sides", t.NORM_LAUNCH,
           "            norm = dataclasses.replace(norm, both_sides=False)\n", "",
           (f"{t.FROZEN}test_some_gradients_are_those_of_all[triton-rms_norm_add_rms_norm_linear-kernel-False]",)),
    Mutant("a round of columns too few on both sides", t.NORM_TILES, "h > 3 * 2048", "h > 2 * 2048",
           ("tests/triton/test_launch.py::test_the_widest_row_on_both_sides_of_a_float32_stream[True-6144]",)),
    Mutant("LayerNorms on both sides taken for one operator", "jln/_fuse/junctions.py",
           "not (other.centres or norm.centres)", "other.centres == norm.centres",
           ("tests/fuse/test_ways.py::test_it_is_found_and_nothing_changes[a Linear behind norms without offsets]",)),
    Mutant("Linears behind both sides in one kernel", t.LINEAR_TILES, "norm.both_sides or norm.remat", "norm.remat",
           (f"{t.ACCURACY}test_optional_arguments[triton-rms_norm_add_rms_norm_linear-64-no x_scale-no scale]",)),
]  # fmt: skip

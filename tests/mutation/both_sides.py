"""Ways to break norms behind and on both sides of a sum."""

from targets import (
    ACCURACY,
    BOTH,
    BOTH_LAUNCH,
    BOTH_RULES,
    FORWARD,
    FROZEN,
    NORM_RULES,
    XLA_BOTH,
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
        "no tangent of a residual behind a norm", XLA_NORM,
        "dy = dy.astype(wide) + tangents.added.astype(wide)", "pass",
        (f"{MATRIX}forward_mode[rms_norm_add-s-xla-jvp]",),
    ),
    Mutant(
        "no gradient of a residual behind a norm", NORM_RULES,
        "return None if dy is None or wanted.added is None else", "return None if True else", XLA_BEHIND,
    ),
    Mutant(
        "the branch not normalised", BOTH, "tl.fma(x * x_rstd[:, None], x_scale", "tl.fma(x, x_scale", KERNEL,
    ),
    Mutant(
        "the unrounded sum normalised", BOTH, "residual).to(TOTAL)  # (32)", "residual)  # (32)",
        ("tests/test_rounded_sum.py::test_so_it_is_between_norms_on_both_sides[triton-whole]",),
    ),
    Mutant("x's mean square over the tile's columns", BOTH, "axis=1) * (1.0 / H) + EPS", "axis=1) * 0.01 + EPS",
        (f"{FAMILY}[triton-5-4096-rms_norm_add_rms_norm-float32]",),
    ),
    Mutant("dtotal left out", BOTH, "d += tl.load(dtotal_ptr", "tl.load(dtotal_ptr", KERNEL),
    Mutant("dx without its second term", BOTH, "u * -(c * x_rstd)[:, None])  # (36)", "u * 0.0)  # (36)", KERNEL),
    Mutant(
        "d without its second term", BOTH, "x_hat * -(c2 * rstd)[:, None])  # (9)", "x_hat * 0.0)  # (9)", KERNEL,
    ),
    Mutant(
        "dx_scale of dy", BOTH, "dx_scale = tl.fma(d, u, dx_scale)", "dx_scale = tl.fma(dy, u, dx_scale)", KERNEL,
    ),
    Mutant(
        "dx_scale of x and not of its norm", BOTH, "other=0.0).to(COMPUTE) * x_rstd[:, None]  # (32)",
        "other=0.0).to(COMPUTE)  # (32)", KERNEL,
    ),
    Mutant(
        "dscale after the scale", BOTH, """dscale = tl.fma(dy, x_hat, dscale)""",
        "dscale = tl.fma(dy * load_scale(scale_ptr, column, exists, NORM, BLOCK_H, COMPUTE)[None, :], x_hat, dscale)",
        KERNEL,
    ),
    Mutant(
        "dx without x's scale", BOTH, "d *= load_scale(x_scale_ptr, column, exists, NORM, BLOCK_H, COMPUTE)[None, :]",
        "d *= 1.0", KERNEL,
    ),
    Mutant(
        "the scales' shares exchanged", BOTH_LAUNCH,
        """as_of_norm = {"dscale": "dscale", "dx_scale": "dgate"}""",
        """as_of_norm = {"dx_scale": "dscale", "dscale": "dgate"}
        sums = sums[::-1]""",
        KERNEL,
    ),
    Mutant(
        "the first example's scale of x for all", BOTH,
        """        x_scale_ptr += copy_of(group, SHARED, "x_scale", 1) * H
    if dx_ptr""",
        """        x_scale_ptr += 0
    if dx_ptr""",
        (f"{MATRIX}reverse_mode[rms_norm_add_rms_norm-xs-triton-vmap(grad), over all]",),
    ),
    Mutant(
        "wide rows of which the branch is not normalised", XLA_BOTH,
        "summands = of_norm.Operands(x, scale=x_scale, added=residual)",
        "summands = of_norm.Operands(residual, scale=x_scale, added=x)", CHUNKS,
    ),
    Mutant(
        "x's gradient of the cotangent of y", XLA_BOTH,
        "in_front = of_norm.Cotangents(d, None, x, x_scale", "in_front = of_norm.Cotangents(dy, None, x, x_scale", XLA,
    ),
    Mutant(
        "x_scale's tangent forgotten", XLA_BOTH,
        "of_norm.Operands(tangents.x, scale=tangents.x_scale, added", "of_norm.Operands(tangents.x, added",
        (f"{MATRIX}forward_mode[rms_norm_add_rms_norm-xs-xla-jvp]",),
    ),
    Mutant(
        "x kept although neither its gradient nor its scale's is wanted", BOTH_RULES,
        "a if of_x or a is None else Unneeded(a)", "a",
        (f"{FROZEN}test_held_by_norms_in_front_of_a_sum[xla-rms_norm_add_rms_norm-residual-1-1-False]",),
    ),
    Mutant(
        "y unused, and dresidual forgotten", BOTH_RULES,
        "dresidual = None if wanted.residual is None else dtotal.astype(wanted.residual)", "dresidual = None",
        (f"{FROZEN}test_one_result_alone_of_norms_on_both_sides[xla-1]",),
    ),
]  # fmt: skip

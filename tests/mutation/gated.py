"""Ways to break gated norms, and groups whose rows lie interleaved."""

from targets import (
    ACCESS,
    ARRAYS,
    BACKWARD,
    EXECUTED,
    FORWARD,
    GATED,
    GEOMETRY,
    JUNCTION_RULES,
    NORM_ARGUMENTS,
    NORM_LAUNCH,
    ROW_TERMS,
    TERMS,
    XLA_GRADIENTS,
    XLA_NORM,
    Mutant,
)

VALUES = f"{GATED}test_values_and_every_gradient"
FIRST, LAST = (
    {how: (f"{VALUES}[{how}-the {form} first-shared--1]",) for how in ("triton", "xla")} for form in ("norm", "gate")
)
GROUPS = (f"{VALUES}[triton-the gate first-over the last--1]",)
GROUPS_SIDE_BY_SIDE = (f"{VALUES}[triton-the norm first-over an axis in the middle-2]",)
GROUPS_OF_TILES = (
    f"{EXECUTED}test_gated.py::test_groups[rms_norm_gated,norm_before_gate=False-40x4x128-bfloat16-small-h200-"
    "of_groups=True]",
)
IN_CHUNKS = (f"{GATED}test_accuracy[triton-rms_norm_gated, norm_before_gate=False-(2, 20000)-float32]",)
SHARED = (f"{GATED}test_groups_under_vmap_of_some_arguments[triton]",)

GATED_NORMS = [
    Mutant("silu' without its second term", TERMS, "tl.fma(u, 1.0 - share, share)", "share", FIRST["triton"]),
    Mutant(
        "silu' of the logistic alone", TERMS, "tl.fma(u, 1.0 - share, share)", "share * (1.0 - share)", LAST["triton"]
    ),
    Mutant(
        "the gate left out of the norm's result",
        TERMS,
        "y *= u  # (42)",
        "pass",
        FIRST["triton"],
    ),
    Mutant(
        "the gate left out of what is normalised",
        TERMS,
        "u, _ = load_silu(x_z_ptr, at, mask, COMPUTE)\n        x *= u",
        "pass",
        LAST["triton"],
    ),
    Mutant(
        "dy without the gate behind it",
        ROW_TERMS,
        "        dy *= u  # (42)\n",
        "        pass\n",
        FIRST["triton"],
    ),
    Mutant(
        "x without the gate, backward",
        ROW_TERMS,
        "        of_dz *= x\n        x *= u  # (41)\n",
        "        of_dz *= x\n",
        LAST["triton"],
    ),
    Mutant(
        "dz of dy that is gated",
        ROW_TERMS,
        "        of_dz *= dy\n        dy *= u  # (42)\n",
        "        dy *= u\n        of_dz *= dy\n",
        FIRST["triton"],
    ),
    Mutant(
        "dz of x that is gated",
        ROW_TERMS,
        "        of_dz *= x\n        x *= u  # (41)\n",
        "        x *= u\n        of_dz *= x\n",
        LAST["triton"],
    ),
    Mutant(
        "dz without the scale", BACKWARD, "dz = of_dz * (x_hat * scale[None, :])", "dz = of_dz * x_hat", FIRST["triton"]
    ),
    Mutant("dz of dx that is gated", BACKWARD, "(dx * of_dz).to(", "(dx * u * of_dz).to(", LAST["triton"]),
    Mutant(
        "dx without the gate", BACKWARD, "                dx *= u  # (44)\n", "                pass\n", LAST["triton"]
    ),
    Mutant(
        "z left out of the row sums",
        ROW_TERMS,
        "x_z_ptr, z_ptr, base, at, mask, exists, mean, rstd, scale, COMPUTE\n        )\n        c1 +=",
        "None, None, base, at, mask, exists, mean, rstd, scale, COMPUTE\n        )\n        c1 +=",
        IN_CHUNKS,
    ),
    Mutant(
        "another group's z",
        FORWARD,
        'rows_at(x_z_ptr, "x_z", group, rows, H, INNER, INTERLEAVED, SHARED, base)',
        'rows_at(x_z_ptr, "x_z", group * 0, rows, H, INNER, INTERLEAVED, SHARED, base)',
        GROUPS,
    ),
    Mutant(
        "a frozen x's dx written beside dz",
        NORM_LAUNCH,
        "    plan_of = functools",
        "    results = g.results(dtypes._replace(x=dtypes.x or dtypes.z))\n    plan_of = functools",
        (f"{GATED}test_one_kernel_each_way_and_a_reduction[the norm first-('z',)-[('backward_kernel', 'dz')]]",),
    ),
    Mutant(
        "dz pulled back where the norm goes first",
        NORM_LAUNCH,
        "dtypes._replace(scale=None, offset=None, z=None, y=None)",
        "dtypes._replace(scale=None, offset=None, y=None)",
        (f"{GATED}test_dz_alone_needs_no_row_sums",),
    ),
    # In jnp
    Mutant("silu' without its second term, XLA", XLA_NORM, "share + u * (1 - share)", "share", FIRST["xla"]),
    Mutant(
        "the gate left out of the norm's result, XLA",
        XLA_NORM,
        "y = wide(Product(y, operands.z))  # (42)",
        "pass",
        FIRST["xla"],
    ),
    Mutant(
        "the gate left out of what is normalised, XLA", XLA_NORM, "read = Product(x, operands.x_z)", "pass", LAST["xla"]
    ),
    Mutant(
        "dy without the gate behind it, XLA",
        XLA_GRADIENTS,
        "dy = Product(dy, operands.z)",
        "dy = Product(dy, jnp.ones_like(z))",
        FIRST["xla"],
    ),
    Mutant(
        "dx without the gate, XLA",
        XLA_GRADIENTS,
        'gradients["x"] = wide(Product(gradients["x"], total.z))',
        "pass",
        LAST["xla"],
    ),
    Mutant(
        "dz without the scale, XLA",
        XLA_GRADIENTS,
        'gradients["z"] = by * x_hat * slope',
        'gradients["z"] = dy.a.astype(dtype) * x_hat * slope',
        FIRST["xla"],
    ),
    Mutant(
        "z's tangent dropped, the gate first",
        XLA_GRADIENTS,
        "pairs = ((tangents.x, u), (tangents.x_z, total.astype(dtype) * slope))",
        "pairs = ((tangents.x, u),)",
        ("tests/transformations/test_matrix.py::test_forward_mode[rms_norm_gated, norm_before_gate=False-s-xla-jvp]",),
    ),
    Mutant(
        "z's tangent without the scale",
        XLA_GRADIENTS,
        "x_hat * s * slope * tangents.z",
        "x_hat * slope * tangents.z",
        ("tests/transformations/test_matrix.py::test_forward_mode[rms_norm_gated-s-xla-jvp]",),
    ),
    Mutant(
        "the tangent not gated",
        XLA_GRADIENTS,
        "        dy = dy * u  # (46)\n",
        "        pass\n",
        ("tests/transformations/test_matrix.py::test_forward_mode[rms_norm_gated-s-xla-jvp]",),
    ),
    # Groups that lie interleaved
    Mutant("rows of a group taken for neighbours", ACCESS, "first * (H * groups)", "first * H", GROUPS_OF_TILES),
    Mutant("a group's first row where its block's is", ACCESS, "+ group % groups * (H * INTERLEAVED.run)", "", GROUPS),
    Mutant("a group's statistics where its block's are", ACCESS, "+ group % groups * INTERLEAVED.run", "", GROUPS),
    Mutant(
        "outer rows of one group together",
        ACCESS,
        "outer * (run * groups) + inner",
        "outer * run + inner",
        GROUPS_SIDE_BY_SIDE,
    ),
    Mutant(
        "runs of rows of one group taken for neighbours",
        GEOMETRY,
        "self.inner if self.inner > 1 else math.prod(self.shape[end:h])",
        "self.inner",
        (f"{VALUES}[triton-the norm first-over an axis in the middle--1]",),
    ),
    Mutant(
        "neighbouring programs in one group",
        ACCESS,
        "group = together // tiles * INTERLEAVED.groups + tl.program_id(0) % INTERLEAVED.groups",
        "group = together // tiles * INTERLEAVED.groups + together % INTERLEAVED.groups",
        GROUPS,
    ),
    Mutant(
        "one copy of what is shared for all groups",
        ACCESS,
        "return group % INTERLEAVED.groups",
        "return group * 0",
        SHARED,
    ),
    Mutant(
        "groups in one that lie interleaved",
        GEOMETRY,
        "geometry.grouped or geometry.norm.interleaved else None",
        "geometry.grouped else None",
        GROUPS,
    ),
    Mutant(
        "a sum of all groups",
        ARRAYS,
        "of_examples = {*self.axes_of_examples(len(x), batch_dims)}",
        "of_examples = {*range(batch_dims + self.examples)}",
        GROUPS,
    ),
    Mutant(
        "x transposed for its groups' sake",
        NORM_ARGUMENTS,
        "interleaved = len(examples) - in_front",
        "interleaved = 0",
        (f"{GATED}test_parameters_of_groups_transpose_nothing[layer_norm--1-(1, 1, 5, 8)-(1, 4, 1, 5, 8)]",),
    ),
    Mutant(
        "z not kept",
        JUNCTION_RULES,
        "there = operands._replace(total=total,",
        "there = operands._replace(z=None, total=total,",
        FIRST["xla"],
    ),
]

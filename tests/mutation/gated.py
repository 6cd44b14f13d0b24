"""Ways to break gated norms, and heads with parameters of their own."""

import targets as t
from targets import Mutant

VALUES = f"{t.JUNCTION}test_values_and_every_gradient"
FIRST, LAST = (
    {how: (f"{VALUES}[{how}-the {form} first-no gate-shared--1]",) for how in ("triton", "xla")}
    for form in ("norm", "gate")
)
HEADS = (f"{VALUES}[triton-the gate first-no gate-over the last--1]",)
HEADS_OF_GROUPS = (f"{t.JUNCTION}test_values_and_every_gradient[triton-layer_norm-no gate-over the outer ones--1]",)
TILES_OF_HEADS = (
    f"{t.EXECUTED}test_norms.py::test_norms[rms_norm_gated,norm_before_gate=False-40x4x128-bfloat16-small-"
    "h200-of_heads=True]",
)
IN_CHUNKS = (f"{t.ACCURACY}test_family[triton-2-20000-rms_norm_gated, norm_before_gate=False-float32]",)
SHARED = (f"{t.JUNCTION}test_heads_under_vmap_of_some_arguments[triton]",)

GATED_NORMS = [
    Mutant("silu' without its second term", t.TERMS, "tl.fma(u, 1.0 - share, share)", "share", FIRST["triton"]),
    Mutant("the gate left out of the norm's result", t.TERMS, "y *= u  # (42)", "pass", FIRST["triton"]),
    Mutant("the gate left out of what is normalised", t.TERMS,
           "u, _ = load_silu(a.x_z + base, at, mask, COMPUTE)\n        x *= u", "pass", LAST["triton"]),
    Mutant("dy without the gate behind it", t.ROW_TERMS, "        dy *= u  # (42)\n", "        pass\n",
           FIRST["triton"]),
    Mutant("x without the gate, backward", t.ROW_TERMS, "        of_dz *= x\n        x *= u  # (41)\n",
           "        of_dz *= x\n", LAST["triton"]),
    Mutant("dz without the scale", t.BACKWARD, "dz = of_dz * (x_hat * scale[None, :])", "dz = of_dz * x_hat",
           FIRST["triton"]),
    Mutant("dz of dx that is gated", t.BACKWARD, "(dx * of_dz).to(", "(dx * u * of_dz).to(", LAST["triton"]),
    Mutant("dx without the gate", t.BACKWARD, "                dx *= u  # (44)\n", "                pass\n",
           LAST["triton"]),
    Mutant("z left out of the row sums", t.NORM_LAUNCH, """ready.only(("dy", "total", "x_z", "z", "scale",""",
           """ready.only(("dy", "total", "scale",""", IN_CHUNKS),
    Mutant("another group's z", t.RECORDS, t.COPY, t.first_part_of("x_z"), HEADS),
    Mutant("a frozen x's dx written beside dz", t.NORM_LAUNCH, "plan.tile, g.results(dtypes)",
           "plan.tile, g.results(dtypes._replace(x=dtypes.x or dtypes.z))",
           (f"{t.JUNCTION_COSTS}test_one_kernel_each_way_and_a_reduction[the norm first, z alone]",)),
    Mutant("dz pulled back where the norm goes first", t.NORM_LAUNCH,
           "dtypes._replace(scale=None, offset=None, z=None, y=None)",
           "dtypes._replace(scale=None, offset=None, y=None)",
           (f"{t.JUNCTION_COSTS}test_one_kernel_each_way_and_a_reduction[the norm first, z alone of wide rows]",)),
    # In jnp
    Mutant("silu' without its second term, XLA", t.XLA_NORM, "share + u * (1 - share)", "share", FIRST["xla"]),
    Mutant("the gate left out of the norm's result, XLA", t.XLA_NORM, "y = wide(Product(y, operands.z))  # (42)",
           "pass", FIRST["xla"]),
    Mutant("the gate left out of what is normalised, XLA", t.XLA_NORM, "read = Product(x, operands.x_z)", "pass",
           LAST["xla"]),
    Mutant("dy without the gate behind it, XLA", t.XLA_GRADIENTS, "dy = Product(dy, operands.z)",
           "dy = Product(dy, jnp.ones_like(z))", FIRST["xla"]),
    Mutant("dx without the gate, XLA", t.XLA_GRADIENTS, 'gradients["x"] = wide(Product(gradients["x"], total.z))',
           "pass", LAST["xla"]),
    Mutant("dz without the scale, XLA", t.XLA_GRADIENTS, 'gradients["z"] = by * x_hat * slope',
           'gradients["z"] = dy.a.astype(dtype) * x_hat * slope', FIRST["xla"]),
    # Heads next to H
    Mutant("tiles of a head taken for neighbours", t.ACCESS, "first * (H * HEADS)", "first * H", TILES_OF_HEADS),
    Mutant("rows of a head taken for neighbours", t.ACCESS, "local.to(wide) * (H * HEADS)", "local.to(wide) * H",
           HEADS),
    Mutant("a head's first row where the first head's is", t.ACCESS, "+ group % HEADS * H", "", HEADS),
    Mutant("heads of one group apart", t.ACCESS, "(H * HEADS)) + group", "H) + group", HEADS_OF_GROUPS),
    Mutant("one copy of what is shared for all heads", t.RECORDS, "group % HEADS if contains", "group * 0 if contains",
           SHARED),
    Mutant("heads in one group", t.GEOMETRY, "return () if geometry.norm.heads else None", "return None", HEADS),
    Mutant("a sum of all heads", t.ARRAYS, "[ndim - 2] * self.heads]", "[ndim - 2] * 0]", HEADS),
    Mutant("parameters of heads left to plain jnp", t.NORM_ARGUMENTS, "heads = others == {h - 1} and h == len(x) - 1",
           "heads = False", HEADS),
    Mutant("z not kept", t.JUNCTION_RULES, "there = operands._replace(total=total,",
           "there = operands._replace(z=None, total=total,", FIRST["xla"]),
]  # fmt: skip

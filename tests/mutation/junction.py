"""Ways to break x_bias, gates and parameters of each example, and residuals of modules."""

import targets as t
from targets import Mutant

VALUES = f"{t.JUNCTION}test_values_and_every_gradient"
# Of H elements; each example's own, with a scale and an offset.
OF_H, OF_EXAMPLES = (
    {how: (f"{VALUES}[{how}-add_layer_norm-{kind}--1]",) for how in ("triton", "xla")}
    for kind in ("H-shared", "by example-by example")
)
CALLS, MODULES = "jln/_modules.py", "tests/modules/test_norms.py::test_"
SEVERAL_PROGRAMS = (f"{t.ACCURACY}test_family[triton-150-127-add_layer_norm, x_bias and gate-float32]",)
GATED = "dx = apply_gate(dx, a.gate, column, exists, COMPUTE)"

SUMS = [
    Mutant("x_bias left out of the sum", t.TERMS,
           "x += tl.load(a.x_bias + column, mask=exists, other=0.0).to(COMPUTE)[None, :]", "pass", OF_H["triton"]),
    Mutant("a gate left out of dx", t.BACKWARD, GATED, "pass", OF_H["triton"]),
    Mutant("no total where nothing is added", t.JUNCTION_RULES,
           "operands.x if operands.residual is None and junction.gives_total else outcome.total", "outcome.total",
           (f"{VALUES}[xla-add_layer_norm-nothing added-shared--1]",)),
    Mutant("all sums' shares in the first one's place", t.ROW_TERMS,
           "first = position(SUMS, NAME) * programs_of_all_groups", "first = 0 * programs_of_all_groups",
           SEVERAL_PROGRAMS),
    Mutant("every sum of the first one's shares", t.BACKWARD, "shares_ptr += (which * groups + group)",
           "shares_ptr += group", SEVERAL_PROGRAMS),
    Mutant("the first example's gate for all", t.RECORDS, t.COPY, t.first_part_of("gate"), OF_EXAMPLES["triton"]),
    Mutant("x_bias left out of the sum, XLA", t.XLA_NORM,
           "return x if arrays.x_bias is None else x + arrays.x_bias.astype(dtype)", "return x", OF_H["xla"]),
    Mutant("a gate left out of dx, XLA", t.XLA_GRADIENTS, "dx = apply_gate(d, arrays)", "dx = d", OF_H["xla"]),
    Mutant("dx_bias before the gate, XLA", t.XLA_GRADIENTS, 'return dx if name == "x" else sum_over_rows(dx)',
           'return dx if name == "x" else sum_over_rows(d)', OF_H["xla"]),
    Mutant("a gate's tangent without x_bias", t.TANGENTS, "summands = saved.only(of_sum)",
           "summands = saved.only(of_sum)._replace(x_bias=None)",
           ("tests/transformations/test_matrix.py::test_forward_mode[add_layer_norm, x_bias and gate-soxg-xla-jvp]",)),
    Mutant("a row's gate written out for kernels, be there few rows", t.NORM_ARGUMENTS,
           "for i in (*own, h) if x[i] != 1", "for i in own if x[i] != 1",
           (f"{t.JUNCTION}test_gates_of_rows_run_plain_jnp",)),
    Mutant("x kept although no gate's gradient is wanted", t.JUNCTION_RULES, "there if name in reads else unneeded",
           'there if name in reads or name == "x" else unneeded',
           (f"{t.JUNCTION_COSTS}test_held_between_forward_and_backward[xla-add_layer_norm-H-some0-1-2-False]",)),
    Mutant("a module's residual left out of the framework's own code", CALLS,
           "x.astype(like.dtype) + residual.astype(like.dtype)", "x.astype(like.dtype)",
           (f"{MODULES}path[linen mask=given]",)),
    Mutant("a module's residual of any shape", CALLS, """_checks.shape("residual", residual, x.shape, "that of x")""",
           "pass", (f"{MODULES}residuals_that_are_rejected_and_none[nnx mask]",)),
]  # fmt: skip

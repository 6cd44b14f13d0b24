"""Ways to break x_bias, gates and parameters of each example, and residuals of modules."""

from targets import (
    BACKWARD,
    FORWARD,
    JUNCTION,
    JUNCTION_MESH,
    JUNCTION_RULES,
    NORM_LAUNCH,
    ROW_TERMS,
    TERMS,
    XLA_GRADIENTS,
    XLA_NORM,
    Mutant,
)

VALUES = f"{JUNCTION}test_values_and_every_gradient"
# Of H elements; one a row; each example's own, with a scale and an offset.
OF_H, OF_ROWS, OF_EXAMPLES = (
    {how: (f"{VALUES}[{how}-add_layer_norm-{kind}--1]",) for how in ("triton", "xla")}
    for kind in ("H-shared", "rows-shared", "by example-by example")
)
CALLS, MODULES = "jln/_modules.py", "tests/modules/test_sums.py::test_"
CHUNKS_OF_ROWS = (f"{JUNCTION}test_accuracy[triton-add_layer_norm, x_bias and gate-rows-(2, 20000)-float32]",)
SEVERAL_PROGRAMS = (f"{JUNCTION}test_accuracy[triton-add_layer_norm, x_bias and gate-H-(150, 127)-float32]",)
GATED = "dx = gated(dx, gate_ptr, row_gate_ptr, row_gate, column, exists, COMPUTE)"

SUMS = [
    Mutant(
        "x_bias left out of the sum", TERMS,
        "x += tl.load(x_bias_ptr + column, mask=exists, other=0.0).to(COMPUTE)[None, :]", "pass", OF_H["triton"],
    ),
    Mutant(
        "x_bias left out of a gate's gradient", BACKWARD, "branch = load_branch(x_ptr + base, x_bias_ptr, at",
        "branch = load_branch(x_ptr + base, None, at", OF_H["triton"],
    ),
    Mutant("a gate left out of dx", BACKWARD, GATED, "pass", OF_H["triton"]),
    Mutant(
        "no total where nothing is added", JUNCTION_RULES,
        "operands.x if operands.residual is None and junction.gives_total else outcome.total", "outcome.total",
        (f"{VALUES}[xla-add_layer_norm-nothing added-shared--1]",),
    ),
    Mutant(
        "dx_bias before the gate", BACKWARD,
        f"            {GATED}\n            if contains(SUMS, \"dx_bias\"):\n                dx_bias += dx  # (26)\n",
        f"            if contains(SUMS, \"dx_bias\"):\n                dx_bias += dx  # (26)\n            {GATED}\n",
        OF_H["triton"],
    ),
    Mutant(
        "dresidual of the gated cotangent", BACKWARD,
        "dresidual_ptr + base + at, dx.to(",
        f"dresidual_ptr + base + at, {GATED.removeprefix('dx = ').replace('row_gate, column', 'rstd, column')}.to(",
        OF_H["triton"],
    ),
    Mutant(
        "another row's gate", BACKWARD,
        f"load_vector(row_gate_ptr, row, valid, BLOCK_ROWS, COMPUTE)\n            {GATED}",
        f"load_vector(row_gate_ptr, rows - 1 - row, valid, BLOCK_ROWS, COMPUTE)\n            {GATED}",
        OF_ROWS["triton"],
    ),
    Mutant(
        "all chunks' shares of a row's gate in one place", BACKWARD,
        """"drow_gate", chunk * groups + group,""", """"drow_gate", group,""",
        CHUNKS_OF_ROWS,
    ),
    Mutant(
        "a row's gate's gradient of one chunk", NORM_LAUNCH,
        'jnp.sum(gradients["row_gate"], axis=0)', 'gradients["row_gate"][0]', CHUNKS_OF_ROWS,
    ),
    Mutant(
        "all sums' shares in the first one's place", ROW_TERMS,
        "first = position(SUMS, NAME) * programs_of_all_groups", "first = 0 * programs_of_all_groups",
        SEVERAL_PROGRAMS,
    ),
    Mutant(
        "every sum of the first one's shares", BACKWARD,
        "shares_ptr += (which * groups + group)", "shares_ptr += group", SEVERAL_PROGRAMS,
    ),
    Mutant(
        "the first example's gate for all", FORWARD,
        'gate_ptr = columns_at(gate_ptr, "gate", group, H, SHARED, HEADS)',
        'gate_ptr = columns_at(gate_ptr, "gate", group * 0, H, SHARED, HEADS)',
        OF_EXAMPLES["triton"],
    ),
    Mutant(
        "x_bias left out of the sum, XLA",
        XLA_NORM,
        "return x if arrays.x_bias is None else x + arrays.x_bias.astype(dtype)",
        "return x",
        OF_H["xla"],
    ),
    Mutant(
        "x_bias left out of a gate's gradient, XLA", XLA_GRADIENTS,
        "of_elements = d * branch(arrays, norm, d.dtype)",
        "of_elements = d * branch(arrays._replace(x_bias=None), norm, d.dtype)", OF_H["xla"],
    ),
    Mutant(
        "a gate left out of dx, XLA", XLA_GRADIENTS, "dx = gated(d, arrays)", "dx = d",
        OF_ROWS["xla"],
    ),
    Mutant(
        "dx_bias before the gate, XLA", XLA_GRADIENTS, 'return dx if name == "x" else sum_over_rows(dx)',
        'return dx if name == "x" else sum_over_rows(d)', OF_H["xla"],
    ),
    Mutant(
        "a gate's tangent without x_bias", XLA_GRADIENTS,
        "yield a.astype(dtype) * branch(saved, norm, dtype)",
        "yield a.astype(dtype) * branch(saved._replace(x_bias=None), norm, dtype)",
        ("tests/transformations/test_matrix.py::test_forward_mode[add_layer_norm, x_bias and gate-soxg-xla-jvp]",),
    ),
    Mutant(
        "a row's gate's gradient of a device's part of H", XLA_GRADIENTS,
        "return lax.psum(share, h_axes) if h_axes else share", "return share",
        (f"{JUNCTION_MESH}test_gradient_under_jit[add_layer_norm-rows-shared-examples and H-parameters in parts]",),
    ),
    Mutant(
        "x kept although no gate's gradient is wanted",
        JUNCTION_RULES,
        "there if name in reads else unneeded",
        'there if name in reads or name == "x" else unneeded',
        ("tests/operators/test_junction_costs.py::test_held_between_forward_and_backward[xla-H-some0-1-2-False]",),
    ),
    Mutant(
        "a module's residual left out of the framework's own code", CALLS,
        "x.astype(dtype) + residual.astype(dtype)", "x.astype(dtype)",
        (f"{MODULES}what_the_operators_lack_is_the_frameworks_own_code_on_the_sum[linen mask is given]",),
    ),
    Mutant(
        "a module's residual of any shape", CALLS,
        """_checks.shape("residual", residual, x.shape, "that of x")""", "pass",
        (f"{MODULES}what_the_operators_lack_is_the_frameworks_own_code_on_the_sum[nnx mask is given]",),
    ),
]  # fmt: skip

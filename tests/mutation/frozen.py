"""Ways to compute, or to hold, what nobody wants."""

from targets import (
    ARRAY_TABLE,
    ARRAYS,
    DERIVATIVES,
    FROZEN,
    JUNCTION_RULES,
    LINEAR_LAUNCH,
    NORM_LAUNCH,
    OPERATION,
    Mutant,
)

FROZEN_ARGUMENTS = [
    # What is frozen
    Mutant(
        "dx of a frozen x written",
        NORM_LAUNCH,
        "by_programs = results if",
        "results = results._replace(x=results.x or g.results(Arrays(x=total)).x)\n    by_programs = results if",
        (f"{FROZEN}test_launches[norm-scale-asked for]",),
    ),
    Mutant(
        "dscale of a frozen scale",
        NORM_LAUNCH,
        "sums = tuple(name for name in COLUMNS if getattr(dtypes, name) is not None)",
        "sums = COLUMNS[:2]",
        (f"{FROZEN}test_launches[norm-x-asked for]",),
    ),
    Mutant(
        "row sums of rows too wide, without a dx",
        NORM_LAUNCH,
        "if plan.sums is not None and pulls:",
        "if plan.sums is not None:",
        (f"{FROZEN}test_wide_rows_without_dx_need_no_sums",),
    ),
    Mutant(
        "doffset alone of a part of the rows",
        LINEAR_LAUNCH,
        "sums = norms.column_sums(rows, dtype, batch_dims)",
        "sums = norms.column_sums(rows[..., 1:, :], dtype, batch_dims)",
        (f"{FROZEN}test_some_gradients_are_those_of_all[triton-layer_norm_linear-offset-False]",),
    ),
    Mutant(
        "what is not used computed",
        OPERATION,
        "partial_eval.dce_rules[primitive] = self._drop_unused",
        "pass",
        (f"{FROZEN}test_launches[norm-scale-used]",),
    ),
    Mutant(
        "vmap's axis dropped with an operand",
        OPERATION,
        "kept_places = set(range(len(eqn.invars)))",
        "pass",
        (f"{FROZEN}test_an_unused_result_may_have_brought_the_axis_of_vmap[xla-offset]",),
    ),
    Mutant(
        "residuals whose number hangs on what is wanted",
        DERIVATIVES,
        "a.nothing() if isinstance(a, Unneeded)",
        "None if isinstance(a, Unneeded)",
        (f"{FROZEN}test_differentiated_by_one_argument_then_another[xla-jit]",),
    ),
    Mutant(
        "x kept for an offset",
        JUNCTION_RULES,
        "reads = _reads(junction, operands, wanted)",
        'reads = _reads(junction, operands, wanted) | {"total", "mean", "rstd"}',
        (f"{FROZEN}test_held_between_forward_and_backward[xla-layer_norm-offset-0-False]",),
    ),
    Mutant(
        "another's gradient wanted",
        DERIVATIVES,
        "for n in a.shape[1:]",
        "for n in a.shape[:0:-1]",
        (f"{FROZEN}test_some_gradients_of_a_fused_linear[x+scale+offset+bias]",),
    ),
    Mutant(
        "residuals whose structure hangs on what is wanted",
        DERIVATIVES,
        "(kept, _Static(dtypes), _residuals_of(",
        "(kept, _Static(_only(dtypes, flags)), _residuals_of(",
        (f"{FROZEN}test_differentiated_by_one_argument_then_another[xla-jit]",),
    ),
    Mutant(
        "all operands needed, whatever is wanted",
        ARRAYS,
        "    wanted = [name for name, dtype in results.present().items() if jax.tree.leaves(dtype)]",
        "    wanted = [name for name in TABLE if name not in OPERANDS]",
        (f"{ARRAY_TABLE}test_results_are_made_of_operands",),
    ),
    Mutant(
        "what is not needed passed all the same",
        OPERATION,
        "a if name in names else jax.tree.map(lambda _: None, a)",
        "a",
        (f"{FROZEN}test_launches[norm-offset-used]",),
    ),
    Mutant(
        "the mean forgotten among what dscale is made of",
        ARRAYS,
        '_X_HAT = ("total", "mean", "rstd", "x_z")',
        '_X_HAT = ("total", "rstd", "x_z")',
        (f"{FROZEN}test_some_gradients_are_those_of_all[xla-layer_norm-scale-False]",),
    ),
]

"""Ways to compute, or to hold, what nobody wants."""

import targets as t
from targets import Mutant

FROZEN_ARGUMENTS = [
    # What is frozen
    Mutant("dx of a frozen x written", t.NORM_LAUNCH, "by_programs = results if",
           "results = results._replace(x=results.x or g.results(Arrays(x=total)).x)\n    by_programs = results if",
           (f"{t.FROZEN}test_launches[norm-scale-asked for]",)),
    Mutant("dscale of a frozen scale", t.NORM_LAUNCH,
           "sums = tuple(name for name in COLUMNS if getattr(dtypes, name) is not None)", "sums = COLUMNS[:2]",
           (f"{t.FROZEN}test_launches[norm-x-asked for]",)),
    Mutant("row sums of rows too wide, without a dx", t.NORM_LAUNCH, "if plan.sums is not None and pulls:",
           "if plan.sums is not None:", (f"{t.FROZEN}test_wide_rows_without_dx_need_no_sums",)),
    Mutant("doffset alone of a part of the rows", t.LINEAR_LAUNCH, "sums = norms.column_sums(rows, dtype, batch_dims)",
           "sums = norms.column_sums(rows[..., 1:, :], dtype, batch_dims)",
           (f"{t.FROZEN}test_some_gradients_are_those_of_all[triton-layer_norm_linear-offset-False]",)),
    Mutant("what is not used computed", t.OPERATION, "partial_eval.dce_rules[primitive] = self._drop_unused", "pass",
           (f"{t.FROZEN}test_launches[norm-scale-used]",)),
    Mutant("vmap's axis dropped with an operand", t.OPERATION, "kept_places = set(range(len(eqn.invars)))", "pass",
           (f"{t.FROZEN}test_an_unused_result_may_have_brought_the_axis_of_vmap[xla-offset]",)),
    Mutant("residuals whose number hangs on what is wanted", t.DERIVATIVES, "a.nothing() if isinstance(a, Unneeded)",
           "None if isinstance(a, Unneeded)",
           (f"{t.FROZEN}test_differentiated_by_one_argument_then_another[xla-jit]",)),
    Mutant("x kept for an offset", t.JUNCTION_RULES, "reads = _reads(junction, operands, wanted)",
           'reads = _reads(junction, operands, wanted) | {"total", "mean", "rstd"}',
           (f"{t.FROZEN}test_held_between_forward_and_backward[xla-layer_norm-offset-0-0-False]",)),
    Mutant("another's gradient wanted", t.DERIVATIVES, "for n in a.shape[1:]", "for n in a.shape[:0:-1]",
           (f"{t.FROZEN}test_some_gradients_of_a_fused_linear[x+scale+offset+bias]",)),
    Mutant("all operands needed, whatever is wanted", t.ARRAYS,
           "    wanted = [name for name, dtype in results.present().items() if jax.tree.leaves(dtype)]",
           "    wanted = [name for name in TABLE if name not in OPERANDS]",
           (f"{t.ARRAY_TABLE}test_results_are_made_of_operands",)),
    Mutant("what is not needed passed all the same", t.OPERATION,
           "a if name in names else jax.tree.map(lambda _: None, a)", "a",
           (f"{t.FROZEN}test_launches[norm-offset-used]",)),
    Mutant("the mean forgotten among what dscale is made of", t.ARRAYS, '_X_HAT = ("total", "mean", "rstd", "x_z")',
           '_X_HAT = ("total", "rstd", "x_z")',
           (f"{t.FROZEN}test_some_gradients_are_those_of_all[xla-layer_norm-scale-False]",)),
]  # fmt: skip

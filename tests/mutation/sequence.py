"""Ways to break sequence parallelism: rows gathered between a norm and products whose features the same axis splits."""

import targets as t
from targets import Mutant

GATHERED = (f"{t.SEQUENCE}test_rows_are_gathered_and_no_kernel_is[few features-layer_norm_linear-one]",)


def shared(axes: str) -> tuple[str, ...]:
    return (f"{t.SEQUENCE}test_features_over_some_of_the_axes_of_the_rows[few features-{axes}]",)


ROWS_GATHERED = [
    Mutant("a kernel gathered where the result is asked for by features", t.PLACEMENT,
           "asked |= {*axes} if has_rows and dim.kind == Kind.FEATURE else set()", "pass", GATHERED),
    Mutant("rows split where the result is asked for by rows", t.PLACEMENT,
           "if has_rows and dim.kind == Kind.FEATURE else set()", "if dim.kind == Kind.FEATURE else set()",
           (f"{t.SEQUENCE}test_kernels_that_are_only_stored_in_parts_are_gathered[few features-layer_norm_linear]",)),
    Mutant("rows that do not lie side by side gathered", t.PLACEMENT,
           "while may_gather and last and axes[last - 1] in of_features:", "while may_gather and last:",
           shared("outer")),
    Mutant("rows gathered over axes that no features are left to", t.PLACEMENT, "return placement if asked <=",
           "return placement if True or asked <=", shared("uneven heads")),
    Mutant("dz that has been added up added up again", t.PLACEMENT, "left_out = {Kind.FEATURE: gathered,",
           "left_out = {Kind.FEATURE: set(),", GATHERED),
    Mutant("the sum's cotangent left to one device of those that have rows of their own", t.PARTITIONED,
           "if a not in shared]", "if True or a not in shared]",
           (f"{t.SEQUENCE}test_rows_are_gathered_and_no_kernel_is[few features-add_rms_norm_linear-one]",)),
    Mutant("dkernel of a device's own rows", t.XLA_LINEAR,
           "z = z if pulled.y is None else _all_rows(pulled.y, gathered)",
           "z = None if pulled.y is None else jnp.concatenate([pulled.y] * 4, 1)", GATHERED),
    Mutant("rows not gathered where kernels run", t.LINEAR_LAUNCH,
           "dtype is not None and not (batch_dims or gathered)", "dtype is not None and not batch_dims",
           (f"{t.SEQUENCE}test_kernels_normalise_each_devices_rows",)),
]  # fmt: skip

"""Ways to break calls under `vmap`: one call, plain jnp, and operations with an axis more."""

import targets as t
from targets import Mutant

CALL = "jln/_core/reverse_mode.py"
TESTS = "tests/transformations/test_vmaps.py::"
SHARED_LINEAR = "tests/operators/test_linears_in_eight_bits.py::test_vmap_is_a_loop[xla-given scale]"
BEHIND = f"{TESTS}test_gradients_of_each_example"


def norms(place: str, name: str = "layer_norm") -> tuple[str, ...]:
    return (f"{TESTS}test_norms[xla-{name}-{place}]",)


def nested(vmaps: str) -> tuple[str, ...]:
    return (f"{TESTS}test_nested[xla-{vmaps}]",)


UNDER_VMAP = [
    # One call
    Mutant("a shared operand that varies not as others do", CALL, "leaves = vary_together(leaves)", "pass",
           ("tests/devices/test_shard_map.py::test_under_a_vmap_that_splits_its_examples",)),
    Mutant("dead code that takes a live result with it", CALL, "was_used and next(asked)", "next(asked, False)",
           (f"{TESTS}test_results_that_fall_away_one_after_the_other",)),
    Mutant("the one call made in the user's mode of promotion", CALL, "with own_modes():", "if True:",
           (f"{TESTS}test_an_offset_that_groups_share_is_added_up_in_float32",)),
    Mutant("heads that do not lie next to H", t.VMAPS, "== h and", "and",
           norms("parameters of examples in the middle")),
    Mutant("groups of one row taken for heads", t.VMAPS, "norm.examples < place == h", "place == h",
           (f"{TESTS}test_rows_with_scales_of_their_own_are_groups",)),
    Mutant("rows in front of groups", t.VMAPS, "elif columns & moved or place < norm.examples:",
           "elif columns & moved:", (f"{TESTS}test_examples_beside_groups[(2, 1, 1, 8)-0-inside]",)),
    Mutant("examples not counted", t.VMAPS, "examples=norm.examples + 1)", "examples=norm.examples)", norms("groups")),
    Mutant("examples behind rows taken for ones in front", t.VMAPS, "        last = norm.examples\n", "",
           norms("parameters of examples in the middle")),
    Mutant("rows behind H taken for rows in front", t.VMAPS, "if place > last:", "if False:", norms("rows behind H")),
    Mutant("a parameter that heads share not written out", t.VMAPS, "heads=True), columns", "heads=True), set()",
           nested("heads of groups")),
    Mutant("rows that examples share taken for rows of each", t.VMAPS, "or rows - moved or", "or",
           (f"{TESTS}test_results_that_nobody_uses[y-plain]",)),
    Mutant("kernels of examples taken for a shared one", t.VMAPS, 'moved & {"kernel", "bias"}', 'moved & {"bias"}',
           (f"{TESTS}test_linears_of_examples[xla-rms_norm_linear-rows and kernels-False]",)),
    Mutant("few features of examples in one kernel", t.VMAPS, "junction.in_one and not norm.has_groups",
           "junction.in_one", ("tests/operators/test_few_features.py::test_vmap[x and scale]",)),
    # Plain jnp
    Mutant("gradients made for each example, not once", CALL, "plain(settings, tree.unflatten(dims)) or derivative",
           "derivative", norms("parameters of examples in the middle")),
    Mutant("eight bits by plain jnp", "jln/_junction/arrays.py", " and not self.eight_bits", "", (SHARED_LINEAR,)),
    Mutant("a gate left out of plain jnp", t.JUNCTION_RULES, "gate=a.gate, z=z", "gate=None, z=z",
           (f"{t.JUNCTION}test_transformed[add_layer_norm-rows-shared-grad(vmap), over x-False-xla]",)),
    Mutant("z in front of the norm left out of plain jnp", t.JUNCTION_RULES, "a.x_z if a.z is None else a.z", "a.z",
           norms("parameters of examples in the middle", "rms_norm_gated, norm_before_gate=False")),
    Mutant("z behind the norm in plain jnp", t.JUNCTION_RULES, "norm_before_gate=a.x_z is None",
           "norm_before_gate=True",
           norms("parameters of examples in the middle", "rms_norm_gated, norm_before_gate=False")),
    Mutant("more than the operands kept by plain jnp", t.JUNCTION_RULES,
           "(jax.checkpoint(compute) if norm.remat else compute)", "compute",
           (f"{TESTS}test_remat_holds_the_operands_alone[kernels]",)),
    Mutant("parameters along axes in the middle taken for shared ones", t.NORM_ARGUMENTS, "(others and not heads) or",
           "", (f"{TESTS}test_examples_beside_groups[(1, 4, 1, 8)-0-inside]",)),
    Mutant("four rows a group taken for few", t.NORM_ARGUMENTS, "rows < FEWEST_ROWS", "rows <= FEWEST_ROWS",
           (f"{t.JUNCTION}test_groups_of_few_rows_that_share_a_parameter[4]",)),
    Mutant("three rows a group taken for many", t.NORM_ARGUMENTS, "isinstance(rows, int) and rows", "False and rows",
           (f"{t.JUNCTION}test_groups_of_few_rows_that_share_a_parameter[3]",)),
    Mutant("few rows of a vmap taken for many", t.VMAPS, "if are_few_rows(", "if False and are_few_rows(",
           (f"{t.JUNCTION}test_groups_of_few_rows_that_share_a_parameter[3]",)),
    Mutant("kernels where H is not the last axis", "jln/_operators/call.py",
           'settled = dataclasses.replace(settled, implementation="xla")', "pass",
           (f"{t.JUNCTION}test_what_computes[scale0-1-xla]",)),
    # Operations, around the derivative
    Mutant("an axis behind rows taken for one in front", t.OPERATION, "if place > request.batch_dims:", "if False:",
           (f"{BEHIND}[xla-behind H--2]",)),
    Mutant("x copied for operations' kernels", t.OPERATION, "front, implementation = 0, behind_rows(implementation)",
           "front = 0", (f"{BEHIND}[triton-in the middle--1]",)),
    Mutant("vmap's axis not counted", t.OPERATION, "batch_dims=request.batch_dims + 1)",
           "batch_dims=request.batch_dims)", (f"{t.MATRIX}test_reverse_mode[layer_norm-so-xla-vmap(grad), over x]",)),
]  # fmt: skip

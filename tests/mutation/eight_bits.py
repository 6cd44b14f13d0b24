"""Ways to break results in eight bits."""

import targets as t
from targets import Mutant

KERNEL = "jln/_junction/kernels/eight_bits.py"
RULES = "jln/_junction/derivatives.py"
OF_USERS = "jln/_operators/eight_bits.py"
TESTS = "tests/operators/test_eight_bits.py::"
MODULE = "jln/_modules.py"
CALL = "jln/_operators/call.py"
MODULES = "tests/modules/test_linears.py::"
STRAIGHT = "tests/operators/test_straight_through.py::"


def every(implementation: str, kind: str, to: str = "e4m3") -> tuple[str, ...]:
    return (f"{TESTS}test_every_number_of_bfloat16[{kind}-{implementation}-{to}]",)


MESH = "tests/devices/test_eight_bits_on_a_mesh.py::test_on_a_mesh"
CHUNKS = (f"{TESTS}test_every_norm[triton-rms_norm-one scale-(2, 20000)]",)
CURRENT = (f"{TESTS}test_every_norm[xla-rms_norm-current scale-(37, 96)]",)
GROUPS = tuple(f"{TESTS}test_parameters_of_examples[triton-blocks-{own}]" for own in ("groups", "heads of groups"))

EIGHT_BITS = [
    Mutant("y times its scale, in the kernel", t.FORWARD, "tl.div_rn(1.0, tl.load(a.y_scale))", "tl.load(a.y_scale)",
           every("triton", "one scale")),
    Mutant("y that is not saturated", t.XLA_EIGHT_BITS, "return jnp.clip(y, -bound, bound)", "return y",
           every("xla", "one scale")),
    Mutant("the largest of e4m3 for e5m2", KERNEL, "else 57344.0", "else 448.0", every("triton", "one scale", "e5m2")),
    Mutant("blocks whose largest saturates", t.XLA_EIGHT_BITS, "((bits + 0x1FFFFF) >> 23)", "(bits >> 23)",
           every("xla", "blocks")),
    Mutant("blocks whose largest saturates, in the kernel", KERNEL, "((bits + 0x1FFFFF) >> 23)", "(bits >> 23)",
           every("triton", "blocks")),
    Mutant("the exponent of e4m3 for e5m2", t.NORM_LAUNCH, "BLOCKS=LARGEST_EXPONENT.get(norm.blocks),",
           "BLOCKS=8 if norm.blocks else None,", every("triton", "blocks", "e5m2")),
    Mutant("values whose blocks' scales nobody reads, by no scale", t.FORWARD,
           "                if BLOCKS is not None:", "                if r.block_scale is not None:",
           (f"{TESTS}test_a_part_alone",)),
    Mutant("scales of blocks whose values nobody reads", t.FORWARD,
           "if r.y is not None or r.y_max is not None or r.block_scale is not None:",
           "if r.y is not None or r.y_max is not None:", (f"{TESTS}test_a_part_alone",)),
    Mutant("infinite blocks with a scale", KERNEL, "tl.where(bits >= 0x7F800000, 255, biased)", "biased",
           every("triton", "blocks")),
    Mutant("block scales of the wrong chunk", KERNEL, "first // 32 + tl.arange(0, blocks)", "tl.arange(0, blocks)",
           (f"{TESTS}test_every_norm[triton-rms_norm-blocks-(2, 20000)]",)),
    Mutant("block scales of rows that are not there", KERNEL, "exists = valid[:, None] & ", "exists = ",
           (f"{TESTS}test_every_norm[triton-rms_norm-blocks-(37, 96)]",)),
    Mutant("block scales of one group", t.RECORDS, t.COPY, t.first_part_of("block_scale"), GROUPS),
    Mutant("the largest of the last chunk", t.FORWARD, "else tl.maximum(largest, of_chunk)", "else of_chunk", CHUNKS),
    Mutant("the largest of what is not there", KERNEL, "tl.where(mask, y.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)",
           "y.to(tl.int32, bitcast=True) & 0x7FFFFFFF", (f"{TESTS}test_a_mean_without_a_scale[one scale-triton]",)),
    Mutant("the largest that is not NaN", t.XLA_EIGHT_BITS, "bits = lax.bitcast_convert_type(jnp.abs(y), jnp.int32)",
           "bits = lax.bitcast_convert_type(jnp.nan_to_num(jnp.abs(y)), jnp.int32)",
           (f"{TESTS}test_current_scaling_of_zeros_and_of_nan",)),
    Mutant("current scaling by twice the scale", RULES, "amax / float(jnp.finfo", "2 * amax / float(jnp.finfo",
           CURRENT),
    Mutant("a current scale of the first group alone", RULES,
           "jnp.broadcast_to(scale, norm.sizes(Shape.ONE, operands.x.shape, 0))",
           "scale.reshape((1,) * operands.x.ndim)",
           (f"{TESTS}test_parameters_of_examples[triton-current scale-heads]",)),
    Mutant("a scale of zero where all is zero", RULES,
           "jnp.where((scale >= float(jnp.finfo(scale.dtype).tiny)) & jnp.isfinite(scale), scale, 1)", "scale",
           (f"{TESTS}test_current_scaling_of_zeros_and_of_nan",)),
    Mutant("the residual added again", RULES, "._replace(x=outcome.total)\n", "._replace(x=operands.x)\n",
           (f"{TESTS}test_every_norm[xla-add_layer_norm-current scale-(37, 96)]",)),
    Mutant("one scale for all examples", t.RECORDS, t.COPY, t.first_part_of("y_scale"),
           (f"{TESTS}test_vmap[one scale-triton-axes0]",)),
    Mutant("the total's cotangent left out behind eight bits", RULES,
           "Arrays(y=cotangents.carrier, total=cotangents.total)", "Arrays(y=cotangents.carrier)",
           (f"{TESTS}test_every_norm[xla-add_rms_norm-blocks-(37, 96)]",)),
    Mutant("a cotangent of eight bits dropped", RULES, "if cotangents.y is not None:", "if False:",
           (f"{STRAIGHT}test_eight_bits_have_none",)),
    Mutant("second derivatives of what went straight through", RULES,
           "outcome = outcome._replace(y=_differentiate_once(outcome.y))", "pass",
           (f"{STRAIGHT}test_gradients_have_no_derivatives",)),
    Mutant("a carrier in x's dtype", RULES, "for a in (operands.x, operands.added) if", "for a in (operands.x,) if",
           (f"{STRAIGHT}test_the_carrier_is_in_the_dtype_of_y",)),
    Mutant("a carrier that is the same on all devices", RULES, "vary_together((carrier, outcome.y))[0]", "carrier",
           ("tests/devices/test_eight_bits_on_a_mesh.py::test_in_a_shard_map[xla]",)),
    Mutant("a carrier added to the numbers", OF_USERS, "else _follow(numbers, self.carrier)",
           "else numbers + self.carrier.astype(dtype)",
           (f"{STRAIGHT}test_dequantized_numbers_are_what_the_bits_stand_for",)),
    Mutant("one scale of a loop's results along H", OF_USERS, "jnp.expand_dims(scale, range(scale.ndim, values.ndim))",
           "scale", (f"{STRAIGHT}test_results_of_control_flow[a scan-given scale]",)),
    Mutant("a module's own code where eight bits are asked for", MODULE,
           "        if quantize is not None:\n            raise", "        if False:\n            raise",
           (f"{MODULES}test_eight_bits_of_what_the_frameworks_own_code_computes_are_refused",)),
    Mutant("a module that makes no parameters where it quantises", MODULE, "            self.own(total)  # makes",
           "            pass  # makes",
           (f"{MODULES}test_results_and_gradients_in_eight_bits_are_the_operators[linen-RMSNorm-MXFloat8]",)),
    Mutant("a module without the largest number", MODULE, "y if results.y_max is None else Scaled(y, results.y_max)",
           "y", (f"{MODULES}test_several_linears_in_eight_bits",)),
    Mutant("H split where a row is quantised", t.PARTITIONED, "whole = layout.whole if may_split_h",
           "whole = () if may_split_h", (f"{MESH}[xla-auto-H-blocks]", f"{MESH}[xla-auto-H-one scale]")),
    Mutant("the scales of all blocks on every device", CALL, "block_scale=PartitionSpec(*specs.x[:-1])",
           "block_scale=PartitionSpec()", (f"{MESH}[xla-explicit-rows over both axes-blocks]",)),
    Mutant("eight bits that an older Triton rounds twice", "jln/_triton/chip.py",
           "(89 if triton_version() >= (3, 9) else 90)", "89",
           (f"{TESTS}test_chips_that_do_not_convert_have_eight_bits_by_xla",)),
    Mutant("eight bits on a chip that has none", t.NORM_LAUNCH, "and not target.chip.rounds_to_eight_bits",
           "and False", (f"{TESTS}test_chips_that_do_not_convert_have_eight_bits_by_xla",)),
    Mutant("largest numbers by XLA where a kernel finds them on every chip", t.NORM_LAUNCH,
           "if dtypes.y in LARGEST_EXPONENT and not", "if not",
           (f"{TESTS}test_chips_that_do_not_convert_have_eight_bits_by_xla",)),
    Mutant("examples as rows where XLA makes eight bits for a chip", t.NORM_LAUNCH,
           "formulas.forward(operands, norm, dtypes, batch_dims)", "formulas.forward(operands, norm, dtypes, 0)",
           (f"{TESTS}test_where_the_chip_does_not_convert",)),
]  # fmt: skip

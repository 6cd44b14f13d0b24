"""Ways to break several Linears behind one norm, and the residual in front."""

import targets as t
from targets import LINEARS as ACCURACY_OF_LINEARS
from targets import Mutant

CALLS, REWRITING, POLICIES = "jln/_fuse/calls.py", "jln/_fuse/rewriting.py", "jln/_core/policies.py"
IN_A_CHECKPOINT = "tests/fuse/test_transformations.py::test_what_a_checkpoint_makes_again_of_norms"
AGAIN = f"{ACCURACY_OF_LINEARS}test_what_the_backward_pass_makes_again"
MADE_AGAIN, GATED_AGAIN = (
    (f"{AGAIN}[triton-add_{case}]",)
    for case in ("rms_norm_linear-(37, 256)-300-bfloat16", "layer_norm_linear, x_bias and gate-(33, 1000)-300-bfloat16")
)

OF_THREE = (f"{t.SEVERAL}test_frozen_arguments[triton-False]",)
ADDED_UP = f"{t.SEVERAL}test_what_products_pull_back_is_added_up"
QWIX = "tests/modules/test_qwix.py::"
SEEN, OF_QWIX = (
    f"{QWIX}{test}"
    for test in ("test_no_product_of_an_operator_is_seen", "test_a_dense_whose_parameters_qwix_made_is_called")
)
BY_CUBLAS = "tests/program/test_layer_norm_linear.py::test_no_pass_adds_up_the_cotangents_of_several_linears"

LINEARS = [
    Mutant("no fences in the backward rule for a CPU", t.OPERATIONS, "formula_cpu=gradients.backward_cpu",
           "formula_cpu=gradients.backward", ("tests/operators/test_xla_cpu.py::test_gradient_of_linears",)),
    Mutant("no norm made again by its backward operation in a checkpoint", CALLS, '"remat": remat}', '"remat": False}',
           (f"{IN_A_CHECKPOINT}[dots-0]",)),
    Mutant("Linears taken where a checkpoint keeps all", POLICIES,
           " and not _keeps(policy, lambda a: jax.lax.add(a, a), 1)", "", ("tests/fuse/test_transformations.py::"
         "test_a_transformation_changes_nothing_and_loses_nothing[checkpoint_everything]",)),
    Mutant("x not handed on", REWRITING, "norm.x if hands_on else None", "None",
           ("tests/fuse/test_transformations.py::"
         "test_a_transformation_changes_nothing_and_loses_nothing[checkpoint_nothing]",)),
    Mutant("statistics kept all the same", t.ARRAYS, "return (names - again) | {*_SUM} if again else names",
           "return names", ("tests/transformations/test_checkpoint_policies.py::"
         "test_with_remat_the_backward_operation_makes_all_of_a_norm[dots]",)),
    Mutant("a total made again that is not rounded", t.NORM_LAUNCH, "TOTAL=jnp.dtype(total) if", "TOTAL=compute if",
           MADE_AGAIN),
    Mutant("statistics made again without epsilon", t.NORM_LAUNCH, "EPSILON=norm.epsilon if", "EPSILON=0.0 if",
           (f"{AGAIN}[triton-rms_norm_linear-(3, 1)-300-float64]",)),
    Mutant("no mean made again", t.BACKWARD, "mean = tl.sum(x, axis=1) * (1.0 / H)  # (1)", "pass", GATED_AGAIN),
    Mutant("a gate left out of a total made again", t.BACKWARD, "x = load_total(a, base,",
           "x = load_total(a._replace(gate=None), base,", GATED_AGAIN),
    Mutant("a row's statistics of a part of it", t.NORM_LAUNCH,
           "if norm.remat and plan is not None and plan.sums is not None:", "if False:",
           (f"{AGAIN}[triton-add_rms_norm_linear, x_bias and gate-(2, 16500)-260-float32]",)),
    Mutant("a total made again of x alone", t.XLA_GRADIENTS, 'if operands.residual is not None and "total" in reads:',
           "if False:", (f"{AGAIN}[xla-add_rms_norm_linear-(37, 256)-300-bfloat16]",)),
    Mutant("the sum not rounded before it is normed, fused", t.LINEAR, "x = total.to(COMPUTE)", "pass", t.FUSED_SUM),
    Mutant("the sum not returned, fused", t.LINEAR,
           "tl.store(r.total + base + start[:, None] + column[None, :], total, mask=mask)", "pass", t.FUSED_SUM),
    Mutant("the sum's cotangent not added, fused", t.LINEAR_BACKWARD,
           "dx += load_matrix(a.dtotal + base, start, valid, first, H, BLOCK_H).to(COMPUTE)", "pass", t.FUSED_SUM),
    Mutant("dz of one product only", t.XLA_GRADIENTS, "lambda sum, dz: dz + sum", "lambda sum, dz: sum",
           (f"{ADDED_UP}[xla-four]",)),
    Mutant("dz of the second product left out of a kernel", t.BACKWARD, "dy += tl.load(a.dy2", "tl.load(a.dy2",
           OF_THREE),
    Mutant("dz of the third product shared where the first is", t.RECORDS, t.COPY, t.shared_as_dy("dy3"),
           (f"{t.SEVERAL}test_transformations[triton-rms_norm_linear-vmap of one cotangent]",)),
    Mutant("dz of the fourth product left out", t.XLA_LINEAR, "gradients_in_jnp.add_up(dz[first:])]", "dz[first]]",
           (f"{ADDED_UP}[triton-four]",)),
    Mutant("row sums of the first product alone", t.NORM_LAUNCH,
           "if operands.dy2 is not None and plan.sums is not None:", "if False:", (f"{ADDED_UP}[triton-a wide row]",)),
    Mutant("the offset's gradient of the first product alone", t.NORM_LAUNCH,
           "_without_pullback(with_one_dy(operands),", "_without_pullback(operands,",
           (f"{t.SEVERAL}test_parameters_of_examples[triton-of examples]",)),
    Mutant("one dz for norms on both sides that no kernel takes", t.NORM_LAUNCH,
           "backward_of_two(with_one_dy(operands),", "backward_of_two(operands,",
           (f"{ADDED_UP}[triton-both sides of a wide row]",)),
    Mutant("dz of each product added up over devices", t.OPERATIONS, "before_spread=gradients.with_one_dy",
           "before_spread=None",
           ("tests/program/test_splits.py::test_z_is_gathered_and_dz_scattered_in_16_bits[several]",)),
    Mutant("cuBLAS not left to add up", t.NORM_LAUNCH, 'value in ("false", "0")', 'value in ("no",)',
           tuple(f"{BY_CUBLAS}[cuBLAS{pure}]" for pure in ("", ", of pure products"))),
    Mutant("the bias of another product", t.XLA_LINEAR, "zip(operands.kernel, operands.bias, junction.features",
           "zip(operands.kernel, (*operands.bias[1:], operands.bias[0]), junction.features",
           (f"{t.SEVERAL}test_every_result_against_float64[triton-layer_norm_linear-three-float16]",)),
    Mutant("doffset of the last product only", t.XLA_LINEAR, "doffset = share if doffset is None else doffset + share",
           "doffset = share", (f"{t.SEVERAL}test_frozen_arguments[triton-False]",)),
    Mutant("x saved where the sum was normed, before a product", t.JUNCTION_RULES,
           "total = operands.x if outcome.total is None else outcome.total", "total = operands.x",
           (f"{t.LINEARS}test_behind_a_sum[bfloat16-bfloat16-composed]",)),
    Mutant("dtotal added by every part of the features", t.PARTITIONED, "if feature_axes and any(layout.terms):",
           "if False:", (f"{t.SHARDING}test_kernels[add_layer_norm_linear-rows and columns]",)),
    Mutant("shares of dbias added up over devices in 16 bits", t.SHAPES,
           "tuple(Result(d, *([over_rows, True] if pulls else [])) for d in of)",
           "tuple(Result(d, *([over_rows] if pulls else [])) for d in of)",
           (f"{t.SHARDING}test_shares_of_16_bit_parameters_are_added_up_in_float32[(8,)]",)),
    Mutant("shares of a column's sum added up over devices in 16 bits", t.SHAPES,
           "Result(d, *([over_rows, True] if pulls else []))", "Result(d, *([over_rows, False] if pulls else []))",
           (f"{t.SHARDING}test_shares_of_16_bit_parameters_are_added_up_in_float32[(300,)]",)),
    Mutant("z made again in the dtype of the first product", t.XLA_LINEAR,
           "z_dtype = widest([dy[i].dtype.name for i in used if dtypes.kernel[i] is not None])",
           "z_dtype = next((dy[i].dtype.name for i in used if dtypes.kernel[i] is not None), None)",
           (f"{t.SEVERAL}test_kernels_of_several_dtypes[xla-bfloat16-dtypes0]",)),
    Mutant("a 16-bit product's part of H rounded by itself", t.XLA_LINEAR, "rounded_first = not h_axes and (",
           "rounded_first = (",
           (f"{t.SHARDING}test_parts_of_a_16_bit_product_over_h_are_rounded_once_all_added_up",)),
    Mutant("a product that what stands in for JAX's sees", "jln/_junction/linears/axes.py", "lax.dot(",
           "lax.dot_general(", (f"{SEEN}[gradients-]",)),
    Mutant("LoRA of a Dense left out", "jln/linen.py", "for name, a in parameters.items()} != shapes",
           "for name, a in parameters.items() if name in shapes} != shapes", (f"{OF_QWIX}[lora]",)),
    Mutant("a Dense's kernel in eight bits for an array", "jln/_modules.py",
           "not all(isinstance(a, _ARRAY) for a in parameters)", "False", (f"{OF_QWIX}[ptq]",)),
    Mutant("a layer of NNX that another has replaced left out", "jln/nnx.py",
           "if any(type(a) not in (LayerNorm, RMSNorm, nnx.Linear, nnx.LinearGeneral) for a in (self.norm, *linears))",
           "if False",
           ("tests/modules/test_one_framework.py::test_a_layer_that_takes_the_place_of_another_is_called[LoRALinear]",)),
    Mutant("a norm over other axes taken for one over the last", "jln/_modules.py", "in ((-1,), (x.ndim - 1,))",
           "!= ()", ("tests/modules/test_norms.py::test_path[linen reduction_axes=1]",)),
]  # fmt: skip

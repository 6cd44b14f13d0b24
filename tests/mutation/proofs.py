"""Ways to break the reference, the checker, explaining and the certificates of norms."""

import targets as t
from targets import Mutant

CERTIFICATE, NORMS = "jln/_fuse/certificate.py", "jln/_fuse/norms.py"
EXPLAIN = "tests/modules/test_explain.py::"


def hidden(name: str) -> tuple[str, ...]:
    return (f"tests/fuse/test_lookalikes.py::test_nothing_changes_and_no_more_is_found_than_is_there[{name}]",)


PROOFS = [
    # The reference and the checker
    Mutant("the reference's sum not rounded", t.REFERENCE,
           "total = jax.lax.optimization_barrier((total + residual.astype(total.dtype)).astype(total_dtype))",
           "total = (total + residual.astype(total.dtype)).astype(total_dtype)", (
            "tests/operators/test_rounded_sum.py::test_it_is_what_is_returned_that_is_normed[add_layer_norm-reference-jitted]",
        )),
    Mutant("a sum's digits left to its conversion", t.XLA_NORM,
           "lax.reduce_precision(total, jnp.finfo(total.dtype).nexp, digits)", "total", (
            "tests/operators/test_rounded_sum.py::test_a_gradient_alone_is_that_of_the_rounded_sum[add_rms_norm-bfloat16]",
        )),
    Mutant("only the largest error judged", t.LIMITS, "self.error <= self.limit and self.rms_error <= self.rms_limit",
           "self.error <= self.limit",
           ("tests/tools/test_check.py::test_slips_are_rejected_by_what_they_break[bfloat16]",)),
    Mutant("a cotangent of ones", t.CHECK, "random.standard_normal(a.shape).astype(a.dtype) for a",
           "np.ones(a.shape, a.dtype) for a",
           ("tests/checker/test_catalogue.py::test_wrong_rules_are_rejected[LayerNorm: cotangent ignored]",)),
    Mutant("second derivatives along ones", t.CHECK, "_draw(seed, shapes.values(), ours.floats)[:order]",
           "[*_draw(seed, shapes.values()), [np.ones_like(a) for a in ours.floats]][:order]",
           ("tests/checker/test_catalogue.py::test_second_derivatives_are_along_a_random_vector",)),
    Mutant("second derivatives of the function, not of its gradients", t.CHECK,
           "functools.partial(_gradients, differentiated, each)", "functools.partial(_gradients, self, each)",
           ("tests/checker/test_catalogue.py::test_second_derivatives_are_along_a_random_vector",)),
    Mutant("all within the tolerance of an infinity", "jln/testing/report.py",
           "np.where(np.isfinite(limit), error / limit, np.inf)", "error / limit",
           ("tests/checker/test_catalogue.py::test_nothing_but_itself_is_within_an_infinite_tolerance",)),
    Mutant("an entry under another's name", "jln/_triton/cache.py", "entry if name == key else None", "entry",
           ("tests/triton/test_cache.py::test_what_is_no_entry_of_the_key_is_as_none[another key's]",)),
    Mutant("root's folder in a user's home", "jln/_triton/cache.py", "os.geteuid() == 0 != near.stat().st_uid",
           "False", ("tests/triton/test_cache.py::test_root_makes_no_folder_in_a_users_home",)),
    Mutant("a Linear's own settings not looked at", "jln/nnx.py", "getattr(a, name, some[0]) not in some", "False",
           ("tests/modules/test_one_framework.py::test_a_linear_with_settings_of_its_own_is_called",)),
    # Explaining
    Mutant("loops and checkpoints not told", t.ROUTES, "route._replace(why=route.why + _remark(equation))", "route",
           (f"{EXPLAIN}test_what_is_around_a_call",)),
    Mutant("a norm left in silence", "jln/_fuse/regions.py", "if not self._scales_rows():", "if True:",
           (f"{EXPLAIN}test_an_explanation_prints_itself",)),
    Mutant("what could be fused not told", "jln/_explain.py", "evaluate(program, arrays, Options(), [])", "()",
           (f"{EXPLAIN}test_an_explanation_prints_itself",)),
    Mutant("the line of a framework's first caller", "jln/_fuse/bodies.py", "next(filter(is_foreign, node.within), ",
           "next(iter(()), ", (f"{EXPLAIN}test_each_norm_has_its_own_line",)),
    Mutant("a check that fused nothing not told", "jln/testing/check.py", 'if operators else NO', 'if True else NO',
           ("tests/checker/test_catalogue.py::test_a_fused_function_is_compared_with_its_own",)),
    Mutant("zeros of rounding beside their own size alone", "jln/testing/check.py", "largest = max(largest, *sizes)",
           "largest = max(sizes)", ("tests/checker/test_catalogue.py::test_what_a_fused_function_may_be_given",)),
    Mutant("objects written back that nobody changed", "jln/nnx.py", "None if is_same else", "None if False else",
           ("tests/fuse/test_nnx_objects.py::test_a_module_of_another_trace_that_is_not_changed",)),
    Mutant("objects of another trace emptied", "jln/nnx.py", "_check_can_update", "_",
           ("tests/fuse/test_nnx_objects.py::test_a_module_of_another_trace_that_would_be_changed_is_not_lost",)),
    Mutant("a bias of two", "jln/_fuse/linears.py", "        and result not in biased\n", "",
           ("tests/fuse/test_between.py::test_the_bias_of_a_linear_is_the_next_norms",)),
    # Certificates of norms
    Mutant("a power whose exponent is 0 on all rows that are tried", CERTIFICATE,
           'if node.operation in ("exp", "pow"):', 'if node.operation == "exp":',
           hidden("a power on rows too large")),
    Mutant("a sigmoid of 0 on all rows that are tried", CERTIFICATE,
           "(np.abs(operands[0]) > 1e-8) & (operands[0] < 18)", "operands[0] < 18",
           hidden("a sigmoid on rows too large")),
    Mutant("small and large rows not tried", NORMS, "for i in range(-12, 13))", "for i in range(2))",
           hidden("an epsilon that counts on small rows")),
    Mutant("rows of one sign tried", NORMS, "(-1) ** i * 10.0 ** (3 * i)", "10.0 ** (3 * i)",
           hidden("a mean without its sign")),
]  # fmt: skip

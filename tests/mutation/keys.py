"""Ways to break what programs are known by: those of `jln.fuse` from call to call, and of devices from run to run."""

from targets import Mutant

TRANSFORMATION = "jln/_fuse/transformation.py"
CALLS = "tests/fuse/test_calls.py::"
NNX_OBJECTS = "tests/fuse/test_nnx_objects.py::"

IDENTITY, OPERATION = "jln/_core/identity.py", "jln/_core/operation.py"
CACHE = "tests/devices/test_compilation_cache.py::"
FOUND = f"{CACHE}test_a_second_process_finds_its_own_programs_and_no_others"
NAME = (f"{CACHE}test_a_name_is_that_of_what_is_computed",)
NAMES = "tests/program/test_names.py::"
NOTES = "tests/transformations/test_debug_nans.py::test_jax_may_note_errors_in_the_program_around"

KEYS = (
    Mutant("a call on devices known by nothing but its shapes", OPERATION,
           "name = identity(what, arrays, tree, request, spread)", "name = identity(arrays)",
           (f"{FOUND}[false]", f"{FOUND}[true]", *NAME)),
    Mutant("a call on devices marked by an address alone", IDENTITY,
           'attributes["backend_config"] = ir.StringAttr.get(name)', "pass", (f"{FOUND}[false]", *NAME)),
    Mutant("a name of the call that JAX takes away with the address", IDENTITY,
           'attributes["mhlo.frontend_attributes"] = ir.DictAttr.get({"jln": ir.StringAttr.get(name)})', "pass",
           (f"{FOUND}[true]", *NAME)),
    Mutant("a name of no matrix precision", IDENTITY,
           "modes = config.jax_enable_x64, config.jax_default_matmul_precision", "modes = config.jax_enable_x64",
           NAME),
    Mutant("a name of no devices", IDENTITY, '[getattr(d, "id", None) for d in fact.devices.flat]', "None", NAME),
    Mutant("an answer to XLA that ends with the first program", IDENTITY,
           "        ctx.module_context.add_keepalive(answer)", "        pass",
           (f"{CACHE}test_programs_that_share_a_name_are_each_compiled_as_their_own",)),
    Mutant("one name for all that is not known", IDENTITY, "return secrets.token_hex(16)", 'return ""',
           (f"{CACHE}test_what_cannot_be_told_in_full_never_has_the_same_name",)),
    Mutant("a name of no switches", "jln/_triton/target.py", "return self.chip, lowering.switches()",
           "return self.chip", (f"{NAMES}test_other_kernels_make_another_program[Triton's switches]",)),
    Mutant("rules that note errors", "jln/_core/modes.py", 'config.error_checking_behavior_nan("ignore")',
           'config.error_checking_behavior_oob("ignore")', (f"{NOTES}[nan]",)),
    Mutant("a program kept under all of JAX's settings", TRANSFORMATION, "        trace_context(),\n", "",
           (f"{CALLS}test_an_eager_call_under_another_setting", f"{CALLS}test_an_eager_call_under_strict_ranks",
           f"{CALLS}test_an_eager_call_under_another_mesh[of old]")),
    Mutant("a program kept under all meshes that are set", TRANSFORMATION, "        jax.sharding.get_mesh(),",
           "       ", (f"{CALLS}test_an_eager_call_under_another_mesh[set]",)),
    Mutant("a static zero without its sign", TRANSFORMATION, "str(a) if isinstance(a, (float, complex)) else a", "a",
           (f"{CALLS}test_static_arguments_that_differ_only_by_type_or_sign[real]",
           f"{CALLS}test_static_arguments_that_differ_only_by_type_or_sign[complex]")),
    Mutant("programs kept without a bound", TRANSFORMATION, "                programs.clear()\n",
           "                pass\n", (f"{CALLS}test_programs_that_are_kept_are_bounded_by_what_they_hold",)),
    Mutant("equations of bodies not counted", TRANSFORMATION, "sum(1 + len(body.eqns) for body in _bodies(jaxpr))",
           "len(jaxpr.eqns)",
           (f"{CALLS}test_programs_that_are_kept_are_bounded_by_what_they_hold[MOST_EQUATIONS-1000-True]",)),
    Mutant("no program kept", TRANSFORMATION, "            programs[key] = program\n", "",
           (f"{CALLS}test_an_eager_call_is_traced_once",)),
    Mutant("bodies not looked into", TRANSFORMATION, "        yield from _bodies(inner)\n", "        pass\n",
           (f"{CALLS}test_a_closed_over_array_that_changes[an inner jit]",)),
    Mutant("arrays of a program kept with it", TRANSFORMATION, "if key is None or any(",
           "if key is None or False and any(", (f"{CALLS}test_a_closed_over_array_that_changes[a function]",)),
    Mutant("a static NumPy scalar traced", TRANSFORMATION, " and not (is_traced and isinstance(a, np.generic))", "",
           (f"{CALLS}test_a_numpy_scalar_that_an_outer_jit_holds_static",)),
    Mutant("every result asked to be a number", TRANSFORMATION, "[not isinstance(leaf, _WORDS) for leaf in leaves]",
           "[True for leaf in leaves]", (f"{CALLS}test_results_that_are_no_numbers_are_handed_on",)),
    Mutant("results that may hold tracers handed on", TRANSFORMATION,
           "[not isinstance(leaf, _WORDS) for leaf in leaves]", "[_is_array(leaf) for leaf in leaves]",
           (f"{CALLS}test_a_result_that_may_hold_a_tracer_is_refused",)),
    Mutant("any number of programs kept", TRANSFORMATION, " or len(programs) >= MOST_PROGRAMS", "",
           (f"{CALLS}test_programs_that_are_kept_are_bounded_by_what_they_hold[MOST_PROGRAMS-4-False]",)),
    Mutant("errors of a trace that name fuse's own function", TRANSFORMATION, "        flat.__name__ = name",
           "        pass", (f"{CALLS}test_errors_of_a_trace_name_the_users_function",)),
    Mutant("forward mode not told of fuse", "jln/_core/reverse_mode.py", "write jln.fuse(loss, forward_mode=True)",
           "not", (f"{CALLS}test_a_derivative_in_forward_mode_says_what_to_do",)),
    Mutant("a program kept for each call of a Module", "jln/nnx.py", "program(_UNHASHABLE, tree)",
           "program(object(), tree)", (f"{NNX_OBJECTS}test_an_eager_call_keeps_nothing",)),
)  # fmt: skip

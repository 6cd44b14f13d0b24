"""Ways to break what `jln.fuse` keeps from call to call, and what it hands to a function and back."""

from targets import Mutant

TRANSFORMATION = "jln/_fuse/transformation.py"
CALLS = "tests/fuse/test_calls.py::"
NNX_OBJECTS = "tests/fuse/test_nnx_objects.py::"

KEYS = (
    Mutant(
        "a program kept under all of JAX's settings",
        TRANSFORMATION,
        "        trace_context(),\n",
        "",
        (
            f"{CALLS}test_an_eager_call_under_another_setting",
            f"{CALLS}test_an_eager_call_under_strict_ranks",
            f"{CALLS}test_an_eager_call_under_another_mesh[of old]",
        ),
    ),
    Mutant(
        "a program kept under all meshes that are set",
        TRANSFORMATION,
        "        jax.sharding.get_mesh(),",
        "       ",
        (f"{CALLS}test_an_eager_call_under_another_mesh[set]",),
    ),
    Mutant(
        "a static zero without its sign",
        TRANSFORMATION,
        "str(a) if isinstance(a, (float, complex)) else a",
        "a",
        (
            f"{CALLS}test_static_arguments_that_differ_only_by_type_or_sign",
            f"{CALLS}test_static_complex_numbers_that_differ_only_by_sign",
        ),
    ),
    Mutant(
        "programs kept without a bound",
        TRANSFORMATION,
        "                programs.clear()\n",
        "                pass\n",
        (f"{CALLS}test_programs_that_are_kept_are_bounded_by_what_they_hold",),
    ),
    Mutant(
        "equations of bodies not counted",
        TRANSFORMATION,
        "sum(1 + len(body.eqns) for body in _bodies(jaxpr))",
        "len(jaxpr.eqns)",
        (f"{CALLS}test_programs_that_are_kept_are_bounded_by_what_they_hold[True]",),
    ),
    Mutant(
        "no program kept",
        TRANSFORMATION,
        "            programs[key] = program\n",
        "",
        (f"{CALLS}test_an_eager_call_is_traced_once", f"{NNX_OBJECTS}test_an_eager_call_is_traced_once"),
    ),
    Mutant(
        "bodies not looked into",
        TRANSFORMATION,
        "            yield from _bodies(leaf)\n",
        "            pass\n",
        (f"{CALLS}test_an_array_of_an_inner_jit_that_changes",),
    ),
    Mutant(
        "arrays of a program kept with it",
        TRANSFORMATION,
        "if key is None or _has_arrays(traced):",
        "if key is None:",
        (f"{CALLS}test_a_closed_over_array_that_changes",),
    ),
    Mutant(
        "a static NumPy scalar traced",
        TRANSFORMATION,
        " and not (is_traced and isinstance(a, np.generic))",
        "",
        (f"{CALLS}test_a_numpy_scalar_that_an_outer_jit_holds_static",),
    ),
    Mutant(
        "every result asked to be a number",
        TRANSFORMATION,
        "    except TypeError:\n        return False\n    return True",
        "    except TypeError:\n        return True\n    return True",
        (f"{CALLS}test_results_that_are_no_numbers_are_handed_on",),
    ),
    Mutant(
        "errors of a trace that name fuse's own function",
        TRANSFORMATION,
        "        flat.__name__ = remarks.name",
        "        pass",
        (f"{CALLS}test_errors_of_a_trace_name_the_users_function",),
    ),
    Mutant(
        "forward mode not told of fuse",
        "jln/_core/reverse_mode.py",
        "write jln.fuse(loss, forward_mode=True)",
        "not",
        (f"{CALLS}test_a_derivative_in_forward_mode_says_what_to_do",),
    ),
    Mutant(
        "a Module's call that equals no other",
        "jln/_modules/nnx_functions.py",
        "@dataclasses.dataclass(frozen=True)",
        "@dataclasses.dataclass(eq=False)",
        (f"{NNX_OBJECTS}test_an_eager_call_is_traced_once",),
    ),
)

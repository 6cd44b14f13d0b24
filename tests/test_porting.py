"""What the package takes of JAX and of Triton beyond their public interfaces, held by name and signature: where this
fails on a new version, CONTRIBUTING.md's page on porting says which file to mend.
"""

import inspect

import jax
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir, partial_eval


def parameters(function):
    return list(inspect.signature(function).parameters)


def test_primitives_and_their_rules_are_where_they_were():
    assert {"def_impl", "def_abstract_eval", "bind", "multiple_results"} <= {*dir(Primitive)}
    for rules in (ad.primitive_jvps, ad.primitive_transposes, batching.primitive_batchers, partial_eval.dce_rules):
        assert hasattr(rules, "__setitem__")
    assert parameters(mlir.register_lowering)[:3] == ["prim", "rule", "platform"]
    assert "multiple_results" in parameters(mlir.lower_fun)
    assert {"Zero", "instantiate_zeros", "is_undefined_primal", "deflinear2"} <= {*dir(ad)}
    assert callable(jaxpr_as_fun)


def test_custom_vjp_says_what_is_perturbed():
    assert parameters(jax.custom_vjp.defvjp)[:4] == ["self", "fwd", "bwd", "symbolic_zeros"]
    assert {"value", "perturbed"} <= {*CustomVJPPrimal.__dataclass_fields__}
    assert isinstance(SymbolicZero, type)


def test_custom_partitioning_takes_a_shardy_rule():
    wanted = {"partition", "infer_sharding_from_operands", "decode_shardings", "sharding_rule"}
    assert wanted <= {*parameters(custom_partitioning.def_partition)}


def test_tritons_interpreter_is_made_of_what_it_was():
    from triton.runtime import interpreter

    assert parameters(interpreter.GridExecutor.__init__)[:4] == ["self", "fn", "arg_names", "grid"]
    assert parameters(interpreter.GridExecutor._init_args_hst) == ["self", "args_dev", "kwargs"]
    assert parameters(interpreter.InterpretedFunction.rewrite) == ["self"]
    assert parameters(interpreter.InterpreterBuilder.create_dot)[:4] == ["self", "a", "b", "d"]
    assert parameters(interpreter.InterpreterBuilder.cast_impl)[:3] == ["self", "src", "dst_type"]
    assert callable(interpreter._patch_lang) and callable(interpreter._get_np_dtype)

"""The names and signatures that the package uses of JAX and of Triton beyond their public interfaces.

Where a test fails on a new version, the page beside it says which file to mend.
"""

import ast
import dataclasses
import inspect
import pathlib
import re

import jax
import pytest
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


def test_what_xla_asks_of_a_call_is_known_by_its_backend_config():
    from jax._src import custom_partitioning as own

    assert parameters(own._custom_partitioning_lowering_rule)[:2] == ["ctx", "values"]
    assert hasattr(own._sharding_callbacks, "setdefault")
    assert {"mesh", "module_context"} <= {*parameters(own._ShardingCallbackInfo)}
    assert {"platforms", "backend"} <= {*mlir.ModuleContext.__annotations__}


def test_a_sharding_is_made_for_other_devices():
    from jax._src.sharding_impls import GSPMDSharding

    devices = jax.devices() * 2  # there may be one
    split = jax.sharding.NamedSharding(jax.sharding.Mesh(devices[:1], "x"), jax.sharding.PartitionSpec("x"))
    given = GSPMDSharding(tuple(devices[:1]), split._to_xla_hlo_sharding(1))
    other = type(given)(tuple(devices[1:2]), given._to_xla_hlo_sharding(1))
    assert {*other.devices_indices_map((2,))} == {devices[1]}


def test_checkify_asks_a_table_of_primitives():
    from jax._src import checkify

    assert isinstance(checkify.error_checks, dict)
    assert parameters(checkify.nan_error_check)[0] == "prim"


def test_tritons_interpreter_is_made_of_what_it_was():
    from triton.runtime import interpreter

    assert parameters(interpreter.GridExecutor.__init__)[:4] == ["self", "fn", "arg_names", "grid"]
    assert parameters(interpreter.GridExecutor._init_args_hst) == ["self", "args_dev", "kwargs"]
    assert parameters(interpreter.InterpretedFunction.rewrite) == ["self"]
    assert parameters(interpreter.InterpreterBuilder.create_dot)[:4] == ["self", "a", "b", "d"]
    assert parameters(interpreter.InterpreterBuilder.cast_impl)[:3] == ["self", "src", "dst_type"]
    assert callable(interpreter.GridExecutor._restore_args_dev)
    assert parameters(interpreter.InterpreterBuilder.create_fp_to_fp)[:3] == ["self", "src", "dst_type"]
    assert len(parameters(interpreter.InterpreterBuilder.create_splat)) == 3
    options = interpreter.interpreter_builder.options
    assert dataclasses.is_dataclass(options) and options.sanitize_overflow and not options.debug
    assert callable(interpreter._patch_lang) and callable(interpreter._get_np_dtype)
    assert interpreter.tl.float32.name == "fp32"


def test_a_kernel_tells_its_function_and_its_arguments():
    from jln._junction.kernels.backward import reduce_kernel

    assert reduce_kernel.fn.__name__ == reduce_kernel.__name__ == "reduce_kernel"
    assert reduce_kernel.arg_names == parameters(reduce_kernel.fn)


def test_tritons_compiler_is_asked_as_it_was():
    """Triton's compiler has the names and signatures that the package uses.

    Those that make PTX are jax-triton's, and are tested in tests/program/test_launch.py.
    """
    from triton._C import libtriton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend

    assert parameters(ASTSource.__init__) == ["self", "fn", "signature", "constexprs", "attrs"]
    assert parameters(ASTSource.make_ir) == ["self", "target", "options", "codegen_fns", "module_map", "context"]
    assert parameters(ASTSource.hash) == ["self"]
    assert [field.name for field in dataclasses.fields(GPUTarget)] == ["backend", "arch", "warp_size"]
    assert parameters(make_backend) == ["target"]
    backend = make_backend(GPUTarget("cuda", 90, 32))
    asked = {"load_dialects": 1, "get_codegen_implementation": 1, "get_module_map": 0, "parse_options": 1, "hash": 0}
    assert {name: len(parameters(getattr(backend, name))) for name in asked} == asked
    assert callable(libtriton.get_cache_invalidating_env_vars) and callable(libtriton.ir.load_dialects)


ROOT = pathlib.Path(__file__).parents[2]
UNSTABLE = (
    *("jax._src", "jax.core", "jax.custom_derivatives", "jax.experimental", "jax.extend", "jax.interpreters"),
    *("jaxlib", "jax_triton", "triton._C", "triton.backends", "triton.compiler", "triton.runtime"),
)


def is_unstable(name: str) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in UNSTABLE)


def taken(text: str) -> set[str]:
    """Return the names that a file uses of modules which promise no stability.

    They are what it imports of these modules, their underscored names that it reads, and what it names in a string.
    """
    found, imported = set(), set()
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if is_unstable(alias.name)}
        elif isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names if is_unstable(f"{node.module}.{alias.name}")}
            found |= names
            imported |= names
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.]+", node.value):
            found |= {node.value} if is_unstable(node.value) and "." in node.value else set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            found |= {node.attr} if isinstance(node.value, ast.Name) and node.value.id in imported else set()
    return found


def table() -> list[tuple[str, str]]:
    """Return (what, where) of each row of the table in README.md."""
    page = pathlib.Path(__file__).with_name("README.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| ")]
    return [(what, where) for _, _, what, where, *_ in rows]


def listed(name: str, path: str) -> bool:
    return any(
        re.search(rf"`{re.escape(name)}`", what)
        and any(path == place or path.startswith(f"{place}/") for place in re.findall("`([^`]+)`", where))
        for what, where in table()
    )


FILES = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "jln").rglob("*.py"))]


@pytest.mark.parametrize("path", FILES)
def test_the_page_on_porting_lists_what_a_file_takes(path):
    assert [name for name in sorted(taken((ROOT / path).read_text())) if not listed(name, path)] == []


def test_what_is_taken_is_seen_wherever_it_stands():
    text = """
def later():
    from jax._src import core
    from jaxlib import gpu_triton
    import triton.backends.nvidia
    logging.getLogger("jax._src.xla_bridge")
    return gpu_triton._cuda_triton, self._own
"""
    expected = {"core", "gpu_triton", "triton.backends.nvidia", "jax._src.xla_bridge", "_cuda_triton"}
    assert taken(text) == expected
    assert not any(listed(name, "jln/nowhere.py") for name in expected)

"""The query, and what happens where a framework is missing."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import jln


def test_arrays_may_be_shapes_and_nothing_is_computed():
    nnx = pytest.importorskip("flax.nnx")
    from jln.nnx import LayerNorm

    norm = LayerNorm(8, rngs=nnx.Rngs(0))
    (route,) = jln.explain(norm, jax.ShapeDtypeStruct((10**12, 8), jnp.bfloat16))
    assert str(route) == "jln.nnx.LayerNorm: kernel (all arguments are the operator's)"
    (route,) = jln.explain(norm, jnp.ones((4, 8)), mask=jnp.ones((4, 8), bool))
    assert str(route) == "jln.nnx.LayerNorm: plain (mask is given)"


def test_a_function_without_layers_and_one_with_static_arguments():
    assert jln.explain(lambda x, flag: x if flag else None, jnp.ones(3), flag=True) == ()


def test_what_jax_has_traced_before_is_listed_again():
    nnx = pytest.importorskip("flax.nnx")
    from jln.nnx import LayerNorm

    norm = LayerNorm(8, rngs=nnx.Rngs(0))
    function = jax.jit(lambda x: norm(x))
    function(jnp.ones((4, 8)))
    for _ in range(2):
        assert [route.path for route in jln.explain(function, jnp.ones((4, 8)))] == ["kernel"]


def test_what_the_call_raises_is_raised():
    with pytest.raises(ZeroDivisionError):
        jln.explain(lambda x: 1 // 0, jnp.ones(3))


@pytest.mark.parametrize(
    ("module", "framework", "extra"),
    [
        ("nnx", "flax", "flax"),
        ("linen", "flax", "flax"),
        ("haiku", "haiku", "haiku"),
        ("equinox", "equinox", "equinox"),
    ],
)
def test_missing_framework_names_the_extra(module, framework, extra):
    code = f"""
import sys
sys.modules[{framework!r}] = None
import jln
try:
    jln.{module}
except ImportError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f'pip install "jln[{extra}]"' in run.stdout
    assert run.stdout.startswith(f"jln.{module} needs ")


def test_explain_of_nnx_inside_of_linen():
    """A bridge is a Linen module; nobody need have imported jln.linen."""
    pytest.importorskip("flax")
    code = """
import jax.numpy as jnp, jln, jln.nnx
from flax import nnx
print(*jln.explain(nnx.bridge.to_linen(jln.nnx.RMSNormLinear, 8, 3), jnp.ones((2, 8))))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("jln.nnx.RMSNormLinear: fused")


def test_import_loads_no_framework():
    code = "import sys, jln, jln.convert; print({'flax', 'haiku', 'equinox', 'triton'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


def test_unknown_attribute():
    with pytest.raises(AttributeError, match="no attribute 'pytorch'"):
        jln.pytorch  # noqa: B018

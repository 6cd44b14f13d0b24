"""Tests of gates of rows and parameters of each example, on a mesh of eight CPU devices.

x_bias and gates of H elements are among the forms of `test_sharding.py`.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jln
from catalogue import OPERATORS
from jln._core.operation import Operation
from junctions import made
from matrix import ROWS, H, communication, loss_by_name, mesh

CLOSE = {"rtol": 1e-11, "atol": 1e-11}

if len(jax.devices()) < 8:
    pytest.skip("needs eight devices", allow_module_level=True)

# How the axes of x [examples, rows of an example, H] are split, and those of a parameter that varies along them.
SPLITS = {
    "examples": ("data", None, None),
    "rows of an example": (None, "tensor", None),
    "examples and rows": ("data", "tensor", None),
    "examples and H": ("data", None, "tensor"),
}
FORMS = [
    ("add_layer_norm", "rows", "shared"),
    ("add_layer_norm", "by example", "by example"),
    ("add_layer_norm", "a number", "shared"),
    ("add_rms_norm_linear", "a row's of each example", "by example"),
    ("add_rms_norm", "over an axis in the middle", "shared"),
    ("layer_norm_linear", "no gate", "by example"),
    ("layer_norm", "no gate", "apart"),
    ("layer_norm_linear", "no gate", "apart"),
]
# The arguments whose first axis has H elements, where they are not of x's rank.
LAST = ("scale", "offset", "x_bias", "gate", "kernel")


def spec(name, shape, split):
    if len(shape) == len(ROWS) + 1 and name != "kernel":
        return P(*(axis if n > 1 else None for axis, n in zip(SPLITS[split], shape, strict=True)))
    return P(SPLITS[split][-1]) if name in LAST else P()


def placed(name, gate, varies, split, on, *, parameters_in_parts=True, dtype="float64"):
    """Return (arguments by name, the same on the mesh, options)."""
    given, options = made(name, gate=gate, varies=varies, shape=(*ROWS, H), dtype=dtype)
    activations = [a.name for a in OPERATORS[name].arguments if a.role == "activation"]
    specs = {n: spec(n, a.shape, split) if parameters_in_parts or n in activations else P() for n, a in given.items()}
    return given, {n: jax.device_put(a, NamedSharding(on, specs[n])) for n, a in given.items()}, options


def gradient(module, name, options):
    return jax.jit(jax.grad(loss_by_name(functools.partial(getattr(module, name), **options))))


@functools.cache
def expected(name, gate, varies):
    given, options = made(name, gate=gate, varies=varies, shape=(*ROWS, H))
    return gradient(jln.reference, name, options)(given)


@pytest.mark.parametrize("parameters_in_parts", [True, False], ids=["parameters in parts", "parameters whole"])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("name", "gate", "varies"), FORMS)
def test_gradient_under_jit(name, gate, varies, split, parameters_in_parts):
    """Gradients under jit are those of the reference, and nothing is gathered where the parameters lie in parts."""
    _, put, options = placed(name, gate, varies, split, mesh(), parameters_in_parts=parameters_in_parts)
    step = gradient(jln, name, options)
    chex.assert_trees_all_close(step(put), expected(name, gate, varies), **CLOSE)
    if parameters_in_parts:
        count, size = communication(step.lower(put).compile())
        assert count.keys() <= {"all-reduce"}, count
        if split == "examples" and not OPERATORS[name].is_linear:
            # Added up are gradients of what all examples share, and of nothing else.
            shared = [a for a in put.values() if a.ndim == 1 or a.shape[0] == 1]
            assert size["all-reduce"] == sum(a.nbytes for a in shared)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("name", "gate", "varies"), FORMS)
def test_gradient_on_an_explicit_mesh(name, gate, varies, split):
    """Gradients on an explicit mesh are those of the reference, and have their arguments' shardings as types."""
    on = mesh(AxisType.Explicit)
    _, put, options = placed(name, gate, varies, split, on)
    with jax.set_mesh(on):
        gradients = gradient(jln, name, options)(put)
    chex.assert_trees_all_close(gradients, expected(name, gate, varies), **CLOSE)
    for n, a in put.items():
        assert jax.typeof(gradients[n]).sharding.spec == jax.typeof(a).sharding.spec, n


@pytest.mark.parametrize("split", ["examples", "examples and rows"])
@pytest.mark.parametrize(("name", "gate", "varies"), FORMS)
def test_gradient_in_shard_map(name, gate, varies, split, implementation):
    """Gradients in shard_map are those of the reference.

    Each device has its examples' parameters; gradients of parameters that all share are added up.
    """
    on = mesh()
    given, put, options = placed(name, gate, varies, split, on)
    specs = {n: spec(n, a.shape, split) for n, a in given.items()}
    function = functools.partial(getattr(jln, name), implementation=implementation, **options)
    out = P("data", "tensor") if split == "examples and rows" else P("data")

    def spread(**arrays):
        return jax.shard_map(lambda a: function(**a), mesh=on, in_specs=(specs,), out_specs=out)(arrays)

    gradients = jax.jit(jax.grad(loss_by_name(spread)))(put)
    chex.assert_trees_all_close(gradients, expected(name, gate, varies), **CLOSE)


# Of Linears in float32, whose few features are one operation with the norm.
FEW_FEATURES = [
    ("add_layer_norm_linear", "H", "shared"),
    ("add_layer_norm_linear", "rows", "by example"),
    ("add_rms_norm_linear", "by example", "by example"),
    ("layer_norm_linear", "no gate", "by example"),
]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("name", "gate", "varies"), FEW_FEATURES)
def test_few_features(name, gate, varies, split, monkeypatch):
    """Gradients are those of the reference where JAX cannot look into the operation, and nothing is gathered.

    Those of the norm's parameters of each example stay on the example's devices, those of the Linear are added up over
    examples, too.
    """
    monkeypatch.setattr(Operation, "_by_kernels", lambda self, *_: functools.partial(self._formula))
    _, put, options = placed(name, gate, varies, split, mesh(), dtype="float32")
    step = gradient(jln, name, options)
    chex.assert_trees_all_close(step(put), expected(name, gate, varies), rtol=1e-3, atol=1e-3)
    count, _ = communication(step.lower(put).compile())
    assert count.keys() <= ({"all-reduce"} if split != "examples and H" else {"all-reduce", "all-gather"}), count


def test_few_features_of_examples_under_vmap(monkeypatch):
    """A vmap's own gradients are not added up over the devices that split its axis."""
    monkeypatch.setattr(Operation, "_by_kernels", lambda self, *_: functools.partial(self._formula))
    given, _ = made("rms_norm_linear", gate="no gate", varies="by example", shape=(*ROWS, H), dtype="float32")
    given = {n: jnp.stack([a, 2 * a, -a, a / 2]) for n, a in given.items()}
    put = {n: jax.device_put(a, NamedSharding(mesh(), P("data"))) for n, a in given.items()}

    def of_each(module):
        return jax.jit(jax.vmap(jax.grad(loss_by_name(module.rms_norm_linear))))

    chex.assert_trees_all_close(of_each(jln)(put), of_each(jln.reference)(given), rtol=1e-3, atol=1e-3)

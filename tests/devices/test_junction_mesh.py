"""Gates of rows and parameters of each example, on a mesh of eight CPU devices.

x_bias and gates of H elements are among the forms of `test_sharding.py`.
"""

import contextlib
import functools

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jln
from catalogue import OPERATORS
from jln._core.operation import Operation
from junctions import made
from matrix import ROWS, H, communication, loss_by_name, mesh
from placements import CLOSE, put

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
    ("layer_norm_linear", "no gate", "apart"),
]
# The arguments whose first axis has H elements, where they are not of x's rank.
LAST = ("scale", "offset", "x_bias", "gate", "kernel")


def spec(name, shape, split):
    if len(shape) == len(ROWS) + 1 and name != "kernel":
        return P(*(axis if n > 1 else None for axis, n in zip(SPLITS[split], shape, strict=True)))
    return P(SPLITS[split][-1]) if name in LAST else P()


def placed(name, gate, varies, split, on, *, whole=False, dtype="float64"):
    """Return the arguments by name on the mesh, and the options."""
    given, options = made(name, gate=gate, varies=varies, shape=(*ROWS, H), dtype=dtype)
    activations = [a.name for a in OPERATORS[name].arguments if a.role == "activation"]
    specs = {n: spec(n, a.shape, split) for n, a in given.items() if n in activations or not whole}
    return put(given, specs, on), options


def gradient(module, name, options):
    return jax.jit(jax.grad(loss_by_name(functools.partial(getattr(module, name), **options))))


@functools.cache
def expected(name, gate, varies):
    given, options = made(name, gate=gate, varies=varies, shape=(*ROWS, H))
    return gradient(jln.reference, name, options)(given)


@pytest.mark.parametrize("how", ["parameters in parts", "parameters whole", "explicit"])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("name", "gate", "varies"), FORMS)
def test_gradient_under_jit(name, gate, varies, split, how):
    """Gradients under jit are those of the reference, and nothing is gathered where the parameters lie in parts.

    On an explicit mesh they have their arguments' shardings as types.
    """
    on = mesh(AxisType.Explicit if how == "explicit" else AxisType.Auto)
    given, options = placed(name, gate, varies, split, on, whole=how == "parameters whole")
    step = gradient(jln, name, options)
    with jax.set_mesh(on) if how == "explicit" else contextlib.nullcontext():
        gradients = step(given)
    chex.assert_trees_all_close(gradients, expected(name, gate, varies), **CLOSE)
    if how == "explicit":
        for n, a in given.items():
            assert jax.typeof(gradients[n]).sharding.spec == jax.typeof(a).sharding.spec, n
    if how == "parameters in parts":
        count, size = communication(step.lower(given).compile())
        assert count.keys() <= {"all-reduce"}, count
        if split == "examples" and not OPERATORS[name].is_linear:
            # Added up are gradients of what all examples share, and of nothing else.
            shared = [a for a in given.values() if a.ndim == 1 or a.shape[0] == 1]
            assert size["all-reduce"] == sum(a.nbytes for a in shared)


# Of Linears in float32, whose few features are one operation with the norm.
FEW_FEATURES = [
    ("add_layer_norm_linear", "rows", "by example"),
    ("add_rms_norm_linear", "H", "shared"),
    ("layer_norm_linear", "no gate", "by example"),
]


@pytest.fixture
def by_kernels(monkeypatch):
    """Have jnp in the place of kernels, where JAX cannot look into it either."""
    monkeypatch.setattr(Operation, "_by_kernels", lambda self, *_: functools.partial(self._formula))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("name", "gate", "varies"), FEW_FEATURES)
def test_few_features(name, gate, varies, split, by_kernels):
    """Gradients are those of the reference where JAX cannot look into the operation, and nothing is gathered.

    Those of the norm's parameters of each example stay on the example's devices, those of the Linear are added up over
    examples, too.
    """
    given, options = placed(name, gate, varies, split, mesh(), dtype="float32")
    step = gradient(jln, name, options).lower(given).compile()
    chex.assert_trees_all_close(step(given), expected(name, gate, varies), rtol=1e-3, atol=1e-3)
    count, _ = communication(step)
    assert count.keys() <= ({"all-reduce"} if split != "examples and H" else {"all-reduce", "all-gather"}), count


def test_few_features_of_examples_under_vmap(by_kernels):
    """A vmap's own gradients are not added up over the devices that split its axis."""
    given, _ = made("rms_norm_linear", gate="no gate", varies="by example", shape=(*ROWS, H), dtype="float32")
    given = {n: jnp.stack([a, 2 * a, -a, a / 2]) for n, a in given.items()}

    def of_each(module):
        return jax.jit(jax.vmap(jax.grad(loss_by_name(module.rms_norm_linear))))

    got = of_each(jln)(put(given, dict.fromkeys(given, P("data")), mesh()))
    chex.assert_trees_all_close(got, of_each(jln.reference)(given), rtol=1e-3, atol=1e-3)

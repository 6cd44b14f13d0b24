"""The checker is right both ways: over five seeds it accepts every right rule here and rejects every wrong one."""

import functools

import controls
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jln
from jln import testing

pytestmark = pytest.mark.usefixtures("promoted_ranks")  # broadcasting is what half of these are about

SEEDS = range(5)


def reports(check, f, args, **options):
    """The reports of all seeds, each with arguments of its own."""
    return [check(f, args(np.random.default_rng(seed)), seed=seed, **options) for seed in SEEDS]


def normal(*shapes):
    return lambda random: tuple(random.standard_normal(shape) for shape in shapes)


def positive(*shapes):
    return lambda random: tuple(random.uniform(0.5, 2, shape) for shape in shapes)


def probabilities(random):
    return random.uniform(0.02, 0.98, (4, 3)), random.integers(0, 2, (4, 3)).astype(float)


def classes(random):
    return random.standard_normal((4, 5)), random.integers(0, 5, 4)


def near_zero(random):
    """Return (x,), six positive numbers of which every third is a thousandth of the others' size."""
    x = random.uniform(0.5, 2, 6)
    x[::3] /= 1000
    return (x,)


def ratio_near_zero(random):
    return random.standard_normal(6), *near_zero(random)


def tiny_beside_ones(tiny):
    return lambda random: (np.where(np.arange(6) == 2, tiny, 1.0) * random.uniform(1, 2, 6),)


def squared_error(prediction, target):
    return jnp.mean((prediction - target) ** 2)


def cross_entropy_of_probabilities(p, label):
    return -jnp.mean(label * jnp.log(p) + (1 - label) * jnp.log1p(-p))


RIGHT = {
    "relu": (jax.nn.relu, normal((3, 4))),
    "leaky relu": (jax.nn.leaky_relu, normal((3, 4))),
    "sigmoid": (jax.nn.sigmoid, normal((3, 4))),
    "tanh": (jnp.tanh, normal((3, 4))),
    "exact GELU": (functools.partial(jax.nn.gelu, approximate=False), normal((3, 4))),
    "tanh GELU": (functools.partial(jax.nn.gelu, approximate=True), normal((3, 4))),
    "SiLU": (jax.nn.silu, normal((3, 4))),
    "softmax": (jax.nn.softmax, normal((3, 4))),
    "add": (jnp.add, normal((3, 4), (4,))),
    "subtract": (jnp.subtract, normal((3, 1), (4,))),
    "multiply": (jnp.multiply, normal((3, 4), ())),
    "divide": (jnp.divide, lambda random: (*normal((3, 4))(random), *positive((3, 1))(random))),
    "power": (jnp.power, lambda random: (*positive((3, 4))(random), *normal((4,))(random))),
    "log near zero": (jnp.log, near_zero),
    "sqrt near zero": (jnp.sqrt, near_zero),
    "divide near zero": (jnp.divide, ratio_near_zero),
    "exp at mixed scales": (jnp.exp, lambda random: (np.array([1.0, 50.0, 300.0]),)),
    "log at 1e-5": (jnp.log, tiny_beside_ones(1e-5)),
    "1/x at 1e-5": (lambda x: 1 / x, tiny_beside_ones(1e-5)),
    "sqrt at 1e-8": (jnp.sqrt, tiny_beside_ones(1e-8)),
    "squared error": (squared_error, normal((3, 4), (3, 4))),
    "binary cross-entropy with logits": (
        optax.sigmoid_binary_cross_entropy,
        lambda random: (*normal((4, 3))(random), probabilities(random)[1]),
    ),
    "binary cross-entropy of probabilities": (cross_entropy_of_probabilities, probabilities),
    "softmax cross-entropy": (optax.softmax_cross_entropy_with_integer_labels, classes),
    "matmul": (jnp.matmul, normal((3, 4), (4, 2))),
    "transpose": (jnp.transpose, normal((3, 4))),
    "dot": (jnp.dot, normal((5,), (5,))),
    "outer": (jnp.outer, normal((3,), (4,))),
    "sum": (jnp.sum, normal((3, 4))),
    "sum over an axis": (functools.partial(jnp.sum, axis=0), normal((3, 4))),
    "mean": (jnp.mean, normal((3, 4))),
    "mean over an axis": (functools.partial(jnp.mean, axis=1), normal((3, 4))),
    "max": (jnp.max, normal((3, 4))),
    "max over an axis": (functools.partial(jnp.max, axis=0), normal((3, 4))),
    "min": (jnp.min, normal((3, 4))),
    "min over an axis": (functools.partial(jnp.min, axis=1), normal((3, 4))),
    "layer_norm": (jln.layer_norm, normal((3, 4), (4,), (4,))),
    "rms_norm": (jln.rms_norm, normal((3, 4), (4,))),
    "rms_norm_gated": (jln.rms_norm_gated, normal((3, 4), (3, 4), (4,))),
    "add_layer_norm": (jln.add_layer_norm, normal((3, 4), (3, 4), (4,), (4,))),
    "add_rms_norm": (jln.add_rms_norm, normal((3, 4), (3, 4), (4,))),
    "layer_norm_linear": (jln.layer_norm_linear, normal((3, 4), (4,), (4,), (4, 2), (2,))),
    "rms_norm_linear": (jln.rms_norm_linear, normal((3, 4), (4,), (4, 2), (2,))),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_rules_are_accepted(name):
    f, args = RIGHT[name]
    for report in reports(testing.check_vjp, f, args):
        assert report.ok, report


@pytest.mark.parametrize("name", [name for name in RIGHT if hasattr(jln.reference, name)])
def test_right_kernels_are_accepted(name):
    """Right operators and their kernels are accepted by autodiff of the reference."""
    f, args = RIGHT[name]
    for implementation in ("xla", "triton"):
        own = functools.partial(f, implementation=implementation)
        for report in reports(testing.check_vjp, own, args, reference=getattr(jln.reference, name)):
            assert report.ok, report


@pytest.mark.parametrize("name", ["add_layer_norm", "layer_norm_linear"])
def test_right_second_derivatives_are_accepted(name):
    """Right second derivatives are accepted, of two operators; test_transforms.py has all of them."""
    f, args = RIGHT[name]
    for options in ({}, {"reference": getattr(jln.reference, name)}):
        for report in reports(testing.check_hvp, f, args, **options):
            assert report.ok, report


def wrong(function, rule):
    """Return `function` with the backward rule `(*arguments, dy) -> gradients`."""

    @jax.custom_vjp
    def f(*args):
        return function(*args)

    f.defvjp(lambda *args: (function(*args), args), lambda args, dy: rule(*args, dy))
    return f


def of_the_diagonal(x, dy):
    p = jax.nn.softmax(x)
    return (dy * p * (1 - p),)


WRONG = {
    "broadcast offset of one row": (wrong(jnp.add, lambda x, b, dy: (dy, dy[0])), normal((3, 4), (4,))),
    "broadcast scale averaged": (
        wrong(jnp.multiply, lambda x, s, dy: (dy * s, jnp.mean(dy * x, 0))),
        normal((3, 4), (4,)),
    ),
    "broadcast along the wrong axis": (wrong(jnp.add, lambda x, b, dy: (dy, dy.sum(1))), normal((4, 4), (4,))),
    "transpose not transposed back": (wrong(jnp.transpose, lambda x, dy: (dy,)), normal((4, 4))),
    "product by the kernel not transposed": (
        wrong(jnp.matmul, lambda a, b, dy: (dy @ b, a.T @ dy)),
        normal((3, 4), (4, 4)),
    ),
    "mean without 1/N": (wrong(jnp.mean, lambda x, dy: (jnp.full_like(x, dy),)), normal((3, 4))),
    "maximum sent to everyone": (wrong(jnp.max, lambda x, dy: (jnp.full_like(x, dy),)), normal((3, 4))),
    "subtract with the sign lost": (wrong(jnp.subtract, lambda a, b, dy: (dy, dy)), normal((3, 4), (3, 4))),
    "softmax's diagonal": (wrong(jax.nn.softmax, of_the_diagonal), normal((3, 4))),
    "tanh GELU's rule for exact GELU": (
        wrong(
            functools.partial(jax.nn.gelu, approximate=False),
            lambda x, dy: jax.vjp(functools.partial(jax.nn.gelu, approximate=True), x)[1](dy),
        ),
        normal((3, 4)),
    ),
    "log clamped near zero": (wrong(jnp.log, lambda x, dy: (dy / jnp.maximum(x, 1e-2),)), near_zero),
    "sqrt softened near zero": (wrong(jnp.sqrt, lambda x, dy: (dy / (2 * jnp.sqrt(x) + 1e-4),)), near_zero),
    "divide softened near zero": (
        wrong(jnp.divide, lambda a, b, dy: (dy / b, -dy * a / (b**2 + 1e-6))),
        ratio_near_zero,
    ),
    "cotangent ignored": (wrong(jnp.tanh, lambda x, dy: (1 - jnp.tanh(x) ** 2,)), normal((3, 4))),
    "dbias of one row": (
        wrong(lambda x, k, b: x @ k + b, lambda x, k, b, dy: (dy @ k.T, x.T @ dy, dy[-1])),
        normal((3, 4), (4, 2), (2,)),
    ),
    **{f"LayerNorm: {name}": (f, normal((3, 4), (4,), (4,))) for name, f in controls.WRONG.items()},
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rules_are_rejected(name):
    all_are_rejected(*WRONG[name], "float64")


@pytest.mark.parametrize("name", controls.WRONG)
def test_wrong_rules_are_rejected_in_float32(name):
    """Wrong rules are rejected in float32 too, as a float32 gradient is compared with one in float64."""
    arguments = normal((3, 4), (4,), (4,))
    all_are_rejected(controls.WRONG[name], lambda random: [a.astype("float32") for a in arguments(random)], None)


def all_are_rejected(f, args, dtype):
    """Check that every seed is rejected, by the differences alone and by the reference's autodiff alone."""
    for options in ({}, {"reference": f.__wrapped__}):
        for report in reports(testing.check_vjp, f, args, dtype=dtype, **options):
            assert any(row.verdict == "WRONG" for row in report.rows), report


def test_right_norm_in_the_dress_of_the_wrong_ones_is_accepted():
    """The right norm is accepted in the form in which the wrong ones are written.

    Otherwise the wrong ones might be rejected for that form.
    """
    assert all(report.ok for report in reports(testing.check_vjp, controls.RIGHT, normal((3, 4), (4,), (4,))))


@pytest.mark.parametrize(
    ("function", "rule", "arguments"),
    [
        (jnp.add, lambda x, b, dy: (dy, dy), normal((3, 4), (4,))),
        (jnp.multiply, lambda x, s, dy: (dy * s, dy * x), normal((3, 4), ())),
    ],
)
def test_broadcast_gradients_not_summed_are_refused(function, rule, arguments):
    """JAX raises for a gradient of another shape than its argument, which leaves no numbers to compare."""
    with pytest.raises(ValueError, match="shape"):
        testing.check_vjp(wrong(function, rule), arguments(np.random.default_rng(0)))


def test_a_wrong_second_derivative_is_rejected():
    """A second derivative is rejected where the gradient is right and the gradient's own rule is wrong."""
    slope = wrong(jnp.cos, lambda x, dy: (dy * jnp.sin(x),))
    f = wrong(jnp.sin, lambda x, dy: (dy * slope(x),))
    args = normal((3, 4))
    assert all(report.ok for report in reports(testing.check_vjp, f, args))
    for options in ({}, {"reference": jnp.sin}):
        assert not any(report.ok for report in reports(testing.check_hvp, f, args, **options))

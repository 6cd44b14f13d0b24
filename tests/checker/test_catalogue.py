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


def classes(random):
    return random.standard_normal((4, 5)), random.integers(0, 5, 4)


def near_zero(random):
    """Return (x,), six positive numbers of which every third is a thousandth of the others' size."""
    x = random.uniform(0.5, 2, 6)
    x[::3] /= 1000
    return (x,)


def ratio_near_zero(random):
    return random.standard_normal(6), *near_zero(random)


def log_loss(logits, labels):
    return -jnp.take_along_axis(logits - jnp.log(jnp.exp(logits).sum(-1, keepdims=True)), labels[:, None], -1)[:, 0]


# JAX's own functions, and formulas of them whose derivatives JAX makes by other steps.
RIGHT = {
    "relu": (jax.nn.relu, lambda x: (x + jnp.abs(x)) / 2, normal((3, 4))),
    "leaky relu": (jax.nn.leaky_relu, lambda x: jnp.maximum(x, 0.01 * x), normal((3, 4))),
    "sigmoid": (jax.nn.sigmoid, lambda x: 1 / (1 + jnp.exp(-x)), normal((3, 4))),
    "tanh": (jnp.tanh, lambda x: 1 - 2 / (jnp.exp(2 * x) + 1), normal((3, 4))),
    "exact GELU": (
        functools.partial(jax.nn.gelu, approximate=False),
        lambda x: x * (1 + jax.lax.erf(x / 2**0.5)) / 2,
        normal((3, 4)),
    ),
    "tanh GELU": (
        functools.partial(jax.nn.gelu, approximate=True),
        lambda x: x * jax.nn.sigmoid(2 * (2 / jnp.pi) ** 0.5 * (x + 0.044715 * x**3)),
        normal((3, 4)),
    ),
    "SiLU": (jax.nn.silu, lambda x: x / (1 + jnp.exp(-x)), normal((3, 4))),
    "softmax": (jax.nn.softmax, lambda x: jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True), normal((3, 4))),
    "subtract": (jnp.subtract, lambda a, b: a + -1 * b, normal((3, 1), (4,))),
    "divide": (
        jnp.divide,
        lambda a, b: a * b**-1,
        lambda random: (*normal((3, 4))(random), *positive((3, 1))(random)),
    ),
    "power": (
        jnp.power,
        lambda a, b: jnp.exp(b * jnp.log(a)),
        lambda random: (*positive((3, 4))(random), *normal((4,))(random)),
    ),
    "log near zero": (jnp.log, lambda x: -2 * jnp.log(x**-0.5), near_zero),
    "sqrt near zero": (jnp.sqrt, lambda x: jnp.exp(jnp.log(x) / 2), near_zero),
    "divide near zero": (jnp.divide, lambda a, b: a * b**-1, ratio_near_zero),
    "binary cross-entropy": (
        optax.sigmoid_binary_cross_entropy,
        lambda x, label: -label * jnp.log(jax.nn.sigmoid(x)) - (1 - label) * jnp.log(jax.nn.sigmoid(-x)),
        lambda random: (*normal((4, 3))(random), random.integers(0, 2, (4, 3)).astype(float)),
    ),
    "softmax cross-entropy": (optax.softmax_cross_entropy_with_integer_labels, log_loss, classes),
    "matmul": (jnp.matmul, lambda a, b: (a[:, :, None] * b[None]).sum(1), normal((3, 4), (4, 2))),
    "mean": (jnp.mean, lambda x: jnp.sum(x) / x.size, normal((3, 4))),
    "max": (jnp.max, lambda x: jnp.sort(x.ravel())[-1], normal((3, 4))),
    "min over an axis": (functools.partial(jnp.min, axis=1), lambda x: jnp.sort(x, 1)[:, 0], normal((3, 4))),
}
OPERATORS = {
    "layer_norm": normal((3, 4), (4,), (4,)),
    "rms_norm": normal((3, 4), (4,)),
    "rms_norm_gated": normal((3, 4), (3, 4), (4,)),
    "add_layer_norm": normal((3, 4), (3, 4), (4,), (4,)),
    "add_rms_norm": normal((3, 4), (3, 4), (4,)),
    "layer_norm_linear": normal((3, 4), (4,), (4,), (4, 2), (2,)),
    "rms_norm_linear": normal((3, 4), (4,), (4, 2), (2,)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_rules_are_accepted(name):
    f, reference, args = RIGHT[name]
    for report in reports(testing.check_vjp, f, args, reference=reference):
        assert report.ok, report


@pytest.mark.parametrize("name", OPERATORS)
def test_right_kernels_are_accepted(name):
    for implementation in ("xla", "triton"):
        f = functools.partial(getattr(jln, name), implementation=implementation)
        for report in reports(testing.check_vjp, f, OPERATORS[name], reference=getattr(jln.reference, name)):
            assert report.ok, report


@pytest.mark.parametrize("name", ["add_layer_norm", "layer_norm_linear"])
def test_right_second_derivatives_are_accepted(name):
    """Right second derivatives are accepted, of two operators; test_transforms.py has all of them."""
    f, reference = getattr(jln, name), getattr(jln.reference, name)
    for report in reports(testing.check_hvp, f, OPERATORS[name], reference=reference):
        assert report.ok, report


def wrong(function, rule):
    """Return `function` with the backward rule `(*arguments, dy) -> gradients`."""

    @jax.custom_vjp
    def f(*args):
        return function(*args)

    f.defvjp(lambda *args: (function(*args), args), lambda args, dy: rule(*args, dy))
    return f


def diagonal_alone(x, dy):
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
    "softmax's diagonal": (wrong(jax.nn.softmax, diagonal_alone), normal((3, 4))),
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
    """Check that every seed is rejected by the autodiff of the function without the rule."""
    for report in reports(testing.check_vjp, f, args, reference=f.__wrapped__, dtype=dtype):
        assert not report.ok and report.row("result").ok, report


def test_right_norm_in_the_dress_of_the_wrong_ones_is_accepted():
    """The right norm is accepted in the form in which the wrong ones are written.

    Otherwise the wrong ones might be rejected for that form.
    """
    f, args = controls.RIGHT, normal((3, 4), (4,), (4,))
    assert all(report.ok for report in reports(testing.check_vjp, f, args, reference=f.__wrapped__))


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
        testing.check_vjp(wrong(function, rule), arguments(np.random.default_rng(0)), reference=function)


def test_a_wrong_second_derivative_is_rejected():
    """A second derivative is rejected where the gradient is right and the gradient's own rule is wrong."""
    slope = wrong(jnp.cos, lambda x, dy: (dy * jnp.sin(x),))
    f = wrong(jnp.sin, lambda x, dy: (dy * slope(x),))
    args = normal((3, 4))
    assert all(report.ok for report in reports(testing.check_vjp, f, args, reference=jnp.sin))
    assert not any(report.ok for report in reports(testing.check_hvp, f, args, reference=jnp.sin))

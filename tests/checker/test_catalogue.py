"""The checker is right both ways: over five seeds it accepts the operators and rejects every wrong rule here."""

import functools

import controls
import jax
import jax.numpy as jnp
import numpy as np
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


def near_zero(random):
    """Return (x,), six positive numbers of which every third is a thousandth of the others' size."""
    x = random.uniform(0.5, 2, 6)
    x[::3] /= 1000
    return (x,)


OPERATORS = {
    "layer_norm": normal((3, 4), (4,), (4,)),
    "rms_norm": normal((3, 4), (4,)),
    "rms_norm_gated": normal((3, 4), (3, 4), (4,)),
    "add_layer_norm": normal((3, 4), (3, 4), (4,), (4,)),
    "add_rms_norm": normal((3, 4), (3, 4), (4,)),
    "layer_norm_linear": normal((3, 4), (4,), (4,), (4, 2), (2,)),
    "rms_norm_linear": normal((3, 4), (4,), (4, 2), (2,)),
}


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
    "log clamped near zero": (wrong(jnp.log, lambda x, dy: (dy / jnp.maximum(x, 1e-2),)), near_zero),
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

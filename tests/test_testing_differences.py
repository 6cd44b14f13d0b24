"""jln.testing's central differences: what they find, where they have no digits, and what a sample leaves out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jln import testing

X = np.random.default_rng(0).standard_normal((3, 4))
MANY = np.random.default_rng(1).standard_normal((50, 100))


def sine_with(slip):
    """Whose gradient is passed through `slip`."""

    @jax.custom_vjp
    def sine(x):
        return jnp.sin(x)

    sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, dy: (slip(dy * jnp.cos(x)),))
    return sine


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_found_beside_a_sample(value):
    (row,) = testing.check_vjp(sine_with(lambda g: g.at[17, 77].set(value)), (MANY,), elements=3).rows
    assert (row.verdict, row.index, row.compared, row.size) == ("WRONG", (17, 77), 3, 5000)


@pytest.mark.parametrize("seed", range(3))
def test_a_wrong_element_is_found_beside_a_sample(seed):
    report = testing.check_vjp(sine_with(lambda g: g.at[17, 77].multiply(1.01)), (MANY,), elements=3, seed=seed)
    (row,) = report.rows
    assert (row.verdict, row.against, row.index, row.compared) == ("WRONG", "direction", (), 5000)
    assert str(report).splitlines()[-1].split()[:4] == ["x", "direction", "5000", "all"]


@pytest.mark.parametrize("f", [jnp.sin, jax.nn.relu, jax.nn.softmax, lambda x: 1 / x, lambda x: jnp.max(x, 0)])
def test_right_rules_are_right_along_a_direction(f):
    """Elements next to kinks and poles among them."""
    for dtype in ("float64", None):
        report = testing.check_vjp(f, (MANY.astype("float32"),), elements=3, dtype=dtype, seed=range(20))
        assert report.ok and all(row.against == "differences" for row in report.rows), report


def test_where_zeros_would_pass_the_report_says_so():
    """In all seeds: in one with larger numbers zeros would not pass."""

    def tiny(x):
        return 1e-12 * x

    for options in ({}, {"reference": tiny}, {"reference": tiny, "differences": False}):
        report = testing.check_vjp(tiny, (X,), **options)
        assert report.ok and report.row("x").small and report.as_dict()["rows"][-1]["small"]
        assert str(report).splitlines()[-1].startswith("x: ok would be zeros too, ")
    report = testing.check_vjp(lambda x: x * x, lambda random: (X * 10 ** -random.uniform(0, 30),), seed=range(9))
    assert any(r.row("x").small for r in report.by_seed.values()) and not report.row("x").small
    assert report.ok and "zeros" not in str(report) and "zeros" not in str(testing.check_vjp(jnp.sin, (X,)))
    wrong = testing.check_vjp(lambda x: x, (X,), reference=tiny)
    assert not wrong.ok and "zeros" not in str(wrong)


@pytest.mark.parametrize(
    ("f", "size"),
    [(jnp.sin, 1e10), (jnp.sin, 1e12), (jnp.sin, 1e15), (lambda x: x**3, 1e150), (lambda x: x**3, 1e200)],
)
def test_differences_without_digits_are_unsure(f, size):
    """Steps of many periods, and results that overflow; a reference knows more, and a NaN is one all the same."""
    report = testing.check_vjp(f, (size * X,))
    assert report.row("x").verdict == "unsure", report
    assert testing.check_vjp(f, (size * X,), reference=f).row("x").ok or size == 1e200
    assert testing.check_vjp(sine_with(lambda g: g * jnp.nan), (size * X,)).row("x").verdict == "WRONG"


def test_no_slope_where_there_is_a_value_is_wrong():
    report = testing.check_vjp(jnp.sqrt, (np.array([0.0, 1.0]),))
    assert report.row("x").verdict == "WRONG" and report.row("x").index == (0,), report


def test_the_first_step_is_that_of_a_given_tolerance():
    """Of x^3 at 1, whose differences of one step err by the step's square; `step` goes first."""

    def error(**options):
        tolerance = testing.Tolerance(relative=1e-3, absolute=1e-3, step=0.125)
        report = testing.check_vjp(lambda x: x**3, (np.ones(1),), tolerance=tolerance, richardson=0, **options)
        row = report.row("x")
        return row.error / abs(row.got) * 3

    np.testing.assert_allclose(error(), 0.125**2, rtol=1e-6)
    np.testing.assert_allclose(error(step=0.25), 0.25**2, rtol=1e-6)
    with pytest.raises(ValueError, match="step must be positive and finite; got 0"):
        testing.check_vjp(jnp.sin, (X,), tolerance=testing.Tolerance(1e-3, 1e-3, 0.0))

"""Central differences in `jln.testing`: what they find, where they lack digits, and what a sample leaves out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jln import testing

X = np.random.default_rng(0).standard_normal((3, 4))
MANY = np.random.default_rng(1).standard_normal((50, 100))


def sine_with(slip):
    """Return a sine whose gradient is passed through `slip`."""

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


@pytest.mark.parametrize("f", [jnp.sin, jax.nn.relu, jax.nn.softmax, lambda x: 1 / x, lambda x: jnp.max(x, 0)])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_right_rules_are_right_beside_a_sample(f, dtype):
    """Some of the elements lie next to kinks and poles."""
    for seed in range(5):
        report = testing.check_vjp(f, (MANY,), elements=3, dtype=dtype, seed=seed)
        assert report.ok and all(row.against == "differences" for row in report.rows), report


@pytest.mark.parametrize(
    ("f", "size"),
    [(jnp.sin, 1e10), (jnp.sin, 1e12), (jnp.sin, 1e15), (lambda x: x**3, 1e150)],
)
def test_differences_without_digits_are_unsure(f, size):
    """The verdict is unsure where a step is many periods long or results overflow, so that differences lack digits.

    A reference knows more. A NaN is wrong all the same.
    """
    report = testing.check_vjp(f, (size * X,))
    assert report.row("x").verdict == "unsure", report
    assert testing.check_vjp(f, (size * X,), reference=f).row("x").ok
    assert testing.check_vjp(sine_with(lambda g: g * jnp.nan), (size * X,)).row("x").verdict == "WRONG"


def test_no_slope_where_there_is_a_value_is_wrong():
    report = testing.check_vjp(jnp.sqrt, (np.array([0.0, 1.0]),))
    assert report.row("x").verdict == "WRONG" and report.row("x").index == (0,), report


def test_differences_are_extrapolated():
    """Differences of x^3 would err by the square of their first step, 0.004; these are as near as float64 comes."""
    row = testing.check_vjp(lambda a: a**3, (X,)).row("a")
    assert row.ok and row.error < 1e-12


def test_steps_are_of_the_size_of_the_data():
    for magnitude in (1e-12, 1e12):
        assert testing.check_vjp(jnp.sin, (X * 1e-12,)).ok
        assert testing.check_vjp(lambda a, m=magnitude: a * a / m, (X * magnitude,)).ok


def test_a_step_out_of_the_domain_is_not_used():
    assert testing.check_vjp(jnp.log, (np.array([1e-6, 1.0, 1.0, 2.0]),)).ok


@pytest.mark.parametrize("x", [np.arange(64.0), np.full(2, 64.0), np.linspace(0, 64, 257)], ids=["n", "64", "n/4"])
def test_steps_of_whole_periods_do_not_decide(x):
    """Steps of whole periods of sin(2 pi x), which agree that the slope is 0, do not decide the verdict.

    Results near 0 do not show the rounding of sin's argument either, which is 400 times that of a number near 1.
    """

    @jax.custom_vjp
    def flat(x):
        return jnp.sin(2 * jnp.pi * x)

    flat.defvjp(lambda x: (flat(x), None), lambda _, dy: (0 * dy,))
    for seed in range(3):
        report = testing.check_vjp(lambda x: jnp.sin(2 * jnp.pi * x), (x,), seed=seed)
        assert report.ok, report
    assert testing.check_vjp(flat, (x,)).row("x").verdict == "WRONG"
    assert testing.check_vjp(flat, (x[-1:],)).row("x").verdict == "WRONG"


def test_a_float32_function_is_checked_in_float64():
    """A function of float32 is checked in float64, which finds a relative error of 1e-5 in its gradient.

    The tolerance of float32 lets that error pass, and differences in float32 could not see it.
    """

    @jax.custom_vjp
    def nearly(x):
        return jnp.sin(x)

    nearly.defvjp(lambda x: (jnp.sin(x), x), lambda x, dy: (dy * jnp.cos(x) * (1 + 1e-5),))
    args = (X.astype("float32"),)
    assert testing.check_vjp(nearly, args, dtype=None).ok
    assert not testing.check_vjp(nearly, args).ok


def test_functions_that_compute_in_float32_inside():
    """A function that computes in float32 inside is never called wrong for float32's roundings.

    Its result may have another dtype than its float64 arguments. Where that result is cast back to float64, differences
    are unsure, and a reference decides. A gradient that is wrong by a factor of 2 is found.
    """

    def norm(x):
        z = x.astype("float32")
        return (z - z.mean(-1, keepdims=True)) * jax.lax.rsqrt(z.var(-1, keepdims=True) + 1e-6)

    assert testing.check_vjp(lambda x: jnp.tanh(x.astype("float32")), (X,)).ok
    assert testing.check_hvp(norm, (X,), reference=norm).ok

    def cast_back(x):  # to float64, whose tolerance float32 cannot keep
        return norm(x).astype(x.dtype)

    report = testing.check_vjp(cast_back, (X,))
    (row,) = report.rows
    assert row.unsure and not row.ok and not report.ok
    *_, line, note = str(report).splitlines()
    assert line.endswith("unsure") and note.startswith("unsure: ") and "give a reference" in note
    with pytest.raises(AssertionError, match=r"^unsure gradients"):
        testing.assert_vjp(cast_back, (X,))
    assert testing.check_vjp(cast_back, (X,), reference=cast_back).ok

    @jax.custom_vjp
    def wrong(x):
        return cast_back(x)

    wrong.defvjp(lambda x: jax.vjp(cast_back, x), lambda pullback, dy: (2 * pullback(dy)[0],))
    assert not testing.check_vjp(wrong, (X,)).ok
    assert not testing.check_vjp(wrong, (X,), reference=cast_back).ok


def test_a_sample_of_the_elements():
    """Differences look at as many elements as asked for, always the same for a seed; a reference looks at all."""
    x = np.random.default_rng(0).standard_normal((10, 20))
    (row,) = testing.check_vjp(jnp.sin, (x,), elements=7).rows
    assert (row.compared, row.size) == (7, 200) and "7 of 200" in str(testing.Report("", (row,)))
    assert row == testing.check_vjp(jnp.sin, (x,), elements=7).rows[0]
    assert testing.check_vjp(lambda x, empty: jnp.sin(x) + jnp.sum(empty), (x, x[:0]), elements=7).ok

    @jax.custom_vjp
    def wrong_once(x):
        return jnp.sin(x)

    wrong_once.defvjp(lambda x: (jnp.sin(x), x), lambda x, dy: ((dy * jnp.cos(x)).at[3, 4].add(1.0),))
    row = testing.check_vjp(wrong_once, (x,), reference=jnp.sin, elements=7).row("x")
    assert not row.ok and row.index == (3, 4)
    assert not testing.check_vjp(wrong_once, (x,), elements=None).ok


def test_under_others_configurations():
    x = np.array([1e-6, 1.0, 1.0, 2.0])
    with jax.debug_nans(True):  # a step leaves the domain of the logarithm
        assert testing.check_vjp(jnp.log, (x,)).ok
    with jax.disable_jit():
        assert testing.check_vjp(jnp.sin, (x[:1],)).ok
    with jax.numpy_dtype_promotion("strict"):
        assert testing.check_vjp(lambda x: jnp.sin(x.astype("float32")), (x,)).ok
        mixed = (x.astype("float32"), x.astype("bfloat16"))
        assert testing.check_hvp(lambda x, y: x * x * y.astype(x.dtype), mixed, dtype=None).ok


def test_second_differences_are_along_the_direction():
    """The second derivative of sin(x) y by rule is along the vector, as that of jnp is: both ways find it right."""
    args = (X, X + 1)
    for options in ({}, {"reference": lambda x, y: jnp.sin(x) * y}):
        assert testing.check_hvp(lambda x, y: jnp.sin(x) * y, args, **options).ok
    got = testing.check_hvp(lambda x: x**2 / 2, (X,)).row("x")
    random = np.random.default_rng([0, int.from_bytes(b"jln")])
    cotangent, direction = random.standard_normal(X.shape), random.standard_normal(X.shape)
    np.testing.assert_allclose(got.got, (cotangent * direction)[got.index], rtol=1e-12)

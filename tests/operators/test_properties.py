"""Properties that must hold for all data: hypothesis looks for data that break them.

By default 48 examples are tried in all, always the same ones.
`JLN_EXAMPLES=10000 pytest -n0 tests/operators/test_properties.py` tries 10,000 new ones, at night.
"""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import jln
import workbench
from workbench import OPERATORS

PROPERTIES = 8  # in this file
EXAMPLES = int(os.environ.get("JLN_EXAMPLES", "48"))
settings.register_profile(
    "jln",
    max_examples=-(-EXAMPLES // PROPERTIES),
    derandomize=EXAMPLES == 48,
    database=None,
    deadline=None,  # an example that compiles takes long
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large),
    print_blob=True,
)
settings.load_profile("jln")

DTYPES = ("float16", "bfloat16", "float32", "float64")
# Sizes are few, as a program is compiled for each and there should be time for data. 1, 2, 3, 17: several rows a tile,
# ragged. 130: just more than a power of two. 1100: one row a tile.
WIDTHS = (1, 2, 3, 17, 130, 1100)
ROWS = (1, 2, 7)
FEATURES = (1, 20, 300)  # 300 are too many for one kernel, so that norm and product are composed
# The least and the largest power of ten of the data. In bfloat16 and float32 the squares of the largest overflow.
MAGNITUDES = {"float16": (-7, 3), "bfloat16": (-30, 30), "float32": (-30, 30), "float64": (-30, 30)}
# Smaller errors pass: there a dtype has fewer digits, or XLA's CPU backend flushes to zero, and rstd multiplies that by
# up to 1000.
FLOOR = {"float16": 6e-8, "bfloat16": 1e-34, "float32": 1e-34, "float64": 1e-300}

implementations = st.sampled_from(["xla", "triton"])
# Roundings are allowed this many times, as a night compares 10^7 numbers: workbench's roundings are standard deviations
# of errors that are taken for independent.
DEVIATIONS = 6

seeds = st.integers(0, 2**32 - 1)


# Linears without a sum in front: sums are tested with the norms, and both together in test_several_linears.py.
LINEAR_OPERATORS = {name: o for name, o in workbench.LINEAR_OPERATORS.items() if not o.adds}


def is_linear(name):
    return name in LINEAR_OPERATORS


@functools.partial(jax.jit, static_argnums=(0, 1))
def run(name, options, operands, cotangent):
    """Return (results, gradients of the operands). `options` are pairs of a name and a value, such as the module."""
    options = dict(options)
    operator = {**OPERATORS, **LINEAR_OPERATORS}[name]
    results, pullback = jax.vjp(lambda *a: operator(*a, **options), *operands)
    return results, pullback(cotangent)


def ours(name, implementation, operands, cotangent, **options):
    options = {"epsilon": workbench.EPSILON, "implementation": implementation, **options}
    return run(name, tuple(options.items()), tuple(operands), cotangent)


def plain(name, operands, cotangent, **options):
    options = {"epsilon": workbench.EPSILON, "module": jln.reference, **options}
    return run(name, tuple(options.items()), tuple(operands), cotangent)


def arguments(name, rows, width, features, dtype, seed):
    """Return (operands, cotangent): normal random numbers, scaled such that results are about as large as 1."""
    random = np.random.default_rng(seed)

    def normal(shape, mean=0.0):
        return jnp.asarray(random.standard_normal(shape) + mean).astype(dtype)

    x, scale, offset = normal((rows, width)), normal((width,), 1.0), normal((width,))
    if is_linear(name):
        operator = LINEAR_OPERATORS[name]
        kernel = (normal((width, features)).astype("float64") / np.sqrt(width)).astype(dtype)
        operands = (x, scale, offset if operator.subtract_mean else None, kernel, normal((features,)))
        return operands, normal((rows, features))
    operator = OPERATORS[name]
    given = {
        "x": x,
        "residual": normal((rows, width)),
        "scale": scale,
        "offset": offset,
        "x_scale": 1 - scale,
    }
    operands = operands_of(operator, given)
    return operands, (normal((rows, width)), normal((rows, width)) if operator.adds else None)


def operands_of(operator, given):
    """Return the given operands in the operator's order, with None for those that it does not take."""
    return tuple(given[name] if name in operator.entry.names else None for name in operator.kind.names)


def replaced(operands, index, value):
    return (*operands[:index], value, *operands[index + 1 :])


@st.composite
def problems(draw, names=(*OPERATORS, *LINEAR_OPERATORS), dtypes=DTYPES, rows=ROWS):
    """Draw (name, dtype, operands, cotangent) of a call."""
    name, dtype, rows = draw(st.sampled_from(names)), draw(st.sampled_from(dtypes)), draw(st.sampled_from(rows))
    features = draw(st.sampled_from(FEATURES)) if is_linear(name) else 0
    operands, cotangent = arguments(name, rows, draw(st.sampled_from(WIDTHS)), features, dtype, draw(seeds))
    return name, dtype, operands, cotangent


def leaves(tree):
    return [np.asarray(a) for a in jax.tree.leaves(tree)]


def assert_same(a, b):
    for x, y in zip(leaves(a), leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def data_of_any_scale(draw, x, dtype):
    """Return x with each row multiplied by a power of ten that is drawn.

    Some rows are made constant, some get a mean a thousand times their spread, and some are made denormal instead.
    """
    low, high = MAGNITUDES[dtype]
    x = np.array(x, "float64")
    for row in range(len(x)):
        kind = draw(st.sampled_from(["as it is", "as it is", "constant", "large mean", "denormal"]))
        if kind == "constant":
            x[row] = x[row, 0]
        elif kind == "large mean":
            x[row] += 1000
        elif kind == "denormal":
            x[row] *= float(jnp.finfo(dtype).smallest_normal)
        if kind != "denormal":
            x[row] *= 10.0 ** draw(st.integers(low, high if kind != "large mean" else high - 2))
    return jnp.asarray(x).astype(dtype)


def squares_fit(total, dtype):
    """Return whether the sum of squares of every row is far from overflow in the dtype of the arithmetic."""
    compute = jnp.promote_types(dtype, jnp.float32)
    return np.max(np.sum(np.asarray(total, "float64") ** 2, -1)) < float(jnp.finfo(compute).max) / 10


@given(problems(names=tuple(OPERATORS)), implementations, st.data())
def test_norms_at_any_scale(problem, implementation, data):
    """Norms err by at most twice plain jnp's error plus the roundings that `assert_close` allows, at any scale of x.

    Where the squares of a row overflow, results and gradients are finite.
    """
    name, dtype, operands, cotangent = problem
    operands = replaced(operands, 0, data_of_any_scale(data.draw, operands[0], dtype))
    operator = OPERATORS[name]
    (y, total), gradients = ours(name, implementation, operands, cotangent)
    normalised = operands[0] if total is None else total
    in_front = [operands[0]] if operator.entry.both_sides else []
    if not all(squares_fit(a, dtype) for a in (normalised, *in_front)):
        assert all(np.isfinite(a).all() for a in leaves((y, gradients)))
        return
    rounded = None if total is None else np.asarray(total)
    values, roundings = workbench.truth(operator, operands, cotangent, total=rounded)
    (plain_y, _), plain_gradients = plain(name, operands, cotangent)
    got, expected = (
        {n: a for n, a in zip(operator.results, (y, None, *gradients), strict=True) if n != "dresidual"}
        for y, gradients in ((y, gradients), (plain_y, plain_gradients))
    )
    are_known = np.logical_and.reduce([is_known(a, operator) for a in (normalised, *in_front)])
    assert_close(got, expected, values, roundings, dtype, are_known)


@given(problems(names=tuple(LINEAR_OPERATORS)), implementations, st.data())
def test_linears_at_any_scale(problem, implementation, data):
    name, dtype, operands, cotangent = problem
    operands = replaced(operands, 0, data_of_any_scale(data.draw, operands[0], dtype))
    y, gradients = ours(name, implementation, operands, cotangent)
    if not squares_fit(operands[0], dtype):
        assert all(np.isfinite(a).all() for a in leaves((y, gradients)))
        return
    plain_y, plain_gradients = plain(name, operands, cotangent)
    values, roundings = workbench.truth(LINEAR_OPERATORS[name], operands, cotangent)
    got, expected = (
        dict(zip(LINEAR_OPERATORS[name].results, results, strict=True))
        for results in ((y, *gradients), (plain_y, *plain_gradients))
    )
    assert_close(got, expected, values, roundings, dtype, is_known(operands[0], LINEAR_OPERATORS[name]))


def is_known(normalised, operator):
    """Return which rows have a dx to compare, as a mask [M].

    A constant row of 1e23 has none, as its spread is only the rounding of its mean, and dx depends on that rounding.
    """
    x = np.asarray(normalised, "float64")
    eps = float(jnp.finfo(jnp.promote_types(normalised.dtype, jnp.float32)).eps)
    spread = np.sqrt((x.var(-1) if operator.subtract_mean else np.mean(x**2, -1)) + workbench.EPSILON)
    return spread > 10 * eps * np.max(np.abs(x), -1)


def errors(got, true):
    """Return the error of each element, 0 where the true value overflows in the dtype of `got`, and `got` does so too.

    A float16 dx overflows where rstd is 1000.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(np.isinf(got) & (got == true.astype(got.dtype)), 0, np.abs(got.astype(true.dtype) - true))


def assert_close(got, expected, values, roundings, dtype, known):
    """Raise where an error is larger than is allowed.

    Unlike `workbench.assert_accurate` it takes plain jnp's error by row, since rows differ in scale.
    """
    for name, a in got.items():
        if a is None:
            continue
        t = values[name]
        error, plain_error = (errors(np.asarray(b), t) for b in (a, expected[name]))
        a = np.asarray(a).astype(t.dtype)
        plain_error[~np.isfinite(plain_error)] = 0  # where plain jnp overflows we must not
        if name == "dx":
            assert np.isfinite(error).all()
            error[~known] = plain_error[~known] = 0
        if t.ndim > 1:
            plain_error = np.max(plain_error, -1, keepdims=True) if name in ("y", "dx") else np.max(plain_error)
        else:
            plain_error = np.max(plain_error)
        last = float(jnp.finfo(dtype).eps) * np.abs(t) + FLOOR[dtype]  # the rounding to the result's own dtype
        allowed = 2 * plain_error + DEVIATIONS * roundings[name] + last
        worst = np.argmax(np.where(np.isfinite(error), error - allowed, np.inf))
        at = f"{name}{list(map(int, np.unravel_index(worst, t.shape)))}"
        assert (error <= allowed).all(), f"{at}: {a.flat[worst]} for {t.flat[worst]}, allowed {allowed.flat[worst]:.2e}"


@given(
    st.sampled_from(list(OPERATORS)),
    implementations,
    st.lists(st.sampled_from([1, 2, 3, 5, 8]), min_size=1, max_size=4),
    st.data(),
    seeds,
)
def test_any_axes(name, implementation, shape, data, seed):
    """A norm over any axes, in any order, has the reference's results and gradients in float64."""
    chosen = data.draw(st.permutations(range(len(shape))))[: data.draw(st.integers(1, len(shape)))]
    axis = tuple(a - len(shape) if data.draw(st.booleans()) else a for a in chosen)
    if {*chosen} != {*range(len(shape) - len(chosen), len(shape))}:  # which kernels do not take
        implementation = "xla"
    random = np.random.default_rng(seed)
    operator = OPERATORS[name]
    x, residual, dy, dtotal = (jnp.asarray(random.standard_normal(shape)) for _ in range(4))
    scale, offset = (jnp.asarray(random.standard_normal([shape[a] for a in axis])) for _ in range(2))
    given = {
        "x": x,
        "residual": residual,
        "scale": scale,
        "offset": offset,
        "x_scale": 1 - scale,
    }
    operands = operands_of(operator, given)
    cotangent = (dy, dtotal if operator.adds else None)
    got = ours(name, implementation, operands, cotangent, axis=axis)
    expected = plain(name, operands, cotangent, axis=axis)
    for a, t in zip(leaves(got), leaves(expected), strict=True):
        assert a.shape == t.shape
        # rstd is at most 1000, and its cube multiplies roundings where a row has next to no spread.
        np.testing.assert_allclose(a, t, rtol=1e-10, atol=1e-10 * max(1, np.max(np.abs(t), initial=0)))


@given(problems(), implementations, st.data())
def test_what_is_bad_stays_in_its_row(problem, implementation, data):
    """A NaN, an infinity, a denormal or the largest number in a row of x or dy changes no bit of another row."""
    name, dtype, operands, cotangent = problem
    x = operands[0]
    bad = data.draw(st.sampled_from(["nan", "inf", "-inf", "smallest_subnormal", "max"]))
    value = float(bad) if bad in ("nan", "inf", "-inf") else float(getattr(jnp.finfo(dtype), bad))
    row = data.draw(st.integers(0, len(x) - 1))
    if data.draw(st.booleans()):
        dirty = replaced(operands, 0, x.at[row, data.draw(st.integers(0, x.shape[1] - 1))].set(value)), cotangent
    else:
        dy, *rest = jax.tree.leaves(cotangent)
        dy = dy.at[row, data.draw(st.integers(0, dy.shape[1] - 1))].set(value)
        dirty = operands, jax.tree.unflatten(jax.tree.structure(cotangent), [dy, *rest])
    others = np.arange(len(x)) != row
    clean_results, clean_gradients = ours(name, implementation, operands, cotangent)
    results, gradients = ours(name, implementation, *dirty)
    of_rows = 1 if is_linear(name) else 2  # dx, and dresidual or None
    pairs = ((clean_results, clean_gradients[:of_rows]), (results, gradients[:of_rows]))
    for a, b in zip(*map(leaves, pairs), strict=True):
        np.testing.assert_array_equal(a[others], b[others])


@given(problems(names=tuple(OPERATORS), rows=(2, 7, 23)), st.data())
def test_a_row_alone_is_as_among_others(problem, data):
    """The kernels give a row by itself, bit for bit, the results and gradients that it has among others."""
    name, _, operands, cotangent = problem
    x = operands[0]
    row = data.draw(st.integers(0, len(x) - 1))

    def only(a):
        return None if a is None else a[row : row + 1]

    alone = (only(operands[0]), only(operands[1]), *operands[2:])
    results, gradients = ours(name, "triton", operands, cotangent)
    alone_results, alone_gradients = ours(name, "triton", alone, tuple(map(only, cotangent)))
    assert_same(jax.tree.map(only, (results, gradients[:2])), (alone_results, alone_gradients[:2]))


@given(problems(), implementations)
def test_repeats_are_the_same(problem, implementation):
    name, _, operands, cotangent = problem
    first = ours(name, implementation, operands, cotangent)
    for _ in range(3):
        assert_same(ours(name, implementation, operands, cotangent), first)


@given(problems(dtypes=("float64",)), implementations, seeds, st.integers(-20, 20))
def test_gradients_are_linear_in_the_cotangent(problem, implementation, seed, power):
    """Gradients are linear in the cotangent: bit for bit in a factor of a power of two, to rounding in a sum."""
    name, _, operands, cotangent = problem
    random = np.random.default_rng(seed)
    other = jax.tree.map(lambda a: jnp.asarray(random.standard_normal(a.shape)), cotangent)
    both = jax.tree.map(jnp.add, cotangent, other)
    scaled = jax.tree.map(lambda a: a * 2.0**power, cotangent)
    of_first, of_other, of_both, of_scaled = (
        leaves(ours(name, implementation, operands, c)[1]) for c in (cotangent, other, both, scaled)
    )
    for a, b, ab, sa in zip(of_first, of_other, of_both, of_scaled, strict=True):
        np.testing.assert_array_equal(sa, a * 2.0**power)
        size = max(np.max(np.abs(v)) for v in (a, b, ab, np.ones(1)))
        # A row without spread has an rstd of 1000, whose cancelled terms leave 1000 roundings.
        np.testing.assert_allclose(ab, a + b, rtol=0, atol=1e-11 * size)


@given(
    problems(names=("layer_norm", "rms_norm", "layer_norm_linear"), dtypes=DTYPES[2:]),
    implementations,
    st.integers(-8, 8),
    st.sampled_from([1.0, 16.0, 1024.0]),
)
def test_shift_and_scale_of_x(problem, implementation, power, shift):
    """Multiplying x by 2^n and epsilon by 4^n changes neither y nor the parameters' gradients, and divides dx by 2^n.

    A shift of x changes y by rounding alone where a mean is subtracted.
    """
    name, dtype, operands, cotangent = problem
    factor = 2.0**power
    epsilon = 2.0**-20
    y, gradients = ours(name, implementation, operands, cotangent, epsilon=epsilon)
    scaled = replaced(operands, 0, operands[0] * factor)
    scaled_y, scaled_gradients = ours(name, implementation, scaled, cotangent, epsilon=epsilon * factor**2)
    eps = float(jnp.finfo(dtype).eps)
    # All is exact except rsqrt, which may round differently; its error goes into every term once.
    for a, b in zip(leaves((y, *gradients[1:])), leaves((scaled_y, *scaled_gradients[1:])), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=16 * eps * max(1, np.max(np.abs(a))))
    np.testing.assert_allclose(
        gradients[0], scaled_gradients[0] * factor, rtol=0, atol=16 * eps * max(1, np.max(np.abs(gradients[0])))
    )
    if name != "rms_norm":
        x = np.asarray(operands[0], "float64")
        rstd = 1 / np.sqrt(x.var(-1).min() + epsilon)
        shifted = replaced(operands, 0, operands[0] + shift)
        shifted_y, _ = ours(name, implementation, shifted, cotangent, epsilon=epsilon)
        (y,), (shifted_y,) = leaves(y), leaves(shifted_y)
        # The shift rounds x, and the mean, to eps of it, which rstd and scale enlarge; a Linear adds up H of these.
        size = np.max(np.abs(operands[1 if is_linear(name) else 2]))
        rounding = 4 * eps * (shift + np.max(np.abs(x))) * rstd * size
        if is_linear(name):
            rounding *= np.max(np.sum(np.abs(operands[3]), 0))
        np.testing.assert_allclose(shifted_y, y, rtol=0, atol=rounding + 16 * eps * np.max(np.abs(y)))


def test_there_are_as_many_properties_as_share_the_examples():
    found = [f for f in globals().values() if hasattr(f, "hypothesis")]
    assert len(found) == PROPERTIES

"""The gradient checker `jln.testing`: its report's numbers, its tolerances, what it differentiates and its errors."""

import dataclasses
import functools
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln
from jln import testing
from jln.testing import Row, Tolerance

X = np.random.default_rng(0).standard_normal((3, 4))


@jax.custom_vjp
def bent(x, scale):
    """Return x * scale. The gradient of scale is wrong in its first element and, more so, in its third."""
    return x * scale[None, :]


bent.defvjp(
    lambda x, scale: (bent(x, scale), (x, scale)),
    lambda saved, dy: (dy * saved[1][None, :], jnp.sum(dy * saved[0], 0) + jnp.array([0.1, 0, 0.5, 0], dy.dtype)),
)


def straight(x, scale):
    return x * scale[None, :]


def test_the_row_of_a_wrong_argument_is_its_worst_element():
    report = testing.check_vjp(bent, (X, X[0]), reference=straight)
    assert not report.ok and report.row("x").ok
    row = report.row("scale")
    assert not row.ok and row.index == (2,) and row.size == 4
    np.testing.assert_allclose(row.got - row.expected, 0.5, rtol=1e-9)
    np.testing.assert_allclose(row.error, 0.5, rtol=1e-9)
    np.testing.assert_allclose(row.tolerance, 1e-10 + 1e-7 * abs(row.expected), rtol=1e-12)


def test_nothing_is_kept_from_an_earlier_check():
    """A check keeps nothing of an earlier one: it sees the changed value and rule of the same function object."""
    by = {"value": 1.0, "rule": 1.0, "reference": 1.0}

    @jax.custom_vjp
    def scaled(x):
        return by["value"] * x * x

    scaled.defvjp(lambda x: (scaled(x), x), lambda x, dy: (2 * by["rule"] * x * dy,))

    def f(x):
        return scaled(x)

    def reference(x):
        return by["reference"] * x * x

    def verdicts():
        return [check(f, (X,), reference=reference).ok for check in (testing.check_vjp, testing.check_hvp)]

    assert verdicts() == [True, True]
    by["rule"] = 1.5
    assert verdicts() == [False, False]
    by.update(value=3.0, rule=3.0)
    assert verdicts() == [False, False]
    by["reference"] = 3.0
    assert verdicts() == [True, True]


def test_one_row_for_each_argument_and_one_for_the_result():
    report = testing.check_vjp(straight, (X, X[0]), reference=straight)
    assert [row.name for row in report.rows] == ["result", "x", "scale"]


def test_a_wrong_result_is_wrong_even_with_the_right_gradient():
    report = testing.check_vjp(lambda x: x + 1, (X,), reference=lambda x: x)
    assert [row.name for row in report.rows if not row.ok] == ["result"]


def test_the_report_is_a_table():
    report = testing.check_vjp(bent, (X, X[0]), reference=straight)
    title, header, *lines = str(report).splitlines()
    assert title == "bent: reverse-mode gradients in float64, random cotangent (seed 0)"
    assert header.split() == ["elements", "worst", "at", "got", "expected", "error", "allowed"]
    assert [line.split()[:2] for line in lines] == [["result", "12"], ["x", "12"], ["scale", "4"]]
    assert lines[1].endswith("ok") and lines[2].endswith("WRONG") and "[2]" in lines[2] and "5.0e-01" in lines[2]
    assert len({line.index("[") for line in lines}) == 1
    assert json.loads(json.dumps(dataclasses.asdict(report)))["rows"][2]["ok"] is False


def test_assertions_raise_with_the_table():
    with pytest.raises(AssertionError, match=r"(?s)bent: reverse-mode.*scale .*\[2\].*WRONG"):
        testing.assert_vjp(bent, (X, X[0]), reference=straight)
    assert testing.assert_vjp(straight, (X, X[0]), reference=straight) is None
    assert testing.assert_hvp(straight, (X, X[0]), reference=straight) is None

    @jax.custom_vjp
    def sine(x):
        return jnp.sin(x)

    sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, dy: (dy * jax.lax.stop_gradient(jnp.cos(x)),))
    with pytest.raises(AssertionError, match=r"(?s)sine: Hessian-vector products.*WRONG"):
        testing.assert_hvp(sine, (X,), reference=jnp.sin)


# The tolerance is exact: where 1e-4 is allowed, an error of 0.9e-4 passes and one of 1.1e-4 does not.
@pytest.mark.parametrize("dtype", testing.TOLERANCES)
@pytest.mark.parametrize(("part", "ok"), [(0.9, True), (1.1, False)])
def test_tolerances(dtype, part, ok):
    allowed = testing.TOLERANCES[dtype]
    expected = np.array([2.0, -3.0, 0.0])
    got = expected + np.array([0, -part * (allowed.absolute + 3 * allowed.relative), 0])
    row = Row.worst("x", got, expected, allowed)
    assert row.ok == ok and row.index == (1,)


def test_tolerances_are_those_of_the_coarsest_dtype():
    assert dict(testing.TOLERANCES) == {
        "float16": Tolerance(1e-2, 1e-4),
        "bfloat16": Tolerance(8e-2, 8e-4),
        "float32": Tolerance(1e-4, 1e-7),
        "float64": Tolerance(1e-7, 1e-10),
    }
    row = testing.check_vjp(straight, (X, X[0].astype("float32")), reference=straight, dtype=None).row("scale")
    np.testing.assert_allclose(row.tolerance, 1e-7 + 1e-4 * abs(row.expected), rtol=1e-12)
    args = (X.astype("float32"),)
    row = testing.check_vjp(lambda x: x.astype("bfloat16"), args, reference=lambda x: x, dtype=None).row("x")
    np.testing.assert_allclose(row.tolerance, 8e-4 + 8e-2 * abs(row.expected), rtol=1e-12)
    assert not testing.check_vjp(bent, (X, X[0]), reference=straight, tolerance=Tolerance(0, 0.4)).ok
    assert testing.check_vjp(bent, (X, X[0]), reference=straight, tolerance=Tolerance(0, 0.6)).ok


# The tolerances of 16-bit dtypes must let pass a chain of operations that are each rounded to 16 bits, without sums.
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_chains_of_rounded_operations_pass_in_16_bits(dtype):
    def chain(x, scale):
        return jnp.tanh(x * scale + 1) * x

    for seed in range(5):
        random = np.random.default_rng(seed)
        args = tuple(random.uniform(0.5, 1, (3, 4)).astype(jnp.dtype(dtype)) for _ in range(2))
        report = testing.check_vjp(chain, args, reference=chain, dtype=None, seed=seed)
        assert report.ok, report
    assert not testing.check_vjp(lambda x, s: chain(x, s) * 1.2, args, reference=chain, dtype=None).ok


@pytest.mark.parametrize(
    ("got", "expected", "ok"),
    [
        (np.nan, 1.0, False), (np.nan, np.nan, False), (1.0, np.nan, False), (np.inf, 1.0, False),
        (1.0, np.inf, False), (np.inf, np.inf, True), (-np.inf, np.inf, False), (0.0, -0.0, True),
    ],
)  # fmt: skip
def test_what_is_not_finite_is_not_close(got, expected, ok):
    row = Row.worst("x", np.array([1.0, got]), np.array([1.0, expected]), testing.TOLERANCES["float16"])
    assert row.ok == ok and row.index == ((0,) if ok else (1,))


def test_nothing_but_itself_is_within_an_infinite_tolerance():
    assert not Row.worst("x", np.array([1.0, 1.0]), np.array([1.0, 2.0]), Tolerance(0, np.inf)).ok


def test_float64_needs_no_configuration():
    code = """
import numpy as np, jax, jax.numpy as jnp
from jln import testing
import sys
report = testing.check_vjp(jnp.sin, (np.ones(3, "float32"),), reference=jnp.sin)
assert report.ok and report.row("x").error < 1e-10, report
assert jnp.ones(1).dtype == "float32" and jnp.sin(np.ones(2)).dtype == "float32"
print([m for m in ("rich", "typer", "triton", "flax", "optax", "hypothesis") if m in sys.modules])
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stdout.strip() == "[]", ran.stderr


def test_pytrees_and_integers():
    def network(parameters, ids, x):
        return {"y": x @ parameters["kernel"][0] + parameters["bias"][None, :], "ids": ids}

    parameters = {"kernel": [X.T], "bias": X[:, 0]}
    args = (parameters, np.arange(3), X)
    report = testing.check_vjp(network, args, reference=network)
    assert report.ok
    names = ["result['y']", "parameters['bias']", "parameters['kernel'][0]", "x"]
    assert [row.name for row in report.rows] == names
    assert testing.check_hvp(network, args, reference=network).ok


def test_random_keys_are_held_fixed():
    def dropout(key, x):
        return x * jax.random.bernoulli(key, 0.5, x.shape)

    report = testing.check_vjp(dropout, (jax.random.key(0), X), reference=dropout)
    assert report.ok and [row.name for row in report.rows] == ["result", "x"]


def test_arguments_without_a_name_get_none():
    """Arguments that `*a` takes are named by their positions in it, and not by the keyword behind it."""
    report = testing.check_vjp(
        lambda *a, axis=0: jnp.sum(a[0] * a[1], axis), (X, X), reference=lambda b, c: (b * c).sum(0)
    )
    assert [row.name for row in report.rows] == ["result", "a[0]", "a[1]"]


def test_functions_that_cannot_be_hashed():
    class Scaled:
        __hash__ = None

        def __init__(self, by):
            self.by = by

        def __call__(self, x):
            return x * self.by

    for by in (2.0, 3.0):
        assert testing.check_vjp(Scaled(by), (X,), reference=functools.partial(jnp.multiply, by)).ok
    partial = functools.partial(jnp.sum, axis=0)
    assert testing.check_vjp(partial, (X,), reference=partial).rows[1].name == "a"


def test_the_cotangent_is_not_the_arguments():
    """The cotangent differs from the arguments that a user draws from the same seed."""
    cotangents = []

    @jax.custom_vjp
    def seen(x):
        return x * 1

    def backward(_, dy):
        jax.debug.callback(lambda a: cotangents.append(np.asarray(a)), dy)
        return (dy,)

    seen.defvjp(lambda x: (seen(x), None), backward)
    for seed in range(3):
        x = np.random.default_rng(seed).standard_normal((3, 4))
        assert testing.check_vjp(seen, (x,), reference=lambda x: x, seed=seed).ok
        assert len(cotangents) == seed + 1 and abs(np.corrcoef(x.ravel(), cotangents[-1].ravel())[0, 1]) < 0.8


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_dtypes_by_any_name(dtype):
    """A dtype may be given as text, as a scalar type of JAX or of NumPy, or as a dtype."""
    scalar = getattr(jnp, dtype)
    names = (dtype, scalar, np.dtype(dtype), np.dtype(dtype).type, jnp.dtype(scalar))
    reports = [testing.check_vjp(jnp.sin, (X,), reference=jnp.sin, dtype=name) for name in names]
    assert all(report == reports[0] for report in reports) and reports[0].ok and f" in {dtype}," in reports[0].title


def test_no_elements():
    report = testing.check_vjp(lambda x: jnp.sum(x**2), (np.ones((0, 3)),), reference=lambda x: jnp.sum(x * x))
    assert report.ok and report.row("x").size == 0
    assert str(report).splitlines()[-1].split() == ["x", "0", "[]", "-", "-", "-", "-", "ok"]


def test_a_float32_function_is_checked_in_float64():
    """A function of float32 is checked in float64, which finds an error that the tolerance of float32 lets pass."""

    @jax.custom_vjp
    def nearly(x):
        return jnp.sin(x)

    nearly.defvjp(lambda x: (jnp.sin(x), x), lambda x, dy: (dy * jnp.cos(x) * (1 + 1e-5),))
    args = (X.astype("float32"),)
    assert testing.check_vjp(nearly, args, reference=jnp.sin, dtype=None).ok
    assert not testing.check_vjp(nearly, args, reference=jnp.sin).ok


def test_functions_that_compute_in_float32_inside():
    """The results of a function that computes in float32 inside may have another dtype than its float64 arguments."""

    def single(x, scale):
        return norm(x.astype("float32"), scale.astype("float32"))

    assert testing.check_vjp(single, (X, X[0]), reference=norm).ok
    assert testing.check_hvp(single, (X, X[0]), reference=single).ok


def test_under_others_configurations():
    with jax.disable_jit():
        assert testing.check_vjp(jnp.sin, (X,), reference=jnp.sin).ok

    def f(x, y):
        return x * x * y.astype(x.dtype)

    with jax.numpy_dtype_promotion("strict"):
        assert testing.check_hvp(f, (X.astype("float32"), X.astype("bfloat16")), reference=f, dtype=None).ok


def test_second_derivatives_are_along_a_random_vector():
    got = testing.check_hvp(lambda x: x**2 / 2, (X,), reference=lambda x: x * x / 2).row("x")
    random = np.random.default_rng([0, int.from_bytes(b"jln")])
    cotangent, vector = random.standard_normal(X.shape), random.standard_normal(X.shape)
    np.testing.assert_allclose(got.got, (cotangent * vector)[got.index], rtol=1e-12)


def norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale[None, :]


def test_a_fused_function_is_compared_with_its_own(monkeypatch):
    report = testing.check_fuse(norm, (X, X[0]))
    assert report.ok and [row.name for row in report.rows] == ["result", "x", "scale"]
    monkeypatch.setattr(testing, "fuse", lambda f, **_: lambda *args: f(*args) * (1 + 1e-9))
    assert not testing.check_fuse(norm, (X, X[0])).ok
    half = testing.check_fuse(lambda x, s: norm(x.astype("float32"), s.astype("float32")), (X, X[0]))
    assert half.ok and " in float32," in half.title  # where 1e-9 is nothing


def test_lost_operators_are_told():
    f = jln.fuse(norm)
    assert testing.assert_operators(f, (X, X[0]), {"rms_norm": 1}) is None
    with pytest.raises(AssertionError, match=r"(?s)found \{'rms_norm': 1\}:\n  jln.rms_norm: "):
        testing.assert_operators(f, (X, X[0]), {"rms_norm": 2})


def check(f=jnp.sin, args=(X,), reference=jnp.sin, **options):
    testing.check_vjp(f, args, reference=reference, **options)


ERRORS = {
    "no reference": (
        TypeError, "give reference=, .* jax.test_util.check_grads", lambda: testing.check_vjp(jnp.sin, (X,)),
    ),
    "not a function": (TypeError, "f must be a function; got int", lambda: check(3)),
    "reference that is no function": (
        TypeError, "reference must be a function; got ndarray", lambda: check(reference=X),
    ),
    "text": (TypeError, "f must return arrays; got str", lambda: check(lambda x: "x")),
    "a number": (TypeError, "f must return arrays; got float", lambda: check(lambda x: 1.0)),
    "nothing": (TypeError, "f must return an array", lambda: check(lambda x: None)),
    "integers": (TypeError, "f must return an array of a floating", lambda: check(jnp.argmax)),
    "reference of text": (TypeError, "reference must return arrays; got str", lambda: check(reference=lambda x: "x")),
    "an array for arguments": (TypeError, "args must be a tuple", lambda: check(args=X)),
    "text for an argument": (TypeError, "args must hold arrays; got str", lambda: check(args=("x",))),
    "complex": (TypeError, "args must hold real arrays; got complex128", lambda: check(args=(X + 1j,))),
    "only integers": (TypeError, "a floating array", lambda: check(args=(np.arange(3),))),
    "dtype": (
        ValueError, "dtype must be None or one of float16, bfloat16, float32, float64; got 'float8'",
        lambda: check(dtype="float8"),
    ),
    "dtype of integers": (ValueError, "got <class 'int'>", lambda: check(dtype=int)),
    "no dtype at all": (ValueError, "got 3", lambda: check(dtype=3)),
    "arguments of another dtype": (
        ValueError, "dtypes must be among float16, .*; got float8_e5m2",
        lambda: check(args=(X.astype(jnp.float8_e5m2),), dtype=None),
    ),
    "seed": (ValueError, "seed must be an integer from 0 on", lambda: check(seed=-1)),
    "a fraction of a seed": (ValueError, "got 0.5", lambda: check(seed=0.5)),
    "another shape": (
        ValueError, r"of f's shapes \[\(3, 4\)\]; got \[\(4,\)\]", lambda: check(reference=lambda x: x[0]),
    ),
    "complex result": (
        TypeError, "f must return real arrays; got complex", lambda: check(lambda x: jnp.exp(1j * x)),
    ),
    "tolerance": (TypeError, "tolerance must be a Tolerance; got float", lambda: check(tolerance=1e-3)),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    kind, message, call = ERRORS[case]
    with pytest.raises(kind, match=message) as raised:
        call()
    assert len(str(raised.value).splitlines()) == 1

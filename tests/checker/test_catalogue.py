"""The checker `jln.testing` accepts the operators and rejects every wrong rule here; its report and its errors."""

import dataclasses
import functools
import json
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln
from catalogue import EPSILON
from jln import testing
from jln.testing import Row, Tolerance

pytestmark = pytest.mark.usefixtures("promoted_ranks")  # broadcasting is what half of these are about


def reports(check, f, args, **options):
    """The reports of two seeds, each with arguments of its own."""
    return [check(f, args(np.random.default_rng(seed)), seed=seed, **options) for seed in range(2)]


def normal(*shapes):
    return lambda random: tuple(random.standard_normal(shape) for shape in shapes)


OF_LAYER_NORM = normal((3, 4), (4,), (4,))


@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("layer_norm", OF_LAYER_NORM),
        ("rms_norm_gated", normal((3, 4), (3, 4), (4,))),
        ("add_rms_norm", normal((3, 4), (3, 4), (4,))),
        ("layer_norm_linear", normal((3, 4), (4,), (4,), (4, 2), (2,))),
    ],
)
def test_right_kernels_are_accepted(implementation, name, args):
    f = functools.partial(getattr(jln, name), implementation=implementation)
    for report in reports(testing.check_vjp, f, args, reference=getattr(jln.reference, name)):
        assert report.ok, report


def wrong(function, rule):
    """Return `function` with the backward rule `(*arguments, dy) -> gradients`."""

    @jax.custom_vjp
    def f(*args):
        return function(*args)

    f.defvjp(lambda *args: (function(*args), args), lambda args, dy: rule(*args, dy))
    return f


def layer_norm(dy=lambda dy: dy, **slips):
    """LayerNorm of x [M, H] with a backward rule in which some gradients are wrong functions of its terms.

    The terms are those of `jln._junction.formulas`. dy: what becomes of the cotangent.
    """

    def rule(x, scale, offset, cotangent):
        t = types.SimpleNamespace(dy=dy(cotangent), h=x.shape[-1])
        mean = jnp.mean(x, -1, keepdims=True)
        t.rstd = jax.lax.rsqrt(jnp.mean((x - mean) ** 2, -1, keepdims=True) + EPSILON)
        t.x_hat, t.g = (x - mean) * t.rstd, t.dy * scale
        t.c1, t.c2 = (jnp.mean(a, -1, keepdims=True) for a in (t.g, t.g * t.x_hat))
        t.dx = t.rstd * (t.g - t.c1 - t.x_hat * t.c2)
        t.dscale, t.doffset = jnp.sum(t.dy * t.x_hat, 0), jnp.sum(t.dy, 0)
        return tuple(slips[name](t) if name in slips else getattr(t, name) for name in ("dx", "dscale", "doffset"))

    return wrong(functools.partial(jln.reference.layer_norm, epsilon=EPSILON), rule)


LAYER_NORMS = {
    # The parameters' gradients, sums over rows, stand where the sums over a row belong.
    "column sums for row means": layer_norm(dx=lambda t: t.rstd * (t.g - t.doffset / t.h - t.x_hat * t.dscale / t.h)),
    # dx_h is made of dy_h alone, as if a row's elements did not share their statistics.
    "only the diagonal": layer_norm(dx=lambda t: t.g * t.rstd * (1 - 1 / t.h - t.x_hat**2 / t.h)),
    "without c2": layer_norm(dx=lambda t: t.rstd * (t.g - t.c1)),  # the variance is taken for a constant
    "dscale off by a percent": layer_norm(dscale=lambda t: 1.01 * t.dscale),
    "doffset of one row": layer_norm(doffset=lambda t: t.dy[0]),
    "cotangent ignored": layer_norm(dy=jnp.ones_like),  # right for the loss `y.sum()`, and for no other
    "unbiased variance": layer_norm(dx=lambda t: t.dx * (t.h / (t.h - 1)) ** 0.5),
}
WRONG = {
    "broadcast offset of one row": (wrong(jnp.add, lambda x, b, dy: (dy, dy[0])), normal((3, 4), (4,))),
    "transpose not transposed back": (wrong(jnp.transpose, lambda x, dy: (dy,)), normal((4, 4))),
    "mean without 1/N": (wrong(jnp.mean, lambda x, dy: (jnp.full_like(x, dy),)), normal((3, 4))),
    **{f"LayerNorm: {name}": (f, OF_LAYER_NORM) for name, f in LAYER_NORMS.items()},
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rules_are_rejected(name):
    """Rules are rejected in float32, too, as a float32 gradient is compared with one in float64."""
    f, args = WRONG[name]
    for dtype in ("float64", "float32"):
        for report in reports(testing.check_vjp, f, args, reference=f.__wrapped__, dtype=dtype):
            assert not report.ok and report.row("result").ok, report


def test_right_norm_in_the_dress_of_the_wrong_ones_is_accepted():
    """Wrong ones might else be rejected for the form in which they are written."""
    f = layer_norm()
    assert all(report.ok for report in reports(testing.check_vjp, f, OF_LAYER_NORM, reference=f.__wrapped__))


def test_second_derivatives():
    """A wrong one is rejected where the gradient is right and the gradient's own rule is wrong."""
    right = reports(testing.check_hvp, jln.layer_norm, OF_LAYER_NORM, reference=jln.reference.layer_norm)
    assert all(report.ok for report in right)
    slope = wrong(jnp.cos, lambda x, dy: (dy * jnp.sin(x),))
    f, args = wrong(jnp.sin, lambda x, dy: (dy * slope(x),)), normal((3, 4))
    assert all(report.ok for report in reports(testing.check_vjp, f, args, reference=jnp.sin))
    assert not any(report.ok for report in reports(testing.check_hvp, f, args, reference=jnp.sin))


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


def norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale[None, :]


def norm_in_float32(x, scale):
    return norm(x.astype("float32"), scale.astype("float32"))


def test_the_report_is_a_table_and_the_row_of_a_wrong_argument_its_worst_element():
    report = testing.check_vjp(bent, (X, X[0]), reference=straight)
    assert not report.ok and report.row("x").ok
    row = report.row("scale")
    assert not row.ok and row.index == (2,) and row.size == 4
    np.testing.assert_allclose(row.got - row.expected, 0.5, rtol=1e-9)
    np.testing.assert_allclose(row.error, 0.5, rtol=1e-9)
    np.testing.assert_allclose(row.tolerance, 1e-10 + 1e-7 * abs(row.expected), rtol=1e-12)
    title, header, *lines = str(report).splitlines()
    assert title == "bent: reverse-mode gradients in float64, random cotangent (seed 0)"
    assert header.split() == ["elements", "worst", "at", "got", "expected", "error", "allowed"]
    assert [line.split()[:2] for line in lines] == [["result", "12"], ["x", "12"], ["scale", "4"]]
    assert lines[1].endswith("ok") and lines[2].endswith("WRONG") and "[2]" in lines[2] and "5.0e-01" in lines[2]
    assert len({line.index("[") for line in lines}) == 1
    assert json.loads(json.dumps(dataclasses.asdict(report)))["rows"][2]["ok"] is False


def test_nothing_is_kept_from_an_earlier_check():
    """A check keeps nothing of an earlier one: it sees the changed value and rule of the same function object."""
    by = {"value": 1.0, "rule": 1.0, "reference": 1.0}
    scaled = wrong(lambda x: by["value"] * x * x, lambda x, dy: (2 * by["rule"] * x * dy,))

    def reference(x):
        return by["reference"] * x * x

    changes = {}, {"rule": 1.5}, {"value": 3.0, "rule": 3.0}, {"reference": 3.0}
    for changed, ok in zip(changes, (True, False, False, True), strict=True):
        by |= changed
        for check in (testing.check_vjp, testing.check_hvp):
            assert check(scaled, (X,), reference=reference).ok == ok


def test_a_wrong_result_is_wrong_even_with_the_right_gradient():
    report = testing.check_vjp(lambda x: x + 1, (X,), reference=lambda x: x)
    assert [row.name for row in report.rows if not row.ok] == ["result"]


def test_assertions_raise_with_the_table():
    with pytest.raises(AssertionError, match=r"(?s)bent: reverse-mode.*scale .*\[2\].*WRONG"):
        testing.assert_vjp(bent, (X, X[0]), reference=straight)
    assert testing.assert_vjp(straight, (X, X[0]), reference=straight) is None
    assert testing.assert_hvp(straight, (X, X[0]), reference=straight) is None
    sine = wrong(jnp.sin, lambda x, dy: (dy * jax.lax.stop_gradient(jnp.cos(x)),))
    with pytest.raises(AssertionError, match=r"(?s)Hessian-vector products.*WRONG"):
        testing.assert_hvp(sine, (X,), reference=jnp.sin)


@pytest.mark.parametrize("dtype", testing.TOLERANCES)
def test_tolerances_are_exact(dtype):
    """An error of 0.9e-4 passes where 1e-4 is allowed, and one of 1.1e-4 does not."""
    allowed, expected = testing.TOLERANCES[dtype], np.array([2.0, -3.0, 0.0])
    for part, ok in ((0.9, True), (1.1, False)):
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


def test_what_is_not_finite_is_not_close():
    for got, expected, ok in (
        (np.nan, 1.0, False), (np.nan, np.nan, False), (1.0, np.nan, False), (np.inf, 1.0, False),
        (1.0, np.inf, False), (np.inf, np.inf, True), (-np.inf, np.inf, False), (0.0, -0.0, True),
    ):  # fmt: skip
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


def test_the_names_of_rows():
    """Rows of pytrees have the names of their paths. Integers and random keys are held fixed, and so have none."""

    def network(parameters, ids, key, x):
        kept = x * jax.random.bernoulli(key, 0.5, x.shape)
        return {"y": kept @ parameters["kernel"][0] + parameters["bias"][None, :], "ids": ids}

    args = ({"kernel": [X.T], "bias": X[:, 0]}, np.arange(3), jax.random.key(0), X)
    report = testing.check_vjp(network, args, reference=network)
    assert report.ok
    names = ["result['y']", "parameters['bias']", "parameters['kernel'][0]", "x"]
    assert [row.name for row in report.rows] == names
    assert testing.check_hvp(network, args, reference=network).ok
    # What `*a` takes has its place in it, and not the name of the keyword behind it.
    report = testing.check_vjp(lambda *a, axis=0: jnp.sum(a[0] * a[1], axis), (X, X), reference=lambda b, c: sum(b * c))
    assert [row.name for row in report.rows] == ["result", "a[0]", "a[1]"]


def test_functions_that_cannot_be_hashed():
    class Doubled:
        __hash__ = None

        def __call__(self, x):
            return 2 * x

    assert testing.check_vjp(Doubled(), (X,), reference=functools.partial(jnp.multiply, 2)).ok


def test_dtypes_by_any_name():
    """A dtype may be given as text, as a scalar type of JAX or of NumPy, or as a dtype."""
    names = ("bfloat16", jnp.bfloat16, np.dtype("bfloat16"), np.dtype("bfloat16").type)
    first, *others = (testing.check_vjp(jnp.sin, (X,), reference=jnp.sin, dtype=name) for name in names)
    assert all(report == first for report in others) and first.ok and " in bfloat16," in first.title


def test_no_elements():
    report = testing.check_vjp(lambda x: jnp.sum(x**2), (np.ones((0, 3)),), reference=lambda x: jnp.sum(x * x))
    assert report.ok and report.row("x").size == 0
    assert str(report).splitlines()[-1].split() == ["x", "0", "[]", "-", "-", "-", "-", "ok"]


def test_a_float32_function_is_checked_in_float64():
    """Float64 finds an error that the tolerance of float32 lets pass."""
    nearly = wrong(jnp.sin, lambda x, dy: (dy * jnp.cos(x) * (1 + 1e-5),))
    args = (X.astype("float32"),)
    assert testing.check_vjp(nearly, args, reference=jnp.sin, dtype=None).ok
    assert not testing.check_vjp(nearly, args, reference=jnp.sin).ok


def test_under_others_configurations():
    def f(x, y):
        return x * x * y.astype(x.dtype)

    args = X.astype("float32"), X.astype("bfloat16")
    with jax.disable_jit():
        assert testing.check_vjp(f, args, reference=f).ok
    with jax.numpy_dtype_promotion("strict"):
        assert testing.check_hvp(f, args, reference=f, dtype=None).ok


def test_second_derivatives_are_along_a_random_vector():
    got = testing.check_hvp(lambda x: x**2 / 2, (X,), reference=lambda x: x * x / 2).row("x")
    random = np.random.default_rng([0, int.from_bytes(b"jln")])
    cotangent, vector = random.standard_normal(X.shape), random.standard_normal(X.shape)
    np.testing.assert_allclose(got.got, (cotangent * vector)[got.index], rtol=1e-12)


def centred(x, scale):
    return jax.nn.standardize(x, epsilon=1e-6) * jnp.expand_dims(scale, 0)


def test_a_fused_function_is_compared_with_its_own(monkeypatch):
    report = testing.check_fuse(norm, X, X[0])
    assert report.ok and [row.name for row in report.rows] == ["result", "x", "scale"]
    assert report.title.startswith("norm: fused (1 operator) and as it is, in float64")
    with pytest.warns(UserWarning, match="found no norm in sin"):
        assert testing.check_fuse(jnp.sin, X).title.startswith("sin: NOTHING WAS FUSED")
    monkeypatch.setattr(testing, "fuse", lambda f, **_: lambda *args: f(*args) * (1 + 1e-9))
    assert not testing.check_fuse(norm, X, X[0]).ok
    half = testing.check_fuse(norm_in_float32, X, X[0])
    assert half.ok and " in float32," in half.title  # where 1e-9 is nothing


def test_what_a_fused_function_may_be_given():
    """Arguments that are no arrays stay what they are, by name too; a result may be zero but for roundings."""

    def loss(parts, x, twice, *, how):
        assert twice is True and how == "mean"
        return jnp.mean(parts["norm"](x, parts["scale"]))

    x, parts = np.random.default_rng(0).standard_normal((64, 33)), {"norm": centred, "scale": np.ones(33)}
    report = testing.check_fuse(loss, parts, x, True, how="mean")
    assert report.ok and [row.name for row in report.rows] == ["result", "parts['scale']", "x"]
    testing.assert_operators(jln.fuse(loss), parts, x, True, how="mean", expect={"layer_norm": 1})


def test_lost_operators_are_told():
    f = jln.fuse(norm)
    assert testing.assert_operators(f, X, X[0], expect={"rms_norm": 1}) is None
    with pytest.raises(AssertionError, match=r"(?s)found \{'rms_norm': 1\}: 1 of 1 norms\n1 x jln.rms_norm: "):
        testing.assert_operators(f, X, X[0], expect={"rms_norm": 2})
    with pytest.raises(
        AssertionError, match=r"(?s)found \{\}: not fused; .* norm, not by jln: .* makes it jln.rms_norm of x"
    ):
        testing.assert_operators(norm, X, X[0], expect={"rms_norm": 1})


def check(f=jnp.sin, args=(X,), reference=jnp.sin, **options):
    testing.check_vjp(f, args, reference=reference, **options)


ERRORS = [
    (lambda: testing.check_vjp(jnp.sin, (X,)), TypeError, "give reference=, .* jax.test_util.check_grads"),
    (lambda: check(3), TypeError, "f must be a function; got int"),
    (lambda: check(lambda x: "x"), TypeError, "f must return arrays; got str"),
    (lambda: check(lambda x: None), TypeError, "f must return an array"),
    (lambda: check(jnp.argmax), TypeError, "f must return an array of a floating"),
    (lambda: check(lambda x: jnp.exp(1j * x)), TypeError, "f must return real arrays; got complex"),
    (lambda: check(reference=lambda x: x[0]), ValueError, r"of f's shapes \[\(3, 4\)\]; got \[\(4,\)\]"),
    (lambda: check(args=X), TypeError, "args must be a tuple"),
    (lambda: check(args=("x",)), TypeError, "args must hold arrays; got str"),
    (lambda: check(args=(X + 1j,)), TypeError, "args must hold real arrays; got complex128"),
    (lambda: check(args=(np.arange(3),)), TypeError, "a floating array"),
    (lambda: check(args=(X.astype(jnp.float8_e5m2),), dtype=None), ValueError, "among float16, .*; got float8_e5m2"),
    (lambda: check(dtype="float8"), ValueError, "None or one of float16, bfloat16, float32, float64; got 'float8'"),
    (lambda: check(dtype=int), ValueError, "got <class 'int'>"),
    (lambda: check(seed=-1), ValueError, "seed must be an integer from 0 on"),
    (lambda: check(seed=0.5), ValueError, "got 0.5"),
    (lambda: check(tolerance=1e-3), TypeError, "tolerance must be a Tolerance; got float"),
]


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS, ids=[message for *_, message in ERRORS])
def test_errors(call, kind, message):
    with pytest.raises(kind, match=message) as raised:
        call()
    assert len(str(raised.value).splitlines()) == 1

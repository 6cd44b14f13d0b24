"""The operators under `jax_debug_nans`, `jax_debug_infs` and `checkify`: JAX's errors of what is no number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import error_check  # no public name yet
from jax.experimental import checkify

import catalogue
import jln
import workbench
from catalogue import FORMS
from matrix import bind, directions, every, first, loss, operands

FLAGS = {"nan": jax.debug_nans, "inf": jax.debug_infs}
# One form for each kind of operands.
KINDS = ("layer_norm", "rms_norm_gated", "rms_norm_add_rms_norm", "add_layer_norm_linear, x_bias and gate")


def scanned(f):
    return lambda x, *rest: jax.lax.scan(lambda c, _: (first(f)(c, *rest), None), x, length=1)[0]


# Eagerly JAX names what it evaluates: an operation of ours, or a whole scan.
HOW = {
    "eager": (lambda f, a: f, "jln_"),
    "jit": (lambda f, a: jax.jit(f), "jln_"),
    "grad": (lambda f, a: jax.grad(loss(f), every(a)), "jln_"),
    "jit(grad)": (lambda f, a: jax.jit(jax.grad(loss(f), every(a))), "jln_"),
    "scan": (lambda f, a: scanned(f), "jln_|scan"),
    "jit(scan)": (lambda f, a: jax.jit(scanned(f)), "jln_|scan"),
}
OF_RESULTS = ("eager", "jit", "scan", "jit(scan)")  # where results are inf, gradients are NaN


def poisoned(a, value=np.nan):
    a = np.array(a)
    a.flat[0] = value
    return jnp.asarray(a)


def spoilt(named, flag):
    """Arguments of which the results have NaN, or inf from finite numbers alone: a wide row times a huge scale."""
    if flag == "nan":
        return named | {"x": poisoned(named["x"])}
    return named | {"x": poisoned(named["x"], 100.0), "scale": poisoned(named["scale"], 1.7e308)}


@pytest.fixture(params=[False, True], ids=["jit", "disable_jit"])
def disabled(request):
    return request.param


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("flag", "how"), [("nan", how) for how in HOW] + [("inf", how) for how in OF_RESULTS])
def test_results_that_are_no_numbers(name, flag, how, implementation, disabled):
    """The error is JAX's, whatever calls the operator; with numbers alone there is none."""
    operator = FORMS[name]
    named = operands(name)
    function = operator.in_order(operator.function, tuple(named), implementation=implementation)
    bad, (transformed, culprit) = spoilt(named, flag), HOW[how]
    with FLAGS[flag](True), jax.disable_jit(disabled):
        transformed(function, tuple(named))(*named.values())
        with pytest.raises(FloatingPointError, match=rf"\({flag}\) encountered in ({culprit})"):
            transformed(function, tuple(named))(*bad.values())


DERIVATIVES = {
    "jvp": lambda f, a, t: jax.jvp(f, a, t),
    "jit(jvp)": lambda f, a, t: jax.jit(lambda t: jax.jvp(f, a, t))(t),
    "linearize": lambda f, a, t: jax.linearize(f, *a)[1](*t),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("how", DERIVATIVES)
def test_a_tangent_that_is_no_number(name, how, disabled):
    """Tangents go through operations that are linear in them, and the error is JAX's there, too."""
    function, given = bind(name, "", forward_mode=True)
    good = directions(given)
    bad = (poisoned(good[0]), *good[1:])
    with jax.debug_nans(True), jax.disable_jit(disabled):
        DERIVATIVES[how](function, given, good)
        with pytest.raises(FloatingPointError, match=r"\(nan\) encountered in jln_"):
            DERIVATIVES[how](function, given, bad)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("forward_mode", [False, True])
def test_a_cotangent_that_is_no_number(name, compiled, forward_mode, disabled):
    """The error is JAX's in the backward pass, be it the operator's rule or the transpose of a linear operation."""
    function, given = bind(name, "", forward_mode=forward_mode)
    results = function(*given)
    good, bad = jax.tree.map(jnp.ones_like, results), jax.tree.map(poisoned, results)
    with jax.debug_nans(True), jax.disable_jit(disabled):
        pull = jax.vjp(function, *given)[1]
        pull = jax.jit(pull) if compiled else pull
        pull(good)
        with pytest.raises(FloatingPointError, match=r"\(nan\) encountered in (jln_|dot_general)"):
            pull(bad)


# No rows; one element; ragged rows and columns, which kernels mask; no features; squares that overflow float32, where
# the operations of plain jnp by themselves give inf.
SIZES = [((0, 8), (4,), 1.0), ((3, 1), (1,), 1.0), ((5, 7), (3,), 1.0), ((3, 8), (0,), 1.0), ((5, 7), (3,), 1e30)]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("shape", "features", "spread"), SIZES)
def test_no_error_without_a_cause(name, shape, features, spread, implementation, disabled):
    """Results and gradients without NaN raise nothing: what only a kernel's masked columns or empty results hold."""
    operator = FORMS[name]
    arrays = [a.of(catalogue.sizes(shape, -1, features), "float32", "float32") for a in operator.arguments]
    given = [workbench.normal(i, a.shape, a.dtype) for i, a in enumerate(arrays)]
    given[0] = given[0] * spread
    function = operator.in_order(operator.function, implementation=implementation)
    with jax.debug_nans(True), jax.debug_infs(True), jax.disable_jit(disabled):
        results = jax.value_and_grad(loss(function), every(given))(*given)
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(results))


def check(function, right, wrong):
    """Check that `checkify` names an operation of ours whose result is no number, and none of the right numbers."""
    checked = checkify.checkify(function, errors=checkify.float_checks)
    assert checked(*right)[0].get() is None
    assert "nan generated by primitive: jln_" in (checked(*wrong)[0].get() or "")


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("how", ["value", "gradients"])
@pytest.mark.parametrize("forward_mode", [False, True])
def test_checkify_looks_for_nan_in_results(name, how, forward_mode, implementation):
    named = operands(name)
    form = FORMS[name]
    function = form.in_order(form.function, tuple(named), implementation=implementation, forward_mode=forward_mode)
    if how == "gradients":
        function = jax.grad(loss(function), every(tuple(named)))
    check(jax.jit(function), named.values(), spoilt(named, "nan").values())


@pytest.mark.parametrize("kind", [jln.Float8(), jln.MXFloat8()], ids=["one scale", "blocks"])
def test_checkify_looks_for_nan_in_eight_bits(kind):
    x = jnp.ones((4, 32), "float32")
    check(lambda x: jln.rms_norm(x, quantize=kind).values, (x,), (poisoned(x),))


@pytest.mark.parametrize("kind", ["nan", "divide", "oob"])
def test_jax_may_note_errors_in_the_program_around(kind, request):
    """JAX's `jax_error_checking_behavior_*` note what is wrong in an array that no rule of an operator can write to."""
    setting = f"jax_error_checking_behavior_{kind}"
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 16)))
    scale = jnp.ones(16)

    def losses():
        yield lambda x: jln.layer_norm(x, scale, None).sum()
        yield lambda x: jln.layer_norm(x, scale, None, forward_mode=True).sum()
        yield lambda x: jln.rms_norm_linear(x, scale, jnp.ones((16, 4))).sum()
        yield jln.fuse(lambda x: (x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale[None]).sum())

    def gradients():
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
        split = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
        for function in losses():
            yield from (jax.grad(function)(x), jax.jit(jax.grad(function))(x))
            if kind != "nan":  # the array of the sum around would be on one device
                yield jax.jit(jax.grad(function))(split)

    wanted = [np.asarray(g) for g in gradients()]
    request.addfinalizer(lambda: jax.config.update(setting, "ignore"))
    jax.config.update(setting, "raise")
    for own, plain in zip(gradients(), wanted, strict=True):
        np.testing.assert_allclose(np.asarray(own), plain, rtol=1e-12, atol=1e-12)
    error_check.raise_if_error()
    jax.jit(lambda x: 1 + next(losses())(x))(x.at[0, 0].set(jnp.nan))
    if kind == "nan":
        with pytest.raises(error_check.JaxValueError, match="NaN"):
            error_check.raise_if_error()

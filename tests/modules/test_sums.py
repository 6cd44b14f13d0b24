"""A residual in front of a norm, x's bias and a gate beside it, against the separate layers of each framework."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("equinox")
pytest.importorskip("haiku")
import haiku as hk
from flax import nnx

import jln
from jln import _explain
from jln import equinox as jln_equinox
from jln import haiku as jln_haiku
from parity import MASK, SHAPE, doubled, every_equation, named, normal, pairwise_parameters
from separate import FRAMEWORKS, LIBRARIES, ONE, layers, parity, total_of

WHOLE = "all arguments are the operator's"
# Shapes of a layer's gate (LayerScale), of one for each example (adaLN) and of one for each row; SHAPE is (3, 4, 8).
GATES = {"layer": (8,), "examples": (3, 1, 8), "rows": (3, 4, 1)}

CASES = {
    "norm": ["LayerNorm", "RMSNorm"],
    "x": ["float32", "bfloat16"],
    "residual": ["float32", "bfloat16"],
    "x_bias": ["float32", None, "bfloat16"],
    "gate": ["layer", None, "examples", "rows"],
    "linears": [0, 1, 2],
    "apart": [False, True],
}
TABLES = dict.fromkeys(FRAMEWORKS, CASES) | dict.fromkeys(
    ("linen", "nnx"), CASES | {"dtype": [None, "bfloat16", "float32"]}
)


def arguments(x="float32", residual="float32", x_bias="float32", gate="layer"):
    """Return the arrays of a call by name, each of the dtype or kind given here, without those given as None."""
    given = {"x": normal(1, SHAPE, x), "residual": normal(2, SHAPE, residual)}
    if x_bias is not None:
        given["x_bias"] = normal(3, SHAPE[-1:], x_bias)
    if gate is not None:
        given["gate"] = normal(4, GATES[gate], "float32")
    return given


@pytest.mark.parametrize(
    ("framework", "case"),
    [
        pytest.param(framework, *case.values, id=f"{framework} {case.id}", marks=case.marks)
        for framework, table in TABLES.items()
        for case in pairwise_parameters(table)
    ],
)
def test_values_and_gradients_are_those_of_a_sum_and_the_separate_layers(framework, case):
    case = dict(case)
    x = arguments(**{name: case.pop(name) for name in ("x", "residual", "x_bias", "gate")})
    n, norm = case.pop("linears"), case.pop("norm")
    linears = ((), ((ONE[framework], 6, {}),), (("q", 6, {}), ("k", 3, {})))[n]
    if framework == "equinox":
        linears = tuple(("qk"[i], *a) for i, (_, *a) in enumerate(linears))
    own = case["apart"] or not linears
    path = parity(framework, norm, linears, x, **case | {"apart": own})
    assert path in (("norm",) if own else ("fused", "norm"))


def called(module):
    """Return a function that calls a module of Linen or Haiku with its initial variables."""

    def call(x, **given):
        with _explain.unasked():
            variables = module.init(jax.random.key(0), x)
        return module.apply(variables, x, **given)

    return call


def norm_alone(framework, norm="LayerNorm", **options):
    """Return our norm as its framework makes it, of 8 numbers if `options` name no axes, to be called with arrays."""
    if framework == "linen":
        return called(getattr(jln.linen, norm)(**options))
    if framework == "nnx":
        return getattr(jln.nnx, norm)(8, **options, rngs=nnx.Rngs(0))
    if framework == "haiku":
        given = {"create_offset": True} if norm == "LayerNorm" else {}
        options = {"axis": -1, "create_scale": True, **given, **options}
        return called(hk.without_apply_rng(hk.transform(lambda *a, **k: getattr(jln_haiku, norm)(**options)(*a, **k))))
    return getattr(jln_equinox, norm)(**{"shape": 8, "dtype": "float32", **options})


def fused(framework):
    if framework == "linen":
        return called(jln.linen.LayerNormDense(3))
    if framework == "nnx":
        return jln.nnx.LayerNormLinear(8, 3, rngs=nnx.Rngs(0))
    if framework == "haiku":
        return called(hk.without_apply_rng(hk.transform(lambda *a, **k: jln_haiku.LayerNormLinear(3)(*a, **k))))
    return jln_equinox.LayerNormLinear(8, 3, dtype="float32", key=jax.random.key(0))


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("made", [norm_alone, fused])
def test_what_goes_with_a_residual_does_not_go_alone_or_in_another_shape(framework, made):
    module, x = made(framework), jnp.ones((8,), "float32")
    for name, a in (("x_bias", x), ("gate", x), ("gate", 0.5)):
        with pytest.raises(ValueError, match=f"^{name} needs a residual, .*; got residual=None"):
            module(x, **{name: a})
    with pytest.raises(ValueError, match=r"^residual must have shape \(8,\), that of x; got float32\[1\]"):
        module(x, residual=x[:1])
    with pytest.raises(
        ValueError, match=r"^x_bias must have shape \(8,\), that of x's normalised axes; got float32\[4\]"
    ):
        module(x, residual=x, x_bias=x[:4])
    with pytest.raises(ValueError, match=r"^gate must be a number, have shape \(8,\)"):
        module(x, residual=x, gate=x[:4])
    with pytest.raises(TypeError, match=r"^x_bias must have one of the dtypes"):
        module(x, residual=x, x_bias=jnp.ones((8,), "int32"))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_number_is_a_gate_and_nones_are_as_if_they_were_not_there(framework):
    x = arguments(x_bias=None, gate=None)
    x = {name: a[0, 0] for name, a in x.items()}
    for made in (norm_alone, fused):
        module = made(framework)
        halved = {"x": 0.5 * x["x"], "residual": x["residual"]}
        for got, wanted in zip(module(**x, gate=0.5), module(**halved), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)  # half of x is exact, its norm is rounded
        np.testing.assert_array_equal(module(x["x"], residual=None, x_bias=None, gate=None), module(x["x"]))


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
def test_explain_and_the_operations_of_a_norm_and_its_sum(framework, norm):
    """A norm and its sum are one operation forward, which makes the sum, and one backward, which gives all gradients.

    The sum is not computed once more for autodiff.
    """
    x = arguments()
    _, ours = layers(framework, norm, (), apart=True)
    variables = ours.init(x)
    (route,) = jln.explain(ours.apply, variables, x)
    assert (route.path, route.why) == ("norm", WHOLE)
    assert route.layer.startswith(f"jln.{framework}.{norm}")

    def loss(variables, x):
        return sum(map(jnp.sum, jax.tree.leaves(ours.apply(variables, x))))

    equations = list(every_equation(jax.make_jaxpr(jax.grad(loss, (0, 1)))(variables, x)))
    seen = [e for e in equations if e.primitive.name.startswith("jln_norm")]
    assert sorted(e.primitive.name for e in seen) == ["jln_norm_backward", "jln_norm_forward"]
    forward, backward = sorted(seen, key=lambda e: e.primitive.name, reverse=True)
    assert forward.params["request"].dtypes.total is not None
    wanted = backward.params["request"].dtypes
    assert None not in (wanted.x, wanted.residual, wanted.x_bias, wanted.gate, wanted.scale)


PLAIN = [
    ("linen", {}, {"mask": MASK}, "mask is given"),
    ("linen", {"reduction_axes": 1}, {}, "scale varies along axes that are not normalised"),
    ("linen", {"force_float32_reductions": False}, {}, "force_float32_reductions=False: statistics in x's own dtype"),
    ("nnx", {}, {"mask": MASK}, "mask is given"),
    ("haiku", {"axis": -2, "param_axis": -1}, {}, "scale varies along axes that are not normalised"),
    ("equinox", {"dtype": "float64"}, {}, "float64 with bfloat16: some of it would lose float64's digits"),
]


@pytest.mark.parametrize(("framework", "options", "given", "why"), PLAIN, ids=[f"{a} {d}" for a, _, _, d in PLAIN])
def test_what_the_operators_lack_is_the_frameworks_own_code_on_the_sum(framework, options, given, why):
    """The plain path has the bits of the framework's norm of the sum, and its gradients of all that was added."""
    x = arguments("bfloat16", "bfloat16", gate="examples")
    if options.get("reduction_axes", options.get("axis")) in (1, -2):
        x["x_bias"] = normal(3, SHAPE[1:2], "float32")
        x["gate"] = normal(4, (3, 4, 1), "float32")
    if framework == "equinox":
        x = {name: a[0, 0] if a.ndim == 3 else a for name, a in x.items()}
    module = norm_alone(framework, **options)

    def ours(x):
        return module(**x, **given)

    def separate(x):
        bias = x["x_bias"]
        fits = bias.reshape(4, 1) if bias.shape == (4,) else bias
        total = total_of(x | {"x_bias": fits})
        return module(total, **given), total

    (route,) = jln.explain(ours, x)
    assert route.path == "plain"
    assert route.why.startswith(why)
    dy = jax.tree.map(lambda a: normal(9, a.shape, a.dtype), ours(x))
    (got, got_back), (wanted, wanted_back) = (jax.vjp(f, x) for f in (ours, separate))
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
    jax.tree.map(np.testing.assert_array_equal, named(got_back(dy)), named(wanted_back(dy)))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_over_several_axes_bias_and_gate_have_their_shape_in_ascending_order(framework):
    over = {"linen": "reduction_axes", "nnx": "reduction_axes", "haiku": "axis", "equinox": "shape"}[framework]
    options = {over: SHAPE[1:] if framework == "equinox" else (-1, 1)}
    if framework in ("linen", "nnx"):
        options["feature_axes"] = (1, 2)
    if framework == "nnx":
        module = jln.nnx.LayerNorm(32, **options, rngs=nnx.Rngs(0))
    else:
        module = norm_alone(framework, **options | ({"param_axis": (-1, 1)} if framework == "haiku" else {}))
    x = arguments(x_bias=None, gate=None) | {"x_bias": normal(3, SHAPE[1:], "float32")}
    x["gate"] = normal(4, SHAPE[1:], "float32")
    total = x["residual"] + x["gate"][None] * (x["x"] + x["x_bias"][None])
    if framework == "equinox":
        x = {name: a[0] if a.ndim == 3 else a for name, a in x.items()}
        total = total[0]
    (route,) = jln.explain(lambda x: module(**x), x)
    assert (route.path, route.why) == ("norm", WHOLE)
    y, got = module(**x)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)  # 32 float32 numbers a row
    close(got, total)
    close(y, module(total))


def test_a_sum_that_nnx_promotes_is_made_in_front_of_the_norm():
    """A sum that NNX promotes is made in front of the operator, which would normalise it without the promotion."""
    x = arguments()
    theirs, ours = (a(8, promote_dtype=doubled, rngs=nnx.Rngs(0)) for a in (nnx.LayerNorm, jln.nnx.LayerNorm))
    (route,) = jln.explain(ours, **x)
    assert route.path == "norm"
    assert route.why == "but for the sum of x and the residual: the norm promotes what it reads"
    y, total = ours(**x)
    np.testing.assert_array_equal(total, total_of(x))
    np.testing.assert_allclose(y, theirs(total), rtol=1e-5, atol=1e-5)  # a row of 8 float32 numbers


def test_equinox_has_the_state_behind_both_results():
    x = {name: a if a.ndim == 1 else a[0, 0] for name, a in arguments().items()}
    module = jln_equinox.LayerNorm(8)
    (y, total), state = module(**x, state="state")
    assert state == "state"
    jax.tree.map(np.testing.assert_array_equal, (y, total), module(**x))


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
def test_a_call_has_the_arguments_that_help_lists_and_no_others(framework, norm):
    """The signature and the docstring have every argument by its name, and a LayerNorm's none of an RMSNorm's."""
    for_rms = {"x_norm", "z", "norm_before_gate"} if norm == "RMSNorm" else set()
    shared = {"residual", "x_bias", "gate", "added_to", *for_rms}
    call = getattr(LIBRARIES[framework][1], norm).__call__
    found = inspect.signature(call).parameters
    assert shared <= found.keys() and all(found[name].default in (None, True) for name in shared)
    described = set(re.findall(r"^  (\*{0,2}\w+): ", inspect.getdoc(call), flags=re.M))
    assert described == found.keys() - {"self"}
    module, x = norm_alone(framework, norm), jnp.ones((8,), "float32")
    for name in {"x_norm", "z", "norm_before_gate", "nothing"} - for_rms:
        with pytest.raises(TypeError, match=rf"^{norm}.__call__\(\) got an unexpected keyword argument '{name}'"):
            module(x, **{name: x})

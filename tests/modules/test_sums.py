"""A residual in front of a norm, against the separate layers of each framework; and what a module's call takes."""

import inspect

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
from parity import MASK, SHAPE, every_equation, normal, pairwise_parameters
from separate import FRAMEWORKS, LIBRARIES, ONE, WITH_LINEARS, layers, parity

WHOLE = "all arguments are the operator's"

CASES = {
    "norm": ["LayerNorm", "RMSNorm"],
    "x": ["float32", "bfloat16", "float16"],
    "residual": ["float32", "bfloat16", "float16"],
}
WITH_LINEARS_CASES = CASES | {"linears": [0, 1, 2], "apart": [False, True]}
FLAX_CASES = WITH_LINEARS_CASES | {"dtype": [None, "bfloat16", "float32"]}
TABLES = {"linen": FLAX_CASES, "nnx": FLAX_CASES, "haiku": WITH_LINEARS_CASES, "equinox": CASES}


def arguments(x="float32", residual="float32"):
    """Return x and the residual of a call, of these dtypes."""
    return normal(1, SHAPE, x), normal(2, SHAPE, residual)


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
    x = arguments(case.pop("x"), case.pop("residual"))
    n, norm = case.pop("linears", 0), case.pop("norm")
    linears = ((), ((ONE.get(framework), 6),), (("q", 6), ("k", 3)))[n]
    own = case.pop("apart", True) or not linears
    path = parity(framework, norm, linears, x, **case, apart=own)
    assert path in (("norm",) if own else ("fused", "norm"))


def called(module):
    """Return a function that calls a module of Linen or Haiku with its initial variables."""

    def call(x, **given):
        with _explain.listen(None):
            variables = module.init(jax.random.key(0), x, **given)
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
    return called(hk.without_apply_rng(hk.transform(lambda *a, **k: jln_haiku.LayerNormLinear(3)(*a, **k))))


MADE = [*((made, framework) for made in (norm_alone,) for framework in FRAMEWORKS), *((fused, f) for f in WITH_LINEARS)]


@pytest.mark.parametrize(("made", "framework"), MADE)
def test_a_residual_is_an_array_of_the_shape_of_x_and_none_is_as_if_it_were_not_there(made, framework):
    module, x = made(framework), jnp.ones((8,), "float32")
    with pytest.raises(ValueError, match=r"^residual must have shape \(8,\), that of x; got float32\[1\]"):
        module(x, residual=x[:1])
    with pytest.raises(TypeError, match=r"^residual must have one of the dtypes .*got int32"):
        module(x, residual=jnp.ones((8,), "int32"))
    with pytest.raises(TypeError, match=r"^residual must be an array; got list"):
        module(x, residual=[1.0] * 8)
    with pytest.raises(TypeError, match=r"^x must be an array; got list"):
        module([1.0] * 8, residual=x)
    np.testing.assert_array_equal(module(x, residual=None), module(x))


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
    assert None not in (wanted.x, wanted.scale) and wanted.residual is None  # its gradient is that of x


PLAIN = [
    ("linen", {}, {"mask": MASK}, "mask is given"),
    ("linen", {"reduction_axes": 1}, {}, "the norm is not over the last axis alone"),
    ("linen", {"force_float32_reductions": False}, {}, "force_float32_reductions=False: statistics in x's own dtype"),
    ("nnx", {}, {"mask": MASK}, "mask is given"),
    ("haiku", {"axis": -2, "param_axis": -1}, {}, "the norm is not over the last axis alone"),
    ("equinox", {"dtype": "float64"}, {}, "some of it is float64, and x or the result is not"),
]


@pytest.mark.parametrize(("framework", "options", "given", "why"), PLAIN, ids=[f"{a} {d}" for a, _, _, d in PLAIN])
def test_what_the_operators_lack_is_the_frameworks_own_code_on_the_sum(framework, options, given, why):
    """The plain path has the bits of the framework's norm of the sum, and its gradients of x and the residual."""
    x, residual = arguments("bfloat16", "bfloat16")
    if framework == "equinox":
        x, residual = x[0, 0], residual[0, 0]
    module = norm_alone(framework, **options)

    def ours(x, residual):
        return module(x, residual=residual, **given)

    def separate(x, residual):
        total = x + residual
        return module(total, **given), total

    (route,) = jln.explain(ours, x, residual)
    assert route.path == "plain"
    assert route.why.startswith(why)
    dy = jax.tree.map(lambda a: normal(9, a.shape, a.dtype), ours(x, residual))
    (got, got_back), (wanted, wanted_back) = (jax.vjp(f, x, residual) for f in (ours, separate))
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
    jax.tree.map(np.testing.assert_array_equal, got_back(dy), wanted_back(dy))
    with pytest.raises(ValueError, match=r"^residual must have shape"):  # not one that would broadcast
        ours(x, residual[..., :1])


def test_equinox_has_the_state_behind_both_results():
    x, residual = (a[0, 0] for a in arguments())
    module = jln_equinox.LayerNorm(8)
    (y, total), state = module(x, "state", residual=residual)
    assert state == "state"
    jax.tree.map(np.testing.assert_array_equal, (y, total), module(x, residual=residual))


def own_arguments(call):
    """The names and kinds of the arguments of a method, in order."""
    return [(p.name, p.kind) for p in inspect.signature(call).parameters.values()]


BY_KEYWORD = inspect.Parameter.KEYWORD_ONLY


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
def test_a_norm_takes_what_the_frameworks_takes_and_a_residual(framework, norm):
    theirs, ours = (getattr(library, norm).__call__ for library in LIBRARIES[framework])
    assert own_arguments(ours) == [*own_arguments(theirs), ("residual", BY_KEYWORD)]


@pytest.mark.parametrize("framework", WITH_LINEARS)
def test_a_norm_with_linears_takes_eight_bits_too(framework):
    for name in ("LayerNorm", "RMSNorm"):
        call = getattr(LIBRARIES[framework][1], name + ("Dense" if framework == "linen" else "Linear")).__call__
        assert own_arguments(call)[-2:] == [("residual", BY_KEYWORD), ("quantize", BY_KEYWORD)]


@pytest.mark.parametrize(("made", "framework"), MADE)
def test_a_call_takes_nothing_else(made, framework):
    module, x = made(framework), jnp.ones((8,), "float32")
    for name in ("gate", "x_bias", "added_to", *(["quantize"] if made is norm_alone else [])):
        with pytest.raises(TypeError, match=rf"__call__\(\) got an unexpected keyword argument '{name}'"):
            module(x, residual=x, **{name: x})

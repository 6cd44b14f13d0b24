"""Norms in front of a sum, alone or with a norm of the sum behind them, against each framework's separate layers.

The variables are those of the separate layers, so that their checkpoints load.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("equinox")
pytest.importorskip("haiku")
import equinox as eqx
import haiku as hk
from flax import linen, nnx

import jln
from jln import equinox as jln_equinox
from jln import haiku as jln_haiku
from parity import MASK, SHAPE, assert_parity, doubled, equations, normal, noting, pairwise_parameters
from separate import FRAMEWORKS, LIBRARIES, equinox_layer, haiku_layer, linen_layer, nnx_layer

WHOLE = "all arguments are the operator's"
TOGETHER = f"{WHOLE}, those of x_norm too"


def summed(post, pre, x, residual):
    return residual + post(x)


def added(post, pre, x, residual):
    return post(x, added_to=residual)


def apart(post, pre, x, residual):
    total = residual + post(x)
    return pre(total), total


def paired(post, pre, x, residual):
    return pre(x, residual=residual, x_norm=post)


class LinenBlock(linen.Module):
    makes: tuple
    function: object

    @linen.compact
    def __call__(self, x):
        post, pre = self.makes
        return self.function(post(name="post"), pre(name="pre"), **x)


class LinenSetUp(linen.Module):
    makes: tuple
    function: object

    def setup(self):
        post, pre = self.makes
        self.pre = pre()
        self.post = post()

    def __call__(self, x):
        return self.function(self.post, self.pre, **x)


class NnxBlock(nnx.Module):
    def __init__(self, makes, function, rngs):
        (self.post, self.pre), self.function = (make(rngs=rngs) for make in makes), function

    def __call__(self, x):
        return self.function(self.post, self.pre, **x)


class EquinoxBlock(eqx.Module):
    post: eqx.Module
    pre: eqx.Module
    function: object = eqx.field(static=True)

    def __call__(self, x):
        return self.function(self.post, self.pre, **x)


def layer(framework, norm, function, ours, block=LinenBlock, dtype=None, param_dtype="float32", of_pre=None, **options):
    """Return a Layer of two norms, `post` and `pre`, which `function` calls.

    `of_pre` are options of `pre` alone.
    """
    cls = getattr(LIBRARIES[framework][ours], norm)
    options = {"linen": {"dtype": dtype}, "nnx": {"dtype": dtype}}.get(framework, {}) | options
    options |= {} if framework == "haiku" else {"dtype" if framework == "equinox" else "param_dtype": param_dtype}
    if framework == "haiku":
        options |= {"axis": -1, "create_scale": True} | ({"create_offset": True} if norm == "LayerNorm" else {})
    if framework == "equinox" and norm == "RMSNorm":
        options.setdefault("use_bias", False)
    width = (8,) if framework in ("nnx", "equinox") else ()
    makes = tuple(functools.partial(cls, *width, **options | own) for own in ({}, of_pre or {}))
    if framework == "linen":
        return linen_layer(block(makes, function))
    if framework == "nnx":
        return nnx_layer(lambda rngs: NnxBlock(makes, function, rngs))
    if framework == "haiku":
        return haiku_layer(
            lambda x: function(*(make(name=n) for make, n in zip(makes, ("post", "pre"), strict=True)), **x)
        )
    return equinox_layer(lambda: EquinoxBlock(*(make() for make in makes), function))


def arguments(x="float32", residual="float32"):
    return {"x": normal(1, SHAPE, x), "residual": normal(2, SHAPE, residual)}


def parity(framework, norm, theirs, ours, x, **case):
    """Assert that ours equals the separate layers, and return the path that ours took."""
    wide = {"param_dtype": "float64"} if framework != "haiku" else {}
    true = layer(framework, norm, theirs, False, **case | {"dtype": None} | wide)
    layers = (layer(framework, norm, function, i, **case) for i, function in enumerate((theirs, ours)))
    return assert_parity(*layers, true, x, products=2)  # the sum has two readers, whose cotangents are added


CASES = {
    "layers": ["x_norm", "RMSNorm", "LayerNorm"],
    "x": ["float32", "bfloat16"],
    "residual": ["float32", "bfloat16"],
}
TABLES = dict.fromkeys(FRAMEWORKS, CASES) | dict.fromkeys(
    ("linen", "nnx"), CASES | {"dtype": [None, "bfloat16", "float32"]}
)


@pytest.mark.parametrize(
    ("framework", "case"),
    [
        pytest.param(framework, case.values[0], id=f"{framework} {case.id}", marks=case.marks)
        for framework, table in TABLES.items()
        for case in pairwise_parameters(table)
    ],
)
def test_values_and_gradients_are_those_of_the_separate_layers_and_a_sum(framework, case):
    case = dict(case)
    x, layers = arguments(case.pop("x"), case.pop("residual")), case.pop("layers")
    norm, *functions = ("RMSNorm", apart, paired) if layers == "x_norm" else (layers, summed, added)
    assert parity(framework, norm, *functions, x, **case) == "norm"


def taken(framework, function, x, norm="RMSNorm", **options):
    """Return the routes of a call, and how often each of our primitives is in the jaxpr of its gradients."""
    block = layer(framework, norm, function, True, **options)
    variables = block.init(x)

    def loss(variables, x):
        return sum(map(jnp.sum, jax.tree.leaves(block.apply(variables, x))))

    counts = equations(jax.make_jaxpr(jax.grad(loss, (0, 1)))(variables, x))
    operators = {name: n for name, n in counts.items() if name.startswith("jln_norm")}
    return jln.explain(block.apply, variables, x), operators


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("norm", ["RMSNorm", "LayerNorm"])
def test_a_norm_and_the_sum_behind_it_are_one_operation_each_way(framework, norm):
    (route,), operators = taken(framework, added, arguments(), norm)
    assert (route.path, route.why) == ("norm", WHOLE)
    assert operators == {"jln_norm_forward": 1, "jln_norm_backward": 1}


@pytest.mark.parametrize(("framework", "block"), [*((f, LinenBlock) for f in FRAMEWORKS), ("linen", LinenSetUp)])
def test_two_norms_and_the_sum_between_are_one_operation_each_way(framework, block):
    (route,), operators = taken(framework, paired, arguments(), block=block)
    assert (route.path, route.why) == ("norm", TOGETHER)
    assert route.layer.startswith(f"jln.{framework}.RMSNorm")
    assert operators == {"jln_norm_forward": 1, "jln_norm_backward": 1}


EPSILON = dict.fromkeys(("linen", "nnx"), "epsilon") | dict.fromkeys(("haiku", "equinox"), "eps")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_norms_that_differ_are_computed_one_after_the_other(framework):
    x, options = arguments(), {EPSILON[framework]: 0.25, "of_pre": {EPSILON[framework]: 0.5}}
    (first, second), operators = taken(framework, paired, x, **options)
    assert (first.path, first.why) == ("norm", WHOLE)
    assert (second.path, second.why) == (
        "norm",
        "not one operator with x_norm: the two differ in epsilon: 0.25 and 0.5",
    )
    assert operators == {"jln_norm_forward": 2, "jln_norm_backward": 2}
    assert parity(framework, "RMSNorm", apart, paired, x, **options) == "norm"


OBSTACLES = {
    "linen": ("bfloat16", {}, "x is bfloat16, the residual bfloat16, their sum behind the norm float32"),
    "nnx": ("float32", {"promote_dtype": doubled}, "the norm promotes what it reads"),
    "equinox": ("float32", {"use_bias": True}, "one of the two subtracts a mean or has an offset"),
}


@pytest.mark.parametrize("framework", OBSTACLES)
def test_what_one_operator_would_do_otherwise_is_done_apart(framework):
    dtype, options, why = OBSTACLES[framework]
    x = arguments(dtype, dtype)
    assert [route.why for route in taken(framework, paired, x, **options)[0]] == [
        WHOLE,
        f"not one operator with x_norm: {why}",
    ]
    assert parity(framework, "RMSNorm", apart, paired, x, **options) == "norm"


def test_a_subclass_may_compute_something_else():
    class Twice(jln.nnx.RMSNorm):
        def __call__(self, x, **given):
            return 2 * super().__call__(x, **given)

    norm, twice, x = jln.nnx.RMSNorm(8, rngs=nnx.Rngs(0)), Twice(8, rngs=nnx.Rngs(0)), arguments()
    with noting() as routes:
        y, total = norm(**x, x_norm=twice)
    assert [route.why for route in routes] == [WHOLE, "not one operator with x_norm: x_norm has a call of its own"]
    np.testing.assert_array_equal(total, x["residual"] + twice(x["x"]))
    np.testing.assert_array_equal(y, norm(total))


def masked(post, pre, x, residual):
    return pre(x, residual=residual, x_norm=post, mask=MASK)


def masked_apart(post, pre, x, residual):
    total = residual + post(x)
    return pre(total, mask=MASK), total


@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_a_mask_is_the_frameworks_own_code_and_the_second_norms_alone(framework):
    x = arguments()
    wanted, got = (layer(framework, "RMSNorm", f, i) for i, f in enumerate((masked_apart, masked)))
    variables = wanted.init(x)
    assert [route.path for route in jln.explain(got.apply, variables, x)] == ["norm", "plain"]
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5),  # rows of 8 float32 numbers
        *(block.apply(variables, x) for block in (got, wanted)),
    )


@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_what_the_framework_normalises_is_added_too(framework):
    def with_mask(post, pre, x, residual):
        return post(x, added_to=residual, mask=MASK)

    def separately(post, pre, x, residual):
        return residual + post(x, mask=MASK)

    x = arguments("bfloat16", "bfloat16")
    assert parity(framework, "RMSNorm", separately, with_mask, x) == "plain"


def test_linen_makes_each_parameter_under_its_own_norm_and_calls_both_in_init_alone():
    block, x = LinenBlock((jln.linen.RMSNorm,) * 2, paired), arguments()
    called = []

    def interceptor(call, args, kwargs, context):
        called.append("/".join(context.module.path))
        return call(*args, **kwargs)

    with linen.intercept_methods(interceptor):
        variables = block.init(jax.random.key(0), x)
        assert called == ["", "pre", "post"]
        called.clear()
        block.apply(variables, x)
        assert called == ["", "pre"]
    assert jax.tree.map(jnp.shape, variables) == {"params": {"post": {"scale": (8,)}, "pre": {"scale": (8,)}}}


def test_haiku_reads_each_parameter_under_its_own_name_through_the_users_getters():
    read = []

    def getter(call, value, context):
        read.append(context.full_name)
        return call(2 * value)

    def observed(post, pre, x, residual):
        with hk.custom_getter(getter):
            return paired(post, pre, x, residual)

    block, seen = (layer("haiku", "RMSNorm", function, True) for function in (paired, observed))
    x = arguments()
    variables = block.init(x)
    got, wanted = seen.apply(variables, x), block.apply(jax.tree.map(lambda a: 2 * a, variables), x)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
    assert read == ["post/scale", "pre/scale"]


def test_nnx_capture_sees_what_x_norm_adds_up():
    block, x = NnxBlock((functools.partial(jln.nnx.RMSNorm, 8),) * 2, paired, nnx.Rngs(0)), arguments()
    y, total = block(x)
    (got, _), captured = nnx.capture(block, nnx.Intermediate, method_outputs=nnx.Intermediate)(x)
    np.testing.assert_allclose(got, y, rtol=1e-5, atol=1e-5)  # rows of 8 float32 numbers
    (seen,) = captured["post"]["__call__"].get_value()
    np.testing.assert_allclose(seen, total, rtol=1e-5, atol=1e-5)


def norms(framework):
    """Return two norms of ours and one of the framework's own, ready to be called."""
    if framework == "nnx":
        return [cls(8, rngs=nnx.Rngs(0)) for cls in (jln.nnx.RMSNorm, jln.nnx.RMSNorm, nnx.RMSNorm)]
    if framework == "equinox":
        return [cls(8, dtype="float32") for cls in (jln_equinox.RMSNorm, jln_equinox.RMSNorm, eqx.nn.RMSNorm)]
    if framework == "linen":
        return [cls(parent=None) for cls in (jln.linen.RMSNorm, jln.linen.RMSNorm, linen.RMSNorm)]
    return [cls(-1) for cls in (jln_haiku.RMSNorm, jln_haiku.RMSNorm, hk.RMSNorm)]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_wrong_arguments_are_named(framework):
    x = jnp.ones((8,), "float32")

    def raised(given):
        """Call a norm with the keywords that `given` makes of a second norm of ours and one of the framework's."""
        norm, other, plain = norms(framework)
        call = functools.partial(norm.init, jax.random.key(0)) if framework == "linen" else norm
        call(x, **given(other, plain))

    run = raised
    if framework == "haiku":
        run = lambda given: hk.transform(lambda: raised(given)).init(jax.random.key(0))  # noqa: E731
    cls = rf"jln\.{framework}\.RMSNorm"
    cases = [
        (r"added_to must have shape \(8,\), that of x; got float32\[4\]", lambda *_: {"added_to": x[:4]}),
        ("added_to goes without residual", lambda *_: {"added_to": x, "residual": x}),
        ("added_to goes without z", lambda *_: {"added_to": x, "z": x}),
        ("added_to goes without gate", lambda *_: {"added_to": x, "gate": 0.5}),
        ("added_to goes without x_norm", lambda other, _: {"added_to": x, "x_norm": other}),
        ("x_norm needs a residual, .*; got residual=None", lambda other, _: {"x_norm": other}),
        ("x_norm goes without z", lambda other, _: {"x_norm": other, "residual": x, "z": x}),
        ("x_norm goes without x_bias", lambda other, _: {"x_norm": other, "residual": x, "x_bias": x}),
        (r"residual must have shape \(8,\)", lambda other, _: {"x_norm": other, "residual": x[:4]}),
    ]
    for message, given in cases:
        with pytest.raises(ValueError, match=f"^{message}"):
            run(given)
    for message, given in [
        ("added_to must have one of the dtypes", lambda *_: {"added_to": jnp.ones((8,), "int32")}),
        (f"x_norm must be a {cls}; got a RMSNorm of", lambda _, plain: {"x_norm": plain, "residual": x}),
    ]:
        with pytest.raises(TypeError, match=f"^{message}"):
            run(given)

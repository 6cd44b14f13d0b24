"""Steps between a norm and its products, as MaxText, Penzai, T5 and big_vision write them, and copies of its result."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

import jln
from plain_norms import B, C, R, S, V, W, X, layer, rms
from proof import Case, H, apart, difference, equations, operators, prove

pytestmark = pytest.mark.usefixtures("promoted_ranks")
ONE = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))
ROWS = NamedSharding(ONE, PartitionSpec("data"))


def behind_a_sum(between, **how):
    """A loss of a norm of a sum, what stands between, and two products."""

    def loss(x, r, s, w, v):
        total = x @ jnp.eye(H) + r
        y = between(rms(total, s))
        up = jnp.matmul(y, w, **how)
        return jnp.sum(jnp.sin(up @ v + total)) + jnp.sum(jnp.cos(jnp.matmul(y, 2 * w, **how)))

    return loss


ARGUMENTS = X, R, S, W, V
BETWEEN = {
    "nothing": lambda y: y,
    "a constraint": lambda y: lax.with_sharding_constraint(y, ROWS),
    "a name": lambda y: checkpoint_name(y, "norm"),
    "a copy": jnp.copy,
    "a factor": lambda y: y * H**-0.5,
    "a cast": lambda y: y.astype("float64"),
    "all of them": lambda y: lax.with_sharding_constraint(jnp.copy(checkpoint_name(y * 0.1, "norm")), ROWS),
}


@pytest.mark.parametrize("linears", ["norms", "linears"])
@pytest.mark.parametrize("between", BETWEEN)
def test_the_norm_and_its_linears_are_found_behind(between, linears):
    loss, options = behind_a_sum(BETWEEN[between]), {"linears": linears == "linears"}
    assert operators(loss, *ARGUMENTS, **options) == {"add_rms_norm" + options["linears"] * "_linear": 1}
    (route,) = jln.explain(jln.fuse(loss), *ARGUMENTS)  # by its own choice, too
    assert route.layer == "jln.add_rms_norm" and "scale" in route.why
    if linears == "linears" or between in ("a factor", "all of them"):
        assert difference(loss, *ARGUMENTS, **options) <= 1e-12


@pytest.mark.parametrize("precision", ["default", "highest", (lax.Precision.HIGH, lax.Precision.HIGHEST)])
def test_linears_have_the_precision_of_the_products(precision):
    loss = behind_a_sum(lambda y: y, precision=precision)
    assert operators(loss, *ARGUMENTS, linears=True) == {"add_rms_norm_linear": 1}
    fused, own = (
        {str(e.params["precision"]) for e in equations(program.jaxpr) if e.primitive.name == "dot_general"}
        for program in (jax.make_jaxpr(jax.grad(f))(*ARGUMENTS) for f in (jln.fuse(loss, linears=True), loss))
    )
    assert fused - {"None"} == (own - {"None"} if precision != "default" else set())


NO_LINEARS = {
    "two precisions": (lambda y, w: (y @ w, jnp.matmul(y, w, precision="highest")), "precisions"),
    "two dtypes": (lambda y, w: (y @ w, y.astype("float32") @ w.astype("float32")), "dtypes"),
    "an algorithm": (lambda y, w: jnp.matmul(y, w, precision=lax.DotAlgorithmPreset.F64_F64_F64), "algorithm"),
    "itself": (lambda y, w: y @ jnp.swapaxes(y, -1, -2), "reads its result"),
    "eight bits": (lambda y, w: lax.dot(y, w.astype("int8"), preferred_element_type="float64"), "in int8"),
}


@pytest.mark.parametrize("case", NO_LINEARS)
def test_products_that_no_operator_takes_stay(case):
    function, why = NO_LINEARS[case]
    (route,) = jln.explain(jln.fuse(lambda x, s, w: function(layer(x, s), w), linears=True), X[0], S, W)
    assert route.layer == "jln.layer_norm" and why in route.why


def test_a_norm_in_16_bits_of_a_float32_stream_has_its_linears():
    """Products of a narrow copy are one operator with the norm, which rounds once."""

    def loss(x, s, b, w):
        y = layer(x, s, b).astype("bfloat16")
        return jnp.sum(jnp.sin((y @ w.astype("bfloat16")).astype("float32")) + jnp.sum(x, -1, keepdims=True))

    arguments = [a.astype("float32") for a in (X, S, B, W)]
    (route,) = jln.explain(jln.fuse(loss, linears=True), *arguments)
    assert (route.layer, route.path) == ("jln.layer_norm_linear", "fused")
    assert difference(loss, *arguments, linears=True) <= 2e-2


def test_a_norm_that_is_read_without_its_factor_is_made_once():
    def loss(x, s, w):
        y = rms(x, s)
        return jnp.sum(jnp.sin((y * 0.1) @ w) + jnp.sum(jnp.cos(y @ w)))

    assert operators(loss, X, S, W) == {"rms_norm": 1}
    assert "rsqrt" not in [e.primitive.name for e in jax.make_jaxpr(jln.fuse(loss))(X, S, W).eqns]
    assert difference(loss, X, S, W) <= 1e-12


def test_a_constraint_in_front_of_linears_is_one_of_what_the_norm_reads():
    program = jax.make_jaxpr(jln.fuse(behind_a_sum(BETWEEN["a constraint"]), linears=True))(*ARGUMENTS)
    constrained = [e.invars[0] for e in program.jaxpr.eqns if e.primitive.name == "sharding_constraint"]
    assert len(constrained) == 2 and program.jaxpr.invars[1] in constrained  # x, which a product makes, and r


# Copies.


@pytest.mark.parametrize(
    ("norm", "products", "added"),
    [("rms_norm", 1, 0), ("rms_norm", 2, 0), ("rms_norm", 5, 0), ("layer_norm", 2, 1), ("layer_norm", 3, 1)],
)
def test_what_products_pull_back_is_added_up_in_the_backward_kernel(norm, products, added):
    """Three arrays at most come to it; in front of it XLA adds up what is more."""

    def loss(x, r, s, w):
        y = (rms if norm == "rms_norm" else layer)(x + r, s)
        pulled = [jnp.sum(jnp.sin(y @ (i * w))) for i in range(1, products + 1)]
        beside = [jnp.sum(jnp.cos(y * r))] * added
        return sum([*pulled, *beside, jnp.sum(x + r)])

    assert difference(loss, X, R, S, W) <= 1e-12
    backward = jax.make_jaxpr(jax.grad(jln.fuse(loss), argnums=(0, 2)))(X, R, S, W).jaxpr
    (equation,) = (e for e in backward.eqns if e.primitive.name == "jln_norm_backward")
    rows = [v for v in equation.invars if v.aval.shape == X.shape]
    assert len(rows) == min(products + added, 3) + 2  # and dtotal and total


def copied(x, s, w):
    y = layer(x, s)
    return jnp.sum(jnp.sin(y @ w) * jnp.cos(y @ (2 * w)))


def test_copies_are_kept_once():
    """A scan would hold each between forward and backward."""
    kept = jax.make_jaxpr(lambda *a: jax.vjp(jln.fuse(copied), *a)[1])(X, S, W).jaxpr.outvars
    assert len({v for v in kept if v.aval.shape == X.shape}) == 2  # x and y


def test_copies_in_transformations():
    def transformed(f, in_forward_mode):
        along = jax.jvp(jax.grad(f), (X, S, W), (R, S, W))[1]
        mapped = jax.vmap(jax.grad(f, (0, 1)), (0, None, None))(X, S, W)
        of_scales = jax.grad(lambda x, s: jnp.sum(jax.vmap(f, (0, 0, None))(x, s, W)), (0, 1))(X, np.stack([S, 2 * S]))
        return along, mapped, of_scales, jax.jvp(in_forward_mode, (X, S, W), (R, S, W))[1]

    fused = jln.fuse(copied), jln.fuse(copied, forward_mode=True)
    assert apart(*jax.jit(lambda: [transformed(*fused), transformed(copied, copied)])()) <= 1e-11


def test_a_product_that_nobody_differentiates_pulls_nothing_back():
    loss = lambda x, s, w: jnp.sum(jnp.sin(rms(x, s) @ w) + lax.stop_gradient(jnp.cos(rms(x, s) @ (2 * w))))  # noqa: E731
    assert difference(loss, X, S, W) <= 1e-12


def test_a_product_of_two_norms_results_reads_both():
    """Such are queries and keys, each of which others read too."""

    def loss(x, r, s, w):
        q, k = rms(jnp.sin(x), s), layer(jnp.cos(r), s)
        scores = jnp.einsum("brh,bth->brt", q, k)
        return jnp.sum(jnp.sin(scores)) + jnp.sum(jnp.cos(q @ w)) + jnp.sum(jnp.cos(k @ w))

    assert operators(loss, X, R, S, W) == {"rms_norm": 1, "layer_norm": 1}
    assert difference(loss, X, R, S, W) <= 1e-12


# Checkpoints that keep names, some of which stand behind the products, as MaxText has them.
NAME = lambda a, c: checkpoint_name(a, "up")  # noqa: E731
NAMES = {
    "behind": ([NAME], ["up"], True),
    "behind a rotation": ([lambda a, c: a * jnp.cos(jnp.arange(3.0))[:, None], NAME], ["up"], True),
    "behind a bias and a factor": ([lambda a, c: (a + c) * 2.0, NAME], ["up"], True),
    "behind what backward reads again": ([lambda a, c: jnp.sin(a), NAME], ["up"], False),
    "of others": ([NAME], ["down"], False),
}


@pytest.mark.parametrize("case", NAMES)
def test_a_checkpoint_keeps_what_has_a_name_behind_a_product(case):
    """The Linears' operator then makes again what is normalised; else norms hand on their x."""
    names, keeps, are_kept = NAMES[case]

    def block(x, s, w, v, c):
        up = rms(x, s) @ w
        for step in names:
            up = step(up, c)
        return x + jnp.tanh(up) @ v

    def loss(x, *parameters):
        policy = jax.checkpoint_policies.save_only_these_names(*keeps)
        for _ in range(2):
            x = jax.checkpoint(block, policy=policy)(x, *parameters)
        return jnp.sum(jnp.sin(x))

    routes = jln.explain(jln.fuse(loss), X, S, W, V, C)
    assert [r.layer for r in routes] == ["jln.add_rms_norm_linear" if are_kept else "jln.add_rms_norm"] * 2
    assert difference(loss, X, S, W, V, C, by_choice=True) <= 1e-12


def test_a_name_in_front_of_an_operator_stays():
    """The operator reads what the checkpoint keeps, not what is in front of the name."""

    def loss(x, r, s, w):
        return jnp.sum(jnp.sin(rms(checkpoint_name(x @ jnp.eye(H), "kept") + r, s) @ w))

    (route,) = jln.explain(jln.fuse(loss), X, R, S, W)
    assert route.layer == "jln.add_rms_norm"
    program = jax.make_jaxpr(jln.fuse(loss))(X, R, S, W).jaxpr.eqns
    (named,) = (e.outvars[0] for e in program if e.primitive.name == "name")
    (operator,) = (e for e in program if e.primitive.name.startswith("jln_"))
    assert named in operator.invars


@pytest.mark.parametrize("linears", [False, True])
def test_a_callback_may_read_a_norms_result(linears):
    """A callback has no results of its own."""

    def loss(x, w):
        y = jax.nn.standardize(x, epsilon=1e-6)
        jax.debug.callback(lambda _: None, y)
        return jnp.sum(y @ w) + jnp.sum(x)

    prove(Case(loss, (X[0], W), {"layer_norm": 1}, {"linears": linears}))


def test_the_bias_of_a_linear_is_the_next_norms():
    """A Linear alone between two norms: its bias is read by the second's sum, and the first is one operator with it."""

    def loss(x, w, b):
        for _ in range(3):
            x = x + (jax.nn.standardize(x, epsilon=1e-6) @ w + b)
        return jnp.sum(x**2)

    args = X[0], np.eye(H) / 2, S
    found = {"layer_norm_linear": 1, "add_layer_norm_linear": 2}
    prove(Case(loss, args, found, {"linears": True}))
    assert "rsqrt" not in str(jax.make_jaxpr(jln.fuse(loss, linears=True))(*args))

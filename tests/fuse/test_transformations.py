"""A small model under every transformation, in front of `jln.fuse` and behind: operators, values and gradients."""

import collections
import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jln
from proof import normal, operators, parted

pytestmark = pytest.mark.usefixtures("promoted_ranks")
# [4, 4, 16]: examples for four devices. Two norms a block and one behind: all but the first read a sum.
H, BLOCKS = 16, 3
ALL = {"layer_norm": 1, "add_layer_norm": 6}
IN_BODIES = {"layer_norm": 4, "add_layer_norm": 3}  # the first norm of a body reads its argument, and the last one too
IN_ONE_BODY = {"layer_norm": 2, "add_layer_norm": 1}
X = normal(4, 4, H)


def parameters():
    shapes = {"s": (2, H), "b": (2, H), "u": (H, 8), "v": (8, H), "c": (H,)}
    blocks = [{n: normal(*of) * 0.3 + 0.1 * i for n, of in shapes.items()} for i in range(BLOCKS)]
    return {"blocks": blocks, "s": normal(H), "b": normal(H), "out": normal(H, 4)}


PARAMETERS = parameters()


def norm(x, s, b):
    d = x - jnp.mean(x, -1, keepdims=True)
    return d * lax.rsqrt(jnp.mean(d * d, -1, keepdims=True) + 1e-6) * s + b


def block(p, x):
    x = x + jnp.tanh(norm(x, p["s"][0], p["b"][0]) @ p["u"]) @ p["v"] + p["c"]
    return x + jnp.sin(norm(x, p["s"][1], p["b"][1]) @ p["u"]) @ p["v"]


def head(p, x):
    return jnp.mean((norm(x, p["s"], p["b"]) @ p["out"]) ** 2)


def model(p, x, block=block):
    for of in p["blocks"]:
        x = block(of, x)
    return head(p, x)


def scanned(p, x, block=block):
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *p["blocks"])
    x, _ = lax.scan(lambda x, of: (block(of, x), None), x, stacked)
    return head(p, x)


WAYS = {}


def way(finds):
    """Return a decorator for a function that makes a loss of a `fuse`, in which so much is found."""

    def add(function):
        WAYS[function.__name__] = function, finds
        return function

    return add


@way(ALL)
def a_plain_call(fuse):
    return fuse(model)


@way(ALL)
def jit_outside(fuse):
    return jax.jit(fuse(model))


@way(ALL)
def jit_inside(fuse):
    return fuse(jax.jit(model))


@way(ALL)
def jitted_blocks(fuse):
    return fuse(functools.partial(model, block=jax.jit(block)))


@way(ALL)
def closed_over_tracers(fuse):
    return lambda p, x: jax.jit(lambda q: fuse(lambda x: model(q, x))(x))(p)


@way(ALL)
def vmap_outside(fuse):
    return lambda p, x: jnp.sum(jax.vmap(fuse(model), (None, 0))(p, x))


@way(ALL)
def vmap_inside(fuse):
    return fuse(lambda p, x: jnp.sum(jax.vmap(model, (None, 0))(p, x)))


@way({"layer_norm": 1, "add_layer_norm": 6})
def vmap_over_parameters(fuse):
    def loss(p, x):
        ensemble = jax.tree.map(lambda a: jnp.stack([a, 0.9 * a]), p)
        return jnp.sum(jax.vmap(fuse(model), (0, None))(ensemble, x))

    return loss


@way(IN_ONE_BODY)
def scan_over_layers(fuse):
    return fuse(scanned)


@way(IN_ONE_BODY)
def scan_under_jit_with_a_checkpoint(fuse):
    return jax.jit(fuse(functools.partial(scanned, block=jax.checkpoint(block))))


@way({"layer_norm": 1, "add_layer_norm": 1})
def fuse_as_a_scans_body(fuse):
    return functools.partial(scanned, block=fuse(block))


def _policy(name):
    policies = jax.checkpoint_policies
    return {
        "names": policies.save_only_these_names("kept"),
        "no_batch": policies.dots_with_no_batch_dims_saveable,
        "dots": policies.dots_saveable,
        "nothing": policies.nothing_saveable,
        "everything": policies.everything_saveable,
        "statistics": policies.save_only_these_names(jln.STATISTICS),
    }[name]


def _named(p, x):
    return checkpoint_name(block(p, x), "kept")


for _name in ("nothing", "dots", "no_batch", "everything", "names", "statistics"):

    def _checkpointed(fuse, name=_name):
        return fuse(functools.partial(model, block=jax.checkpoint(_named, policy=_policy(name))))

    WAYS[f"checkpoint_{_name}"] = _checkpointed, IN_BODIES


@way(ALL)
def a_checkpoint_around(fuse):
    return jax.checkpoint(fuse(model))


@way(IN_BODIES)
def branches(fuse):
    chosen = lambda p, x: lax.cond(jnp.sum(x) > 0, block, lambda p, x: x * 2, p, x)  # noqa: E731
    return fuse(functools.partial(model, block=chosen))


@way({"layer_norm": 7, "add_layer_norm": 6})
def three_branches(fuse):
    dynamic = lambda p, x: lax.switch(jnp.argmax(x[0, 0]) % 3, [block, lambda p, x: x, block], p, x)  # noqa: E731
    return fuse(functools.partial(model, block=dynamic))


@way(IN_ONE_BODY)
def a_loop_of_known_length(fuse):
    return fuse(lambda p, x: head(p, lax.fori_loop(0, 3, lambda i, x: block(p["blocks"][0], x), x)))


@way({"layer_norm": 1})
def bodies_with_a_derivative_of_their_own(fuse):
    own = jax.custom_vjp(block)
    own.defvjp(lambda p, x: (block(p, x), (p, x)), lambda kept, dy: jax.vjp(block, *kept)[1](2 * dy))
    return fuse(functools.partial(model, block=own))


@way({"layer_norm": 1})
def bodies_with_a_forward_derivative_of_their_own(fuse):
    own = jax.custom_jvp(block)
    own.defjvp(lambda a, t: jax.jvp(block, a, jax.tree.map(lambda b: 2 * b, t)))
    return fuse(functools.partial(model, block=own))


@way(ALL)
def random_numbers(fuse):
    def dropped(p, x):
        key = jax.random.key(3)
        return model(p, jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x / 0.8, 0))

    return fuse(dropped)


@way(ALL)
def a_bound_method(fuse):
    class Model:
        def __init__(self, scale):
            self.scale = scale

        def loss(self, p, x):
            return self.scale * model(p, x)

    return fuse(Model(2.0).loss)


@way(ALL)
def a_decorated_method(fuse):
    class Model:
        scale = 2.0

        @fuse
        def loss(self, p, x):
            return self.scale * model(p, x)

    return Model().loss


@way(ALL)
def a_callable_object(fuse):
    class Model:
        def __call__(self, p, x):
            return model(p, x)

    return fuse(Model())


@way(ALL)
def a_partial_function(fuse):
    return fuse(functools.partial(lambda scale, p, x: scale * model(p, x), 3.0))


@way(ALL)
def fused_twice(fuse):
    return fuse(fuse(model))


def _mesh(*shape, axis_type=AxisType.Auto):
    names = ("data", "model")[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(shape))


def _sharded(check_vma, outside):
    def made(fuse):
        mesh = _mesh(4)
        inner, outer = (lambda f: f, fuse) if outside else (fuse, lambda f: f)
        local = inner(lambda p, x: lax.pmean(model(p, x), "data"))
        specs = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": check_vma}
        return outer(jax.shard_map(local, mesh=mesh, **specs))

    return made


WAYS |= {
    f"shard_map_{'inside' if outside else 'outside'}{'_checked' if check_vma else ''}": (
        _sharded(check_vma, outside),
        ALL,
    )
    for check_vma in (False, True)
    for outside in (False, True)
}


@way(ALL)
def a_mesh_of_automatic_axes(fuse):
    sharding = NamedSharding(_mesh(2, 2), P("data", None, "model"))
    constrained = lambda p, x: lax.with_sharding_constraint(block(p, x), sharding)  # noqa: E731
    return jax.jit(fuse(functools.partial(model, block=constrained)))


@pytest.mark.parametrize("name", WAYS)
def test_a_transformation_changes_nothing_and_loses_nothing(name):
    made, finds = WAYS[name]
    fused, untouched = made(jln.fuse), made(lambda f: f)
    routes = jln.explain(fused, PARAMETERS, X)
    found = collections.Counter(r.layer.removeprefix("jln.") for r in routes if r.path != "plain")
    wanted = jax.jit(jax.value_and_grad(untouched, (0, 1)))(PARAMETERS, X)
    got = jax.jit(jax.value_and_grad(fused, (0, 1)))(PARAMETERS, X)
    assert (dict(found), _parted(got, wanted) <= 1e-11) == (finds, True)


def _parted(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    return max(parted(a, b) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True))


def test_a_gradient_without_jit():
    wanted, got = (jax.grad(f, (0, 1))(PARAMETERS, X) for f in (model, jln.fuse(model)))
    assert _parted(got, wanted) <= 1e-11


def test_the_gradient_of_each_example():
    wanted, got = (jax.vmap(jax.grad(f), (None, 0))(PARAMETERS, X) for f in (model, jln.fuse(model)))
    assert _parted(got, wanted) <= 1e-11


def test_a_loop_that_ends_by_itself():
    def loss(p, x):
        turn = lambda a: (a[0] + 1, block(p["blocks"][0], a[1]))  # noqa: E731
        return head(p, lax.while_loop(lambda a: (a[0] < 3) & (jnp.sum(a[1] ** 2) < 1e9), turn, (0, x))[1])

    assert operators(loss, PARAMETERS, X) == IN_ONE_BODY
    assert _parted(jax.jit(jln.fuse(loss))(PARAMETERS, X), jax.jit(loss)(PARAMETERS, X)) <= 1e-11


def test_a_hessian_vector_product():
    def product(f):
        inner = lambda x: jnp.vdot(jax.grad(f, 1)(PARAMETERS, x), jnp.cos(X))  # noqa: E731
        return jax.jit(jax.grad(inner))(X)

    assert _parted(product(jln.fuse(model)), product(model)) <= 1e-10


def test_forward_mode():
    fused = jln.fuse(model, forward_mode=True)
    tangents = jax.tree.map(np.cos, (PARAMETERS, X))
    wanted, got = (jax.jit(lambda f=f: jax.jvp(f, (PARAMETERS, X), tangents))() for f in (model, fused))
    assert _parted(got, wanted) <= 1e-11
    wanted, got = (jax.jit(jax.hessian(f, 1))(PARAMETERS, X[:1, :1]) for f in (model, fused))
    assert _parted(got, wanted) <= 1e-10


def test_a_mesh_of_explicit_axes():
    mesh = _mesh(2, 2, axis_type=AxisType.Explicit)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("data", None, None)))

        def constrained(p, x):
            return jax.sharding.reshard(block(p, x), P("data", None, None))

        loss = functools.partial(model, block=constrained)
        wanted, got = (jax.jit(jax.value_and_grad(f))(PARAMETERS, x) for f in (loss, jln.fuse(loss)))
        assert _parted(got, wanted) <= 1e-11
        assert operators(loss, PARAMETERS, x) == ALL


def test_sharded_arguments_of_a_mesh_of_automatic_axes():
    mesh = _mesh(2, 2)
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    p = jax.device_put(PARAMETERS, NamedSharding(mesh, P()))
    wanted, got = (jax.jit(jax.value_and_grad(f))(p, x) for f in (model, jln.fuse(model)))
    assert _parted(got, wanted) <= 1e-11
    assert got[1]["out"].sharding.is_equivalent_to(wanted[1]["out"].sharding, 2)


def _told(jitted):
    """The effects of a model in their order, fused and not: of prints that may go anywhere, and of ordered ones."""
    told = []

    def tell(what, a):
        told.append((what, round(float(a), 6)))
        return np.float64(len(told))

    def loss(p, x):
        for i, of in enumerate(p["blocks"]):
            # The number of calls until now: a call too many or in another place changes the loss.
            number = io_callback(
                functools.partial(tell, f"{i}"), jax.ShapeDtypeStruct((), np.float64), jnp.sum(x), ordered=True
            )
            jax.debug.callback(functools.partial(tell, f"debug {i}"), jnp.sum(x), ordered=True)
            scale = io_callback(
                functools.partial(tell, "s"), jax.ShapeDtypeStruct((), np.float64), number, ordered=True
            )
            x = block(of | {"s": of["s"] * scale * lax.stop_gradient(number)}, x)
            jax.debug.callback(functools.partial(tell, "behind"), jnp.max(x), ordered=True)
        return head(p, x)

    results = []
    for f in (loss, jln.fuse(loss)):
        told.clear()
        result = (jax.jit(f) if jitted else f)(PARAMETERS, X)
        jax.effects_barrier()
        results.append((float(result), list(told)))
    return results


@pytest.mark.parametrize("jitted", [True, False], ids=["jit", "eager"])
def test_effects_keep_their_order_and_number(jitted):
    (wanted, of_the_model), (got, of_the_fused) = _told(jitted)
    assert of_the_fused == of_the_model
    assert abs(got - wanted) <= 1e-11


@pytest.mark.parametrize("jitted", [True, False], ids=["jit", "eager"])
def test_effects_that_make_a_norms_scale_keep_their_order(jitted):
    """An operator reads its scale where the sum is made, which is in front of the scale's own effect."""
    told = []

    def tell(what, a):
        told.append(what)
        return np.asarray(a) + len(told)

    def ordered(what, a):
        return io_callback(functools.partial(tell, what), jax.ShapeDtypeStruct(a.shape, a.dtype), a, ordered=True)

    def loss(x, r, s, b):
        total = r + x
        first = ordered("first", jnp.sum(total))
        return norm(total, ordered("scale", s), b) * first + total

    results = []
    for f in (loss, jln.fuse(loss)):
        told.clear()
        made = (jax.jit(f) if jitted else f)(X, X + 1, normal(H), normal(H))
        jax.effects_barrier()
        results.append((list(told), np.asarray(made)))
    (wanted, a), (got, b) = results
    assert got == wanted == ["first", "scale"]
    assert parted(b, a) <= 1e-12


def test_references_are_read_and_written_in_order():
    def loss(x, r, s, b):
        ref = jax.new_ref(s)
        total = r + x
        ref[...] = ref[...] * jnp.max(total)
        y = norm(total, ref[...], b)
        ref[...] = jnp.zeros_like(s)
        lax.fori_loop(0, 3, lambda i, _: ref.__setitem__(..., ref[...] + norm(total, s, b)[0, 0]), None)
        return jnp.sum(jnp.sin(y * ref[...] + total))

    args = (X, X + 1, normal(H), normal(H))
    assert _parted(jax.jit(jln.fuse(loss))(*args), jax.jit(loss)(*args)) <= 1e-12


def test_export():
    from jax import export

    exported = export.export(jax.jit(jln.fuse(model)))(PARAMETERS, X)
    assert _parted(export.deserialize(exported.serialize()).call(PARAMETERS, X), model(PARAMETERS, X)) <= 1e-11


def test_symbolic_shapes_are_left_alone():
    from jax import export

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "jln.fuse found no norm")
        (b,) = export.symbolic_shape("b")
        x = jax.ShapeDtypeStruct((b, 4, H), X.dtype)
        exported = export.export(jax.jit(jln.fuse(model)))(PARAMETERS, x)
    assert _parted(exported.call(PARAMETERS, X[:3]), model(PARAMETERS, X[:3])) <= 1e-11


def test_static_and_keyword_arguments_and_aux():
    @jln.fuse
    def loss(p, x, times, *, activation, names=("a", None), scale=1.0):
        made = sum(model(p, activation(x)) for _ in range(times)) * scale
        return made, {"x": x, names[0]: None, "times": times}

    arguments = {"activation": jnp.tanh, "scale": np.float64(2.0)}
    (value, aux), gradient = jax.value_and_grad(loss, has_aux=True)(PARAMETERS, X, 2, **arguments)
    (wanted, _), of = jax.value_and_grad(loss.__wrapped__, has_aux=True)(PARAMETERS, X, 2, **arguments)
    assert _parted((value, gradient), (wanted, of)) <= 1e-11
    assert aux["a"] is None and int(aux["times"]) == 2


def test_static_arguments_that_differ_only_by_type_or_sign():
    fused = jln.fuse(
        lambda x, a: jnp.sum(norm(x, 1.0, 0.0)) * 0 + jnp.arctan2(jnp.asarray(a, jnp.float64), -1.0) + x.size
    )
    told = [float(fused(X, a)) for a in (0.0, -0.0, 0, False)]
    assert told == [float(fused.__wrapped__(X, a)) for a in (0.0, -0.0, 0, False)]


def test_a_static_argument_without_a_hash():
    class Options(dict):
        __hash__ = None

    class Box:
        __hash__ = None

        def __eq__(self, other):
            return True

        def __init__(self, scale):
            self.scale = scale

    fused = jln.fuse(lambda x, box: jnp.sum(norm(x, 1.0, 0.0) ** 2) * box.scale)
    assert float(fused(X, Box(1.0))) * 2 == float(fused(X, Box(2.0)))


def test_weak_types_stay():
    f = lambda x, a: (a * 2, norm(x, 1.0, 0.0), jnp.mean(x) * a, lax.scan(lambda c, x: (c * 2, norm(x, a, 0.0)), a, x))  # noqa: E731
    number = jax.ShapeDtypeStruct((), np.float64, weak_type=True)
    wanted, got = (jax.tree.leaves(jax.eval_shape(g, X, number)) for g in (f, jln.fuse(f)))
    assert [a.weak_type for a in got] == [a.weak_type for a in wanted]


def test_donated_buffers():
    step = lambda f: jax.jit(lambda p, x: jax.tree.map(lambda a, g: a - g, p, jax.grad(f)(p, x)), donate_argnums=0)  # noqa: E731
    given = [jax.tree.map(jnp.array, PARAMETERS) for _ in range(2)]
    wanted, got = (step(f)(p, X) for f, p in zip((model, jln.fuse(model)), given, strict=True))
    assert _parted(got, wanted) <= 1e-11
    assert all(a.is_deleted() for a in jax.tree.leaves(given))


def test_donated_buffers_of_an_inner_jit():
    inner = jax.jit(model, donate_argnums=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers")
        made = jln.fuse(inner)(PARAMETERS, jnp.array(X))
    assert _parted(made, model(PARAMETERS, X)) <= 1e-11


def test_decorators():
    @jln.fuse
    def plain(p, x):
        """Say what it is."""
        return model(p, x)

    @jln.fuse(linears=True)
    def with_linears(p, x):
        return model(p, x)

    assert (plain.__name__, plain.__doc__) == ("plain", "Say what it is.")
    assert operators(plain.__wrapped__, PARAMETERS, X) == ALL
    found = collections.Counter(r.layer for r in jln.explain(with_linears, PARAMETERS, X))
    assert found == {"jln.layer_norm_linear": 1, "jln.add_layer_norm_linear": 6}
    wanted, *got = (jax.jit(jax.grad(f))(PARAMETERS, X) for f in (model, plain, with_linears))
    assert max(_parted(a, wanted) for a in got) <= 1e-11


def test_scopes_and_lines_of_the_author_stay():
    def loss(p, x):
        with jax.named_scope("encoder"):
            x = block(p["blocks"][0], x)
        with jax.named_scope("head"):
            return head(p, x)

    names = lambda f: jax.jit(f).lower(PARAMETERS, X).as_text(debug_info=True)  # noqa: E731
    plain, fused = names(loss), names(jln.fuse(loss))
    of_products = lambda text: set(re.findall(r'"[^"]*(?:encoder|head)[^"]*/dot_general"', text))  # noqa: E731
    assert of_products(plain) and of_products(fused) == of_products(plain)
    assert re.search(r"encoder[^\"]*layer_norm|encoder[^\"]*/", fused)
    program = jax.make_jaxpr(jln.fuse(loss))(PARAMETERS, X)
    products = [e for e in program.eqns if e.primitive.name == "dot_general"]
    assert len(products) == 5
    for equation in products:
        files = [frame.file_name for frame in equation.source_info.traceback.frames]
        theirs = [name for name in files if "site-packages" not in name]
        assert theirs[0].endswith("test_transformations.py"), theirs[:3]


def test_scopes_around_an_inner_jit_stay():
    def loss(x):
        with jax.named_scope("outer"):
            return jax.jit(lambda x: jnp.sum(jnp.sin(norm(x, 1.0, 0.0))))(x)

    names = lambda f: set(re.findall(r'op_name="([^"]*/sin)"', jax.jit(f).lower(X).compile().as_text()))  # noqa: E731
    (name,) = names(loss)
    assert "outer/" in name
    assert names(jln.fuse(loss)) == {name}


@pytest.mark.filterwarnings("ignore:jln.fuse found no norm")
def test_near_misses_in_jaxs_own_functions_have_the_callers_line():
    routes = jln.explain(jln.fuse(lambda x, w: (x / (jnp.std(x, -1, keepdims=True) + 1e-3)) @ w), X, normal(H, 4))
    assert routes and all("test_transformations.py:" in r.why for r in routes)


def test_results_that_are_constants_are_arrays():
    fused = jln.fuse(lambda x: (norm(x, 1.0, 0.0), 3, np.float32(1), np.arange(3)))
    for made in (fused(X), fused(X)):
        assert [type(a) for a in made] == [type(jnp.ones(1))] * 4
        assert (int(made[1]), float(made[2]), made[3].tolist()) == (3, 1.0, [0, 1, 2])


@pytest.mark.parametrize(
    "inside",
    [
        lambda gradient: lambda p, x: lax.scan(lambda c, x: (c, gradient(p, x)), 0.0, X[None])[1],
        lambda gradient: jax.jit(gradient, donate_argnums=1),
    ],
)
def test_a_gradient_in_a_body_is_said_to_be_useless(inside):
    with pytest.warns(UserWarning, match="differentiates inside"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers")
        jln.fuse(inside(jax.grad(model)))(PARAMETERS, jnp.array(X))


def test_without_float64():
    with jax.enable_x64(False):
        args = jax.tree.map(lambda a: a.astype(np.float32), (PARAMETERS, X))
        for given in (args, (PARAMETERS, X)):  # numpy's float64 becomes float32
            wanted, got = (jax.value_and_grad(f)(*given) for f in (model, jln.fuse(model)))
            assert {a.dtype for a in jax.tree.leaves(got)} == {np.dtype(np.float32)}
            assert _parted(got, wanted) <= 1e-5
        assert operators(model, *args) == ALL


def test_strict_promotion_of_dtypes():
    with jax.numpy_dtype_promotion("strict"):
        assert operators(model, PARAMETERS, X) == ALL
        wanted, got = (jax.grad(f)(PARAMETERS, X) for f in (model, jln.fuse(model)))
    assert _parted(got, wanted) <= 1e-11


def test_strict_promotion_of_a_wider_copy():
    def mixed(p, x):
        return jnp.mean(norm(x.astype("float32"), p["s"], p["b"]).astype("bfloat16"))

    args = jax.tree.map(lambda a: a.astype("float32"), PARAMETERS), X.astype("bfloat16")
    with jax.numpy_dtype_promotion("strict"):
        assert operators(mixed, *args) == {"layer_norm": 1}


def test_a_program_deeper_than_python():
    def deep(x):
        number = lax.full_like(x, 0.0)
        for _ in range(3000):
            number = number + 1e-9
        return norm(x, 1.0, number)

    assert operators(deep, X) == {"layer_norm_add": 1}


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_a_kernel_of_few_bits_is_no_linears(dtype):
    def loss(p, x):
        product = functools.partial(lax.dot_general, dimension_numbers=(((2,), (0,)), ((), ())))
        return product(norm(x, p["s"], p["b"]), kernel, preferred_element_type="float32")

    kernel = jnp.ones((H, 8), dtype)
    args = jax.tree.map(lambda a: a.astype("float32"), (PARAMETERS, X))
    assert operators(loss, *args, linears=True) == {"layer_norm": 1}


def test_arrays_that_are_not_jaxs_are_static():
    fused = jln.fuse(lambda x, words, date: norm(x, float(len(words)), 0.0) if date else None)
    given = np.array(["of", "one"]), np.datetime64("2020-01-01")
    np.testing.assert_allclose(fused(X, *given), norm(X, 2.0, 0.0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("number", [np.inf, np.nan])
def test_a_factor_that_no_operator_takes(number):
    def loss(x):
        return norm(x + X * number, 1.0, 0.0)

    np.testing.assert_array_equal(jln.fuse(loss)(X), loss(X))


def test_the_sharding_of_a_product_stays():
    def product(x, kernel):
        y = norm(x, 1.0, 0.0)
        return jnp.einsum("...h,hn->...n", y, kernel, out_sharding=P(None, None, "model"))

    mesh = _mesh(2, 2, axis_type=AxisType.Explicit)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, P("data", None, None))
        kernel = jax.device_put(normal(H, 8), P(None, "model"))
        types = [jax.typeof(jax.jit(f)(x, kernel)) for f in (product, jln.fuse(product, linears=True))]
    assert types[1] == types[0]


def test_a_gradient_inside_is_right_and_said_to_be_useless():
    with pytest.warns(UserWarning, match="differentiates inside"):
        got = jln.fuse(jax.grad(functools.partial(model, block=jax.checkpoint(block))))(PARAMETERS, X)
    assert _parted(got, jax.grad(model)(PARAMETERS, X)) <= 1e-11


def test_checkpoints_of_a_gradient_inside_stay():
    """XLA is told what backward makes again, or it would make it once and keep it."""
    gradient = jax.grad(functools.partial(model, block=jax.checkpoint(block)))
    with pytest.warns(UserWarning, match="differentiates inside"):
        fused = str(jax.make_jaxpr(jln.fuse(gradient))(PARAMETERS, X))
    assert str(jax.make_jaxpr(gradient)(PARAMETERS, X)).count("differentiated=True") == BLOCKS
    assert fused.count("differentiated=True") == BLOCKS


def test_the_lines_of_explain_are_in_the_programs_order():
    def loss(p, x):
        x = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) + 1.0  # read by no product
        return head(p, x)

    lines = [(r.layer, r.why) for r in jln.explain(jln.fuse(loss, linears=True), PARAMETERS, X)]
    assert [layer for layer, _ in lines] == ["norm of float64[4,4,16]", "jln.layer_norm_linear"]
    assert lines[1][1].startswith("x, scale, offset, kernel; ")  # and no bias


@pytest.mark.parametrize("function", [jln.fuse(model), lambda p, x: jnp.sum(jln.layer_norm(x, p["s"]))])
def test_a_function_with_operators_of_its_own_has_norms(function):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jln.fuse(function)(PARAMETERS, X)


def test_a_closed_over_array_that_changes():
    held = {"scale": jnp.ones(H)}
    fused = jln.fuse(lambda x: jnp.sum(norm(x, held["scale"], 0.0) ** 2))
    first = float(fused(X))
    held["scale"] = jnp.full(H, 2.0)
    assert float(fused(X)) == pytest.approx(4 * first, rel=1e-12)


def test_an_array_of_an_inner_jit_that_changes():
    held = {"scale": jnp.ones(H)}
    fused = jln.fuse(lambda x: jax.jit(lambda x: jnp.sum(norm(x, held["scale"], 0.0) ** 2))(x))
    first = float(fused(X))
    held["scale"] = jnp.full(H, 2.0)
    assert float(fused(X)) == pytest.approx(4 * first, rel=1e-12)


def test_a_call_inside_of_a_vmap_is_not_that_of_another_one():
    """A program traced under a `vmap` knows its size, even where no argument is mapped: it is not kept for another."""

    @jln.fuse
    def f(x):
        return jax.nn.standardize(x) * jax.lax.axis_size("i")

    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 512)))
    both = [jax.vmap(lambda _: f(x), axis_name="i")(jnp.zeros(n))[0] for n in (2, 4)]
    np.testing.assert_allclose(both[1], 2 * both[0], rtol=1e-12)

"""Calls of what `jln.fuse` returns: arguments, results and their dtypes, and what is kept from call to call."""

import enum
import gc
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

import jln
from jln._fuse import transformation
from plain_norms import EXAMPLES, PARAMETERS, S, X, block, layer
from proof import H, apart, operators

pytestmark = pytest.mark.usefixtures("promoted_ranks")


def test_symbolic_shapes_are_left_alone():
    (b,) = export.symbolic_shape("b")
    fused = jln.fuse(lambda x: layer(x, S))
    with pytest.warns(UserWarning, match=r"jln.fuse found no norm"):
        exported = export.export(jax.jit(fused))(jax.ShapeDtypeStruct((b, 3, H), X.dtype))
    assert apart(exported.call(X), layer(X, S)) <= 1e-11


def test_static_and_keyword_arguments_and_aux():
    @jln.fuse
    def loss(s, x, times, *, activation, names=("a", None), scale=1.0):
        made = sum(jnp.sum(jnp.sin(layer(activation(x), s))) for _ in range(times)) * scale
        return made, {"x": x, names[0]: None, "times": times}

    arguments = {"activation": jnp.tanh, "scale": np.float64(2.0)}
    (value, aux), gradient = jax.value_and_grad(loss, has_aux=True)(S, X, 2, **arguments)
    (wanted, _), of = jax.value_and_grad(loss.__wrapped__, has_aux=True)(S, X, 2, **arguments)
    assert apart((value, gradient), (wanted, of)) <= 1e-11
    assert aux["a"] is None and int(aux["times"]) == 2


@pytest.mark.parametrize(
    "numbers", [(0.0, -0.0, 0, False), (complex(-1, 0.0), complex(-1, -0.0))], ids=["real", "complex"]
)
def test_static_arguments_that_differ_only_by_type_or_sign(numbers):
    fused = jln.fuse(lambda x, a: (layer(x), repr(a)))
    assert [fused(X, a)[1] for a in numbers] == [*map(repr, numbers)]


def test_a_numpy_scalar_that_an_outer_jit_holds_static():
    fused = jln.fuse(lambda x, times: sum(layer(x) for _ in range(times)))
    assert apart(jax.jit(fused, static_argnums=1)(X, np.int64(2)), 2 * layer(X)) <= 1e-11


def test_a_static_argument_without_a_hash():
    fused = jln.fuse(lambda x, box: jnp.sum(layer(x) ** 2) * box.scale)
    one, two = (types.SimpleNamespace(scale=scale) for scale in (1.0, 2.0))
    assert float(fused(X, one)) * 2 == float(fused(X, two))


def test_weak_types_stay():
    f = lambda x, a: (a * 2, layer(x), jnp.mean(x) * a, lax.scan(lambda c, x: (c * 2, layer(x, a)), a, x))  # noqa: E731
    number = jax.ShapeDtypeStruct((), np.float64, weak_type=True)
    wanted, got = (jax.tree.leaves(jax.eval_shape(g, X, number)) for g in (f, jln.fuse(f)))
    assert [a.weak_type for a in got] == [a.weak_type for a in wanted]


@pytest.mark.filterwarnings("ignore:Some donated buffers")
def test_donated_buffers():
    def step(f):
        changed = lambda s, x: s - jax.grad(lambda s: jnp.sum(jnp.sin(f(x, s))))(s)  # noqa: E731
        return jax.jit(changed, donate_argnums=0)

    given, functions = [jnp.array(S) for _ in range(2)], (layer, jln.fuse(jax.jit(layer, donate_argnums=0)))
    wanted, got = (step(f)(s, jnp.array(X)) for f, s in zip(functions, given, strict=True))
    assert apart(got, wanted) <= 1e-11
    assert all(a.is_deleted() for a in given)


def test_a_method_is_a_method_and_has_its_documentation():
    class Model:
        scale = 2.0

        @jln.fuse
        def loss(self, x):
            """Say what it is."""
            return self.scale * jnp.sum(layer(x, S) ** 2)

    assert (Model.loss.__name__, Model.loss.__doc__) == ("loss", "Say what it is.")
    assert operators(Model().loss, X) == {"layer_norm": 1}
    assert float(Model().loss(X)) == pytest.approx(2 * float(jnp.sum(layer(X, S) ** 2)), rel=1e-12)


def test_results_that_are_constants_are_arrays():
    fused = jln.fuse(lambda x: (layer(x), 3, np.float32(1), np.arange(3)))
    for made in (fused(X), fused(X)):
        assert [type(a) for a in made] == [type(jnp.ones(1))] * 4
        assert (int(made[1]), float(made[2]), made[3].tolist()) == (3, 1.0, [0, 1, 2])


class Kind(enum.Enum):
    SUM = 1


def test_results_that_are_no_numbers_are_handed_on():
    @jln.fuse
    def loss(x):
        return jnp.sum(layer(x) ** 2), {"name": "loss", "of": Kind.SUM, "x": x}

    wanted = loss.__wrapped__(X)[0]
    for value, aux in (loss(X), loss(X), jax.value_and_grad(loss, has_aux=True)(X)[0]):
        assert (aux["name"], aux["of"]) == ("loss", Kind.SUM)
        assert apart((value, aux["x"]), (wanted, X)) <= 1e-11


def test_a_result_that_may_hold_a_tracer_is_refused():
    """Eagerly it would be one of a trace that has ended, and the same object at each call."""

    @jln.fuse
    def a_loss(x):
        return jnp.sum(layer(x)), types.SimpleNamespace(x=x)

    with pytest.raises(TypeError, match=r"function a_loss at .*SimpleNamespace"):
        a_loss(X)


def test_errors_of_a_trace_name_the_users_function():
    @jln.fuse
    def a_loss(x):
        return layer(x) if jnp.sum(x) > 0 else x

    with pytest.raises(jax.errors.TracerBoolConversionError, match="the function a_loss at"):
        a_loss(X)


def test_a_derivative_in_forward_mode_says_what_to_do():
    with pytest.raises(TypeError, match=r"write jln.fuse\(loss, forward_mode=True\)"):
        jax.jvp(jln.fuse(layer), (X,), (X,))


@pytest.mark.parametrize("promotion", ["standard", "strict"])
def test_dtypes(promotion):
    """NumPy's float64 becomes float32 without x64; strict promotion changes nothing."""
    mixed = lambda x, s, b: jnp.mean(layer(x.astype("float32"), s, b).astype("bfloat16"))  # noqa: E731
    with jax.enable_x64(False), jax.numpy_dtype_promotion(promotion):
        p, x = PARAMETERS["blocks"][0], EXAMPLES
        of = lambda f: jax.jit(jax.value_and_grad(lambda p, x: jnp.sum(jnp.sin(f(p, x)))))(p, x)  # noqa: E731
        wanted, got = of(block), of(jln.fuse(block))
        assert {a.dtype for a in jax.tree.leaves(got)} == {np.dtype(np.float32)}
        assert apart(got, wanted) <= 1e-5
        parameters = [jnp.asarray(p[name][0], "float32") for name in "sb"]
        assert operators(mixed, x.astype("bfloat16"), *parameters) == {"layer_norm": 1}


def test_a_program_deeper_than_python():
    def deep(x):
        number = lax.full_like(x, 0.0)
        for _ in range(3000):
            number = number + 1e-9
        return layer(x) + number

    assert operators(deep, X) == {"layer_norm_add": 1}


@pytest.mark.parametrize("of", ["a function", "an inner jit"])
def test_a_closed_over_array_that_changes(of):
    held = {"scale": jnp.ones(H)}

    @jln.fuse
    def f(x):
        norm = lambda x: layer(x, held["scale"])  # noqa: E731
        return norm(x) if of == "a function" else jax.jit(norm)(x)

    first = f(X)
    held["scale"] = jnp.full(H, 2.0)
    assert apart(f(X), 2 * first) <= 1e-12


def test_a_call_inside_of_a_vmap_is_not_that_of_another_one():
    """A program traced under a `vmap` knows its size, even where no argument is mapped: it is not kept for another."""
    fused = jln.fuse(lambda x: layer(x) * lax.axis_size("i"))
    both = [jax.vmap(lambda _: fused(X), axis_name="i")(jnp.zeros(n))[0] for n in (2, 4)]
    assert apart(both[1], 2 * both[0]) <= 1e-12


def test_an_eager_call_is_traced_once():
    traces = []

    @jln.fuse
    def f(x, times):
        traces.append(times)
        return layer(x) * times

    for times in (2, 3, 2, 3):
        assert apart(f(X + times, times), layer(X + times) * times) <= 1e-11
    assert traces == [2, 3]


@pytest.mark.parametrize(("name", "value"), [("jax_threefry_partitionable", False), ("jax_random_seed_offset", 7)])
def test_an_eager_call_under_another_setting(name, value):
    fused = jln.fuse(lambda x: layer(x) + jax.random.normal(jax.random.key(0), x.shape))
    first, before = fused(X), getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        assert apart(fused(X), fused.__wrapped__(X)) <= 1e-11 < apart(fused(X), first)
    finally:
        jax.config.update(name, before)
    assert apart(fused(X), first) == 0


def test_an_eager_call_under_strict_ranks():
    fused = jln.fuse(lambda x: layer(x, jnp.ones(H)))
    fused(X)
    with jax.numpy_rank_promotion("raise"), pytest.raises(ValueError, match="rank"):
        fused(X)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("way", ["of old", "set"])
def test_an_eager_call_under_another_mesh(way):
    """The mesh of old is in JAX's own context; of a mesh that is set only the shape is."""

    @jln.fuse
    def f(x):
        y = layer(x)
        return lax.with_sharding_constraint(y, spec) if way == "of old" else jax.jit(jnp.sin, out_shardings=spec)(y)

    spec = jax.sharding.PartitionSpec("data")
    for devices in (jax.devices()[:2], jax.devices()[2:4]):
        mesh = jax.sharding.Mesh(devices, ("data",))
        with mesh if way == "of old" else jax.set_mesh(mesh):
            assert f(X).sharding.device_set == {*devices}


@pytest.mark.parametrize(
    ("most", "of", "looped"),
    [("MOST_EQUATIONS", 1000, True), ("MOST_EQUATIONS", 1000, False), ("MOST_PROGRAMS", 4, False)],
)
def test_programs_that_are_kept_are_bounded_by_what_they_hold(monkeypatch, most, of, looped):
    """Programs are counted, as each holds its static arguments, and equations, those of bodies too."""

    class Number:
        def __init__(self, value):
            self.value = value

    def block(x, a):
        for _ in range(100):
            x = jnp.sin(x) * a.value
        return layer(x)

    fused = jln.fuse(lambda x, a: lax.fori_loop(0, 2, lambda _, x: block(x, a), x) if looped else block(x, a))
    monkeypatch.setattr(transformation, most, of)
    given = []
    for i in range(9):
        fused(X, number := Number(1.0 + i))
        given.append(weakref.ref(number))
        del number
    gc.collect()
    assert 1 <= sum(a() is not None for a in given) <= 4

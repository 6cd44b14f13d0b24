"""Calls of what `jln.fuse` returns: arguments, results and their dtypes, and what is kept from call to call."""

import collections
import contextlib
import enum
import functools
import gc
import types
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jln
from jln._fuse import transformation
from proof import operators
from small_model import ALL, PARAMETERS, H, X, apart, model, norm

pytestmark = pytest.mark.usefixtures("promoted_ranks")


def test_symbolic_shapes_are_left_alone():
    from jax import export

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "jln.fuse found no norm")
        (b,) = export.symbolic_shape("b")
        x = jax.ShapeDtypeStruct((b, 4, H), X.dtype)
        exported = export.export(jax.jit(jln.fuse(model)))(PARAMETERS, x)
    assert apart(exported.call(PARAMETERS, X[:3]), model(PARAMETERS, X[:3])) <= 1e-11


def test_static_and_keyword_arguments_and_aux():
    @jln.fuse
    def loss(p, x, times, *, activation, names=("a", None), scale=1.0):
        made = sum(model(p, activation(x)) for _ in range(times)) * scale
        return made, {"x": x, names[0]: None, "times": times}

    arguments = {"activation": jnp.tanh, "scale": np.float64(2.0)}
    (value, aux), gradient = jax.value_and_grad(loss, has_aux=True)(PARAMETERS, X, 2, **arguments)
    (wanted, _), of = jax.value_and_grad(loss.__wrapped__, has_aux=True)(PARAMETERS, X, 2, **arguments)
    assert apart((value, gradient), (wanted, of)) <= 1e-11
    assert aux["a"] is None and int(aux["times"]) == 2


def test_static_arguments_that_differ_only_by_type_or_sign():
    fused = jln.fuse(
        lambda x, a: jnp.sum(norm(x, 1.0, 0.0)) * 0 + jnp.arctan2(jnp.asarray(a, jnp.float64), -1.0) + x.size
    )
    told = [float(fused(X, a)) for a in (0.0, -0.0, 0, False)]
    assert told == [float(fused.__wrapped__(X, a)) for a in (0.0, -0.0, 0, False)]


def test_static_complex_numbers_that_differ_only_by_sign():
    fused = jln.fuse(lambda x, a: jnp.sum(norm(x, 1.0, 0.0)) * 0 + np.arctan2(a.imag, a.real))
    told = [float(fused(X, a)) for a in (complex(-1, 0.0), complex(-1, -0.0))]
    assert told == pytest.approx([np.pi, -np.pi])


def test_a_numpy_scalar_that_an_outer_jit_holds_static():
    fused = jln.fuse(lambda x, times: sum(norm(x, 1.0, 0.0) for _ in range(times)))
    np.testing.assert_allclose(jax.jit(fused, static_argnums=1)(X, np.int64(2)), 2 * norm(X, 1.0, 0.0), rtol=1e-11)


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
    assert apart(got, wanted) <= 1e-11
    assert all(a.is_deleted() for a in jax.tree.leaves(given))


def test_donated_buffers_of_an_inner_jit():
    inner = jax.jit(model, donate_argnums=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers")
        made = jln.fuse(inner)(PARAMETERS, jnp.array(X))
    assert apart(made, model(PARAMETERS, X)) <= 1e-11


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
    assert max(apart(a, wanted) for a in got) <= 1e-11


def test_results_that_are_constants_are_arrays():
    fused = jln.fuse(lambda x: (norm(x, 1.0, 0.0), 3, np.float32(1), np.arange(3)))
    for made in (fused(X), fused(X)):
        assert [type(a) for a in made] == [type(jnp.ones(1))] * 4
        assert (int(made[1]), float(made[2]), made[3].tolist()) == (3, 1.0, [0, 1, 2])


class Kind(enum.Enum):
    SUM = 1


def test_results_that_are_no_numbers_are_handed_on():
    @jln.fuse
    def loss(x):
        return jnp.sum(norm(x, 1.0, 0.0) ** 2), {"name": "loss", "of": Kind.SUM, "x": x}

    wanted = loss.__wrapped__(X)[0]
    for value, aux in (loss(X), loss(X), jax.value_and_grad(loss, has_aux=True)(X)[0]):
        assert (aux["name"], aux["of"]) == ("loss", Kind.SUM)
        assert apart((value, aux["x"]), (wanted, X)) <= 1e-11


def test_a_result_that_may_hold_a_tracer_is_refused():
    """Eagerly it would be one of a trace that has ended, and the same object at each call."""

    @jln.fuse
    def a_loss(x):
        return jnp.sum(norm(x, 1.0, 0.0)), types.SimpleNamespace(x=x)

    with pytest.raises(TypeError, match=r"function a_loss at .*SimpleNamespace"):
        a_loss(X)


def test_errors_of_a_trace_name_the_users_function():
    @jln.fuse
    def a_loss(x):
        return norm(x, 1.0, 0.0) if jnp.sum(x) > 0 else x

    with pytest.raises(jax.errors.TracerBoolConversionError, match="the function a_loss at"):
        a_loss(X)


def test_a_derivative_in_forward_mode_says_what_to_do():
    with pytest.raises(TypeError, match=r"write jln.fuse\(loss, forward_mode=True\)"):
        jax.jvp(jln.fuse(lambda x: norm(x, 1.0, 0.0)), (X,), (X,))
    fused = jln.fuse(lambda x: norm(x, 1.0, 0.0), forward_mode=True)
    assert apart(*(jax.jvp(f, (X,), (np.cos(X),)) for f in (fused, fused.__wrapped__))) <= 1e-11


def test_without_float64():
    with jax.enable_x64(False):
        args = jax.tree.map(lambda a: a.astype(np.float32), (PARAMETERS, X))
        for given in (args, (PARAMETERS, X)):  # numpy's float64 becomes float32
            wanted, got = (jax.value_and_grad(f)(*given) for f in (model, jln.fuse(model)))
            assert {a.dtype for a in jax.tree.leaves(got)} == {np.dtype(np.float32)}
            assert apart(got, wanted) <= 1e-5
        assert operators(model, *args) == ALL


def test_strict_promotion_of_dtypes():
    with jax.numpy_dtype_promotion("strict"):
        assert operators(model, PARAMETERS, X) == ALL
        wanted, got = (jax.grad(f)(PARAMETERS, X) for f in (model, jln.fuse(model)))
    assert apart(got, wanted) <= 1e-11


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


def test_an_eager_call_is_traced_once():
    traces = []

    @jln.fuse
    def f(x, times):
        traces.append(times)
        return norm(x, 1.0, 0.0) * times

    for times in (2, 3, 2, 3):
        assert apart(f(X + times, times), norm(X + times, 1.0, 0.0) * times) <= 1e-11
    assert traces == [2, 3]


@contextlib.contextmanager
def setting(name, value):
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


@pytest.mark.parametrize(("name", "value"), [("jax_threefry_partitionable", False), ("jax_random_seed_offset", 7)])
def test_an_eager_call_under_another_setting(name, value):
    fused = jln.fuse(lambda x: norm(x, 1.0, 0.0) + jax.random.normal(jax.random.key(0), x.shape))
    first = fused(X)
    with setting(name, value):
        assert apart(fused(X), fused.__wrapped__(X)) <= 1e-11 < apart(fused(X), first)
    assert apart(fused(X), first) == 0


def test_an_eager_call_under_strict_ranks():
    fused = jln.fuse(lambda x: norm(x, jnp.ones(H), 0.0))
    fused(X)
    with jax.numpy_rank_promotion("raise"), pytest.raises(ValueError, match="rank"):
        fused(X)


@pytest.mark.parametrize("way", ["of old", "set"])
def test_an_eager_call_under_another_mesh(way):
    """The mesh of old is in JAX's own context; of a mesh that is set only the shape is."""

    @jln.fuse
    def f(x):
        y = norm(x, 1.0, 0.0)
        return jax.lax.with_sharding_constraint(y, spec) if way == "of old" else jax.jit(jnp.sin, out_shardings=spec)(y)

    spec = jax.sharding.PartitionSpec("data")
    for devices in (jax.devices()[:2], jax.devices()[2:4]):
        mesh = jax.sharding.Mesh(devices, ("data",))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            with mesh if way == "of old" else jax.set_mesh(mesh):
                assert f(X).sharding.device_set == {*devices}


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize(("most", "of"), [("MOST_EQUATIONS", 1000), ("MOST_PROGRAMS", 4)])
def test_programs_that_are_kept_are_bounded_by_what_they_hold(monkeypatch, looped, most, of):
    """Programs are counted, as each holds its static arguments, and equations, those of bodies too."""

    class Number:
        def __init__(self, value):
            self.value = value

    def block(x, a):
        for _ in range(100):
            x = jnp.sin(x) * a.value
        return norm(x, 1.0, 0.0)

    fused = jln.fuse(lambda x, a: lax.fori_loop(0, 2, lambda _, x: block(x, a), x) if looped else block(x, a))
    monkeypatch.setattr(transformation, most, of)
    given = []
    for i in range(9):
        fused(X, number := Number(1.0 + i))
        given.append(weakref.ref(number))
        del number
    gc.collect()
    assert 1 <= sum(a() is not None for a in given) <= 4

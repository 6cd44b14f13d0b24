"""jln.nnx against flax.nnx: every constructor argument, alone and in pairs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")
from flax import nnx, serialization

import jln
from jln import nnx as ours
from parity import Layer, assert_parity, described, named, normal, pairwise_parameters, randomised

SHAPE = (3, 4, 8)
MASK = np.random.default_rng(0).random(SHAPE) > 0.3


def doubled(args, dtype=None):
    """A promote_dtype of the user's: not a mere cast."""
    return tuple(None if a is None else 2 * a for a in nnx.nn.dtypes.promote_dtype(args, dtype=dtype))


ARGUMENTS = {
    "x": ["float32", "bfloat16", "float16"],
    "dtype": [None, "bfloat16", "float32", "float16"],
    "param_dtype": ["float32", "bfloat16"],
    "epsilon": [1e-6, 1e-2],
    "use_scale": [True, False],
    "use_bias": [True, False],
    "scale_init": [nnx.initializers.ones, nnx.initializers.normal(1.0)],
    "bias_init": [nnx.initializers.zeros, nnx.initializers.normal(1.0)],
    "reduction_axes": [-1, (1, 2), (-1, 0), 1],
    "feature_axes": [-1, (1, 2), (2,)],
    "axis_name": [None, "rows"],
    "axis_index_groups": [None, [[0, 1]]],
    "use_fast_variance": [True, False],
    "promote_dtype": [nnx.nn.dtypes.promote_dtype, doubled],
    "mask": [None, MASK],
}
ONLY_LAYER_NORM = ("use_bias", "bias_init")


# What the operators lack, and the axes for which they have a norm.
LACKING = ("mask", "axis_name", "reduction_axes", "feature_axes")
AXES = [(-1, -1), ((1, 2), -1), ((1, 2), (1, 2)), ((-1, 0), (2,))]


def cases(name, skipped=(), **more):
    skipped = (*skipped, *(ONLY_LAYER_NORM if name == "RMSNorm" else ()))
    return pairwise_parameters({k: v for k, v in ARGUMENTS.items() if k not in skipped} | more)


def layer(cls, mask=None, **options):
    """The parameters are a dict of arrays."""
    axes = options["feature_axes"]
    features = int(np.prod([SHAPE[a] for a in (axes if isinstance(axes, tuple) else (axes,))]))
    graphdef = None

    def init(x):
        nonlocal graphdef
        graphdef, state = nnx.split(cls(features, rngs=nnx.Rngs(0), **options))
        return nnx.to_pure_dict(state)

    def apply(variables, x):
        _, state = nnx.split(cls(features, rngs=nnx.Rngs(0), **options))
        nnx.replace_by_pure_dict(state, variables)
        model = nnx.merge(graphdef, state)
        call = functools.partial(model, mask=mask)
        if options["axis_name"] is None:
            return call(x)
        return jax.vmap(call, axis_name=options["axis_name"])(jnp.stack([x, 2 * x]))

    return Layer(init, apply)


def parity(name, case):
    case = dict(case)
    x = normal(1, SHAPE, case.pop("x"))
    case["promote_dtype"] = case.get("promote_dtype", nnx.nn.dtypes.promote_dtype)
    true = layer(getattr(nnx, name), **(case | {"dtype": None, "use_fast_variance": False, "param_dtype": "float64"}))
    true.init(x)
    return assert_parity(layer(getattr(nnx, name), **case), layer(getattr(ours, name), **case), true, x)


def by_the_operator(case):
    reduction, features = case["axes"]
    case = {k: v for k, v in case.items() if k != "axes"}
    return case | {"reduction_axes": reduction, "feature_axes": features, "mask": None, "axis_name": None}


@pytest.mark.parametrize("case", cases("LayerNorm", LACKING, axes=AXES))
def test_layer_norm_by_the_operator(case):
    assert parity("LayerNorm", by_the_operator(case)) == "kernel"


@pytest.mark.parametrize("case", cases("LayerNorm"))
def test_layer_norm(case):
    parity("LayerNorm", case)


@pytest.mark.parametrize("case", cases("RMSNorm", LACKING, axes=AXES))
def test_rms_norm_by_the_operator(case):
    assert parity("RMSNorm", by_the_operator(case)) == "kernel"


@pytest.mark.parametrize("case", cases("RMSNorm"))
def test_rms_norm(case):
    parity("RMSNorm", case)


def default(**changed):
    return {k: v[0] for k, v in ARGUMENTS.items()} | changed


# What makes the framework's own code run, one argument at a time; everything else is the operators'.
@pytest.mark.parametrize(
    ("changed", "path"),
    [
        ({}, "kernel"),
        ({"x": "bfloat16"}, "kernel"),
        ({"dtype": "bfloat16"}, "kernel"),
        ({"reduction_axes": (1, 2)}, "kernel"),
        ({"reduction_axes": (1, 2), "feature_axes": (1, 2)}, "kernel"),
        ({"axis_index_groups": [[0, 1]]}, "kernel"),
        ({"promote_dtype": doubled}, "kernel"),
        ({"mask": MASK}, "plain"),
        ({"axis_name": "rows"}, "plain"),
        ({"reduction_axes": 1}, "plain"),
        ({"reduction_axes": -1, "feature_axes": (1, 2)}, "plain"),
        ({"epsilon": -1e-6}, "plain"),
        ({"epsilon": jnp.float32(1e-3)}, "plain"),
        ({"x": "int32"}, "kernel"),  # Flax makes it float32 before anything else
        ({"x": "complex64"}, "plain"),
        ({"x": "float64", "dtype": "float32"}, "kernel"),  # likewise
        ({"x": "float32", "param_dtype": "float64"}, "kernel"),
    ],
    ids=lambda a: described(a) if isinstance(a, dict) else a,
)
@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_path(name, changed, path):
    case = default(**changed)
    x = jnp.ones(SHAPE, case.pop("x"))
    mask = case.pop("mask")
    for argument in ONLY_LAYER_NORM if name == "RMSNorm" else ():
        del case[argument]
    axes = case["feature_axes"]
    features = 32 if axes == (1, 2) else 8
    model = getattr(ours, name)(features, rngs=nnx.Rngs(0), **case)
    call = functools.partial(model, mask=mask)
    if case["axis_name"]:
        call, x = jax.vmap(call, axis_name="rows"), jnp.stack([x, x])
    (route,) = jln.explain(call, x)
    assert route.path == path, route
    assert route.layer == f"jln.nnx.{name}"


def test_promotion_comes_before_the_statistics():
    """With dtype=bfloat16 NNX rounds x first: here to one number a row, and to zero once its mean is gone."""
    x = 1024 + normal(0, (4, 8), "float32")
    for cls in (nnx.LayerNorm, ours.LayerNorm):
        y = cls(8, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))(x)
        assert np.max(np.abs(y)) <= 2  # few values are left, whole multiples of 8 apart
        distinct = np.unique(np.asarray(y, "float32"))
        assert len(distinct) <= 8


def test_promotion_of_the_users_own_is_applied():
    """x is not read as it is where promote_dtype may be more than a cast."""
    x = normal(0, SHAPE, "bfloat16")
    theirs, own = (c.LayerNorm(8, epsilon=0.5, promote_dtype=doubled, rngs=nnx.Rngs(0)) for c in (nnx, ours))
    assert [r.path for r in jln.explain(own, x)] == ["kernel"]
    np.testing.assert_allclose(own(x), theirs(x), rtol=1e-5, atol=1e-5)  # the doubled epsilon alone would be 10 % off


def test_a_parameter_shared_by_rows_has_its_gradient_summed_in_float32():
    """A scale [8] spread over normalised axes [512, 8]: each gradient is a sum of 512, rounded to 16 bits once."""
    x = normal(0, (2, 512, 8), "float16")
    norm = ours.LayerNorm(8, reduction_axes=(1, 2), param_dtype=jnp.float16, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(norm)
    dy = normal(1, x.shape, "float16")

    def loss(state):
        return jnp.sum(nnx.merge(graphdef, state)(x).astype("float32") * dy)

    got = np.asarray(nnx.to_pure_dict(jax.grad(loss)(state))["bias"], "float64")
    true = np.asarray(dy, "float64").sum((0, 1))
    assert np.all(np.abs(got - true) <= float(jnp.finfo("float16").eps) * np.abs(true))


def test_fast_variance_is_not_copied():
    """Flax's E[x^2] - E[x]^2 loses all digits where the mean is 3000 times the spread; ours is right, and says so."""
    x = 3000 + normal(0, (4, 256), "float32")
    wide = np.asarray(x, "float64")
    true = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-6)
    error = {c: np.max(np.abs(np.asarray(c(256, rngs=nnx.Rngs(0))(x)) - true)) for c in (nnx.LayerNorm, ours.LayerNorm)}
    assert error[nnx.LayerNorm] > 0.1
    # one float32 rounding of the mean of numbers around 3000, whose spread is 1
    assert error[ours.LayerNorm] <= 2 * 3000 * np.finfo("float32").eps


LINEAR = {
    "x": ["float32", "bfloat16"],
    "features": [16, (2, 3)],
    "dtype": [None, "bfloat16", "float32"],
    "param_dtype": ["float32", "bfloat16"],
    "epsilon": [1e-6, 1e-2],
    "use_scale": [True, False],
    "use_offset": [True, False],
    "use_bias": [True, False],
    "precision": [None, jax.lax.Precision.HIGHEST],
    "preferred_element_type": [None, "float32"],
    "kernel_init": [nnx.initializers.lecun_normal(), nnx.initializers.normal(1.0)],
}


class Pair(nnx.Module):
    """What LayerNormLinear stands for, in Flax's own layers."""

    def __init__(self, h, features, *, epsilon, use_scale, use_offset, dtype, param_dtype, rngs, **linear):
        both = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.norm = nnx.LayerNorm(h, epsilon=epsilon, use_scale=use_scale, use_bias=use_offset, **both)
        self.linear = (nnx.Linear if isinstance(features, int) else nnx.LinearGeneral)(h, features, **linear, **both)

    def __call__(self, x):
        return self.linear(self.norm(x))


def linear_layer(cls, features, **options):
    graphdef, state = nnx.split(cls(8, features, rngs=nnx.Rngs(0), **options))

    def apply(variables, x):
        _, state = nnx.split(cls(8, features, rngs=nnx.Rngs(0), **options))
        nnx.replace_by_pure_dict(state, variables)
        return nnx.merge(graphdef, state)(x)

    return Layer(lambda x: nnx.to_pure_dict(state), apply)


@pytest.mark.parametrize("case", pairwise_parameters(LINEAR))
def test_layer_norm_linear(case):
    case = dict(case)
    x = normal(1, SHAPE, case.pop("x"))
    double = case | {"dtype": None, "param_dtype": "float64", "preferred_element_type": None}
    path = assert_parity(
        linear_layer(Pair, **case), linear_layer(ours.LayerNormLinear, **case), linear_layer(Pair, **double), x
    )
    assert path in ("fused", "kernel")
    if case["preferred_element_type"] is None and case["dtype"] is None and case["param_dtype"] == "float32":
        assert path == "fused"


def test_linear_with_a_mask_or_a_product_of_its_own():
    x = normal(0, SHAPE, "float32")
    masked = ours.LayerNormLinear(8, 5, rngs=nnx.Rngs(0))
    rngs = nnx.Rngs(0)
    norm, linear = nnx.LayerNorm(8, rngs=rngs), nnx.Linear(8, 5, rngs=rngs)
    np.testing.assert_array_equal(masked(x, mask=MASK), linear(norm(x, mask=MASK)))

    def product(*args, **kwargs):
        return 2 * jax.lax.dot_general(*args, **kwargs)

    double = ours.LayerNormLinear(8, 5, dot_general=product, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(double(x), 2 * masked(x), rtol=1e-5, atol=1e-6)
    assert [r.path for r in jln.explain(double, x)] == ["kernel"]


BAD = {
    "features that x does not have": (lambda c: c(5, rngs=nnx.Rngs(0))(jnp.ones(SHAPE))),
    "an axis out of range": (lambda c: c(8, reduction_axes=7, rngs=nnx.Rngs(0))(jnp.ones(SHAPE))),
    "a feature axis out of range": (lambda c: c(8, feature_axes=7, rngs=nnx.Rngs(0))(jnp.ones(SHAPE))),
    "an integer dtype": (lambda c: c(8, dtype=jnp.int32, rngs=nnx.Rngs(0))(jnp.ones(SHAPE))),
    "an unbound axis_name": (lambda c: c(8, axis_name="nowhere", rngs=nnx.Rngs(0))(jnp.ones(SHAPE))),
    "no rngs": (lambda c: c(8)),
    "an unknown argument": (lambda c: c(8, scale=True, rngs=nnx.Rngs(0))),
    "a string": (lambda c: c(8, rngs=nnx.Rngs(0))("x")),
    "a mask of another shape": (lambda c: c(8, rngs=nnx.Rngs(0))(jnp.ones(SHAPE), mask=jnp.ones((5, 5), bool))),
}


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("bad", BAD)
def test_rejected_alike(name, bad):
    with pytest.raises(Exception) as theirs:
        BAD[bad](getattr(nnx, name))
    with pytest.raises(type(theirs.value)):
        BAD[bad](getattr(ours, name))


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_checkpoints_go_both_ways(name, tmp_path):
    checkpoint = pytest.importorskip("orbax.checkpoint")
    with checkpoint.StandardCheckpointer() as checkpointer:
        for i, (writer, reader) in enumerate([(nnx, ours), (ours, nnx)]):
            written = nnx.state(getattr(writer, name)(8, rngs=nnx.Rngs(0)))
            nnx.replace_by_pure_dict(written, randomised(nnx.to_pure_dict(written)))
            checkpointer.save(tmp_path / f"{i}", written)
            checkpointer.wait_until_finished()
            template = nnx.state(getattr(reader, name)(8, rngs=nnx.Rngs(1)))
            read = checkpointer.restore(tmp_path / f"{i}", template)
            assert named(nnx.to_pure_dict(read)).keys() == named(nnx.to_pure_dict(written)).keys()
            jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(read), nnx.to_pure_dict(written))
            packed = serialization.msgpack_serialize(nnx.to_pure_dict(written))
            jax.tree.map(
                np.testing.assert_array_equal, serialization.msgpack_restore(packed), nnx.to_pure_dict(written)
            )


def test_metadata_is_flaxs():
    with jax.set_mesh(jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))):
        made = [
            c.LayerNorm(8, rngs=nnx.Rngs(0), scale_metadata={"out_sharding": ("model",)}, bias_metadata={"mine": 1})
            for c in (nnx, ours)
        ]
    for parameter in ("scale", "bias"):
        theirs, own = (getattr(m, parameter).get_metadata() for m in made)
        assert theirs == own


def test_axes_that_are_numpy_integers():
    x = normal(0, (2, 8), "float32")
    axes = {"reduction_axes": np.int64(-1), "feature_axes": np.int64(1)}
    norm = ours.LayerNorm(8, **axes, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(norm(x), ours.LayerNorm(8, rngs=nnx.Rngs(0))(x))
    assert [route.path for route in jln.explain(norm, x)] == ["kernel"]


def numbers(model):
    """All of a model's state but its random keys, copied."""
    leaves = jax.tree.leaves(nnx.to_pure_dict(nnx.state(model)))
    return [np.array(a) for a in leaves if not jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key)]


@pytest.mark.parametrize("make", [lambda r: nnx.Dropout(0.5, rngs=r), lambda r: nnx.BatchNorm(8, rngs=r)])
def test_explain_of_a_model_with_state(make):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.norm = ours.LayerNorm(8, rngs=rngs)
            self.stateful = make(rngs)

        def __call__(self, x):
            return self.encode(x)

        def encode(self, x):
            return self.stateful(self.norm(x))

    model = Model(nnx.Rngs(0))
    before = numbers(model)
    x = jnp.ones((2, 8), "float32")
    for function in (model, model.__call__, model.encode):
        assert [route.path for route in jln.explain(function, x)] == ["kernel"]
    jax.tree.map(np.testing.assert_array_equal, numbers(model), before)
    assert model(x).shape == x.shape


def test_put_in_place_of_flaxs(monkeypatch):
    """`nnx.LayerNorm = jln.nnx.LayerNorm` converts a library that cannot be edited; the plain path is still Flax's."""
    x = normal(0, SHAPE, "float32")
    wanted = nnx.LayerNorm(8, rngs=nnx.Rngs(0))(x, mask=MASK)
    monkeypatch.setattr(nnx, "LayerNorm", ours.LayerNorm)
    norm = nnx.LayerNorm(8, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(norm(x, mask=MASK), wanted)
    assert [r.path for r in jln.explain(norm, x)] == ["kernel"]


def test_inside_of_transformations():
    """nnx.jit, nnx.remat, nnx.value_and_grad and nnx.scan over layers see a module like any other."""
    x = normal(0, (4, 8), "float32")

    def model(cls):
        @nnx.vmap(in_axes=0, out_axes=0)
        def create(rngs):
            return cls(8, rngs=rngs)

        layers = create(nnx.Rngs(0).split(3))

        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(layer, x):
            return jnp.sin(nnx.remat(lambda layer, x: layer(x))(layer, x))

        return nnx.jit(nnx.value_and_grad(lambda layers: jnp.sum(run(layers, x) ** 2)))(layers)

    (theirs, their_gradients), (own, own_gradients) = model(nnx.LayerNorm), model(ours.LayerNorm)
    np.testing.assert_allclose(own, theirs, rtol=1e-5)
    a, b = (nnx.to_pure_dict(g) for g in (own_gradients, their_gradients))
    # three layers of float32, each gradient the sum of 4 rows
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), a, b)

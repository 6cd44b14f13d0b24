"""jln.linen against flax.linen: every field, alone and in pairs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")
from flax import linen as nn
from flax import serialization

import jln
from jln import linen as ours
from parity import Layer, assert_parity, described, normal, pairwise_parameters, randomised

SHAPE = (3, 4, 8)
MASK = np.random.default_rng(0).random(SHAPE) > 0.3

ARGUMENTS = {
    "x": ["float32", "bfloat16", "float16"],
    "dtype": [None, "bfloat16", "float32", "float16"],
    "param_dtype": ["float32", "bfloat16"],
    "epsilon": [1e-6, 1e-2],
    "use_scale": [True, False],
    "use_bias": [True, False],
    "scale_init": [nn.initializers.ones, nn.initializers.normal(1.0)],
    "bias_init": [nn.initializers.zeros, nn.initializers.normal(1.0)],
    "reduction_axes": [-1, (1, 2), (-1, 0), 1],
    "feature_axes": [-1, (1, 2), (2,)],
    "axis_name": [None, "rows"],
    "axis_index_groups": [None, [[0, 1]]],
    "use_fast_variance": [True, False],
    "force_float32_reductions": [True, False],
    "mask": [None, MASK],
}
ONLY_LAYER_NORM = ("use_bias", "bias_init")


# What the operators lack, and the axes for which they have a norm.
LACKING = ("force_float32_reductions", "mask", "axis_name", "reduction_axes", "feature_axes")
AXES = [(-1, -1), ((1, 2), -1), ((1, 2), (1, 2)), ((-1, 0), (2,))]


def cases(name, skipped=(), **more):
    skipped = (*skipped, *(ONLY_LAYER_NORM if name == "RMSNorm" else ()))
    return pairwise_parameters({k: v for k, v in ARGUMENTS.items() if k not in skipped} | more)


def layer(cls, mask=None, **options):
    module = cls(**options)

    def over_rows(call):
        """Where the statistics are averaged over a mapped axis, x and 2 x lie along it."""
        if not options.get("axis_name"):
            return call
        return lambda x: jax.vmap(call, axis_name=options["axis_name"], out_axes=(0, None))(jnp.stack([x, 2 * x]))

    def init(x):
        return over_rows(lambda x: module.init_with_output(jax.random.key(0), x, mask=mask))(x)[1]

    def apply(variables, x):
        return over_rows(lambda x: module.apply(variables, x, mask=mask, mutable=["intermediates"]))(x)[0]

    return Layer(init, apply)


def parity(name, case):
    case = dict(case)
    x = normal(1, SHAPE, case.pop("x"))
    double = {"dtype": None, "use_fast_variance": False, "param_dtype": "float64", "force_float32_reductions": True}
    return assert_parity(
        layer(getattr(nn, name), **case),
        layer(getattr(ours, name), **case),
        layer(getattr(nn, name), **(case | double)),
        x,
    )


def by_the_operator(case):
    reduction, features = case["axes"]
    case = {k: v for k, v in case.items() if k != "axes"}
    return case | {
        "reduction_axes": reduction,
        "feature_axes": features,
        "mask": None,
        "axis_name": None,
        "force_float32_reductions": True,
    }


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


# What makes the framework's own code run, one field at a time; everything else is the operators'.
@pytest.mark.parametrize(
    ("changed", "path"),
    [
        ({}, "kernel"),
        ({"x": "bfloat16"}, "kernel"),
        ({"dtype": "bfloat16"}, "kernel"),
        ({"reduction_axes": (1, 2)}, "kernel"),
        ({"reduction_axes": (1, 2), "feature_axes": (1, 2)}, "kernel"),
        ({"axis_index_groups": [[0, 1]]}, "kernel"),
        ({"mask": MASK}, "plain"),
        ({"axis_name": "rows"}, "plain"),
        ({"force_float32_reductions": False}, "plain"),
        ({"reduction_axes": 1}, "plain"),
        ({"reduction_axes": -1, "feature_axes": (1, 2)}, "plain"),
        ({"epsilon": -1e-6}, "plain"),
        ({"x": "int32"}, "plain"),
        ({"x": "complex64"}, "plain"),
        ({"x": "float64", "dtype": "float32"}, "plain"),
        ({"param_dtype": "float64"}, "plain"),
        ({"x": "float64", "param_dtype": "float64"}, "kernel"),
    ],
    ids=lambda a: described(a) if isinstance(a, dict) else a,
)
@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_path(name, changed, path):
    case = {k: v[0] for k, v in ARGUMENTS.items()} | changed
    x = jnp.ones(SHAPE, case.pop("x"))
    mask = case.pop("mask")
    for argument in ONLY_LAYER_NORM if name == "RMSNorm" else ():
        del case[argument]
    module = getattr(ours, name)(**case)
    call = functools.partial(module.init, jax.random.key(0), mask=mask)
    if case["axis_name"]:
        call, x = jax.vmap(call, axis_name="rows"), jnp.stack([x, x])
    (route,) = jln.explain(call, x)
    assert route.path == path, route
    assert route.layer == f"jln.linen.{name}"


def test_statistics_come_from_the_input_as_it_is():
    """With dtype=bfloat16 Linen rounds the result and not x: numbers of spread 1 around 1024 keep their digits."""
    x = 1024 + normal(0, (4, 64), "float32")
    wide = np.asarray(x, "float64")
    true = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-6)
    y, _ = ours.LayerNorm(dtype=jnp.bfloat16).init_with_output(jax.random.key(0), x)
    assert y.dtype == jnp.bfloat16
    # the result's rounding, and one float32 rounding of the mean
    allowed = float(jnp.finfo(jnp.bfloat16).eps) * np.abs(true) + 2 * 1024 * np.finfo("float32").eps
    assert np.all(np.abs(np.asarray(y, "float64") - true) <= allowed)


def test_bfloat16_input_and_float32_parameters_give_float32():
    x = normal(0, SHAPE, "bfloat16")
    y, variables = ours.LayerNorm().init_with_output(jax.random.key(0), x)
    assert y.dtype == jnp.float32
    jaxpr = str(jax.make_jaxpr(ours.LayerNorm().apply)(variables, x))
    assert "jln_norm_forward" in jaxpr
    # x itself goes into the operator: no float32 copy of it is made
    assert "convert_element_type" not in jaxpr.split("jln_norm_forward")[0]


def test_axes_that_are_numpy_integers():
    x = normal(0, (2, 8), "float32")
    norm = ours.LayerNorm(reduction_axes=np.int64(-1), feature_axes=np.int64(1))
    own, theirs = (module.init_with_output(jax.random.key(0), x)[0] for module in (norm, ours.LayerNorm()))
    np.testing.assert_array_equal(own, theirs)
    assert [route.path for route in jln.explain(norm, x)] == ["kernel"]


def test_parameters_of_another_dtype_than_declared():
    """Linen checks a loaded parameter's shape, not its dtype; the result follows what is there."""
    x = normal(0, SHAPE, "bfloat16")
    variables = {"params": {"scale": jnp.ones(8, "bfloat16"), "bias": jnp.zeros(8, "bfloat16")}}
    assert ours.LayerNorm().apply(variables, x).dtype == nn.LayerNorm().apply(variables, x).dtype == jnp.bfloat16


DENSE = {
    "x": ["float32", "bfloat16"],
    "features": [16, (2, 3), (5,)],
    "dtype": [None, "bfloat16", "float32"],
    "param_dtype": ["float32", "bfloat16"],
    "epsilon": [1e-6, 1e-2],
    "use_scale": [True, False],
    "use_offset": [True, False],
    "use_bias": [True, False],
    "precision": [None, jax.lax.Precision.HIGHEST],
    "dot_general": [None, jax.lax.dot_general],
    "kernel_init": [nn.initializers.lecun_normal(), nn.initializers.normal(1.0)],
}


class Pair(nn.Module):
    """What LayerNormDense stands for, in Flax's own layers."""

    features: object
    dtype: object
    param_dtype: object
    epsilon: float
    use_scale: bool
    use_offset: bool
    options: dict

    @nn.compact
    def __call__(self, x):
        both = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        norm = nn.LayerNorm(self.epsilon, use_scale=self.use_scale, use_bias=self.use_offset, name="norm", **both)
        return nn.DenseGeneral(self.features, name="dense", **self.options, **both)(norm(x))


def pair(features, dtype, param_dtype, epsilon, use_scale, use_offset, **options):
    module = Pair(features, dtype, param_dtype, epsilon, use_scale, use_offset, options)
    return Layer(lambda x: module.init(jax.random.key(0), x), module.apply)


@pytest.mark.parametrize("case", pairwise_parameters(DENSE))
def test_layer_norm_dense(case):
    case = dict(case)
    x = normal(1, SHAPE, case.pop("x"))
    module = ours.LayerNormDense(**case)
    path = assert_parity(
        pair(**case),
        Layer(lambda x: module.init(jax.random.key(0), x), module.apply),
        pair(**(case | {"dtype": None, "param_dtype": "float64"})),
        x,
    )
    if case["dot_general"] is None and case["dtype"] is None and case["param_dtype"] == "float32":
        assert path == "fused"
    assert path in ("fused", "kernel")


def test_dense_of_an_int_has_the_values_of_flaxs_dense():
    x = normal(0, SHAPE, "float32")

    class Plain(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(5, name="dense")(nn.LayerNorm(name="norm")(x))

    theirs, own = (m.init(jax.random.key(3), x) for m in (Plain(), ours.LayerNormDense(5)))
    jax.tree.map(np.testing.assert_array_equal, theirs, own)
    np.testing.assert_array_equal(
        ours.LayerNormDense(5).apply(own, x, mask=MASK),
        nn.Dense(5).apply(
            {"params": own["params"]["dense"]}, nn.LayerNorm().apply({"params": own["params"]["norm"]}, x, mask=MASK)
        ),
    )


@pytest.mark.parametrize("cls", [ours.LayerNormDense, ours.RMSNormDense])
def test_what_flax_shows_of_a_pair_are_arrays(cls):
    """Captured intermediates, interceptors and `tabulate` see no norm that is not computed yet."""
    x = normal(0, (3, 8), "float32")
    module = cls((2, 3))
    calls = []

    def interceptor(call, args, kwargs, context):
        y = call(*args, **kwargs)
        calls.append((context.module.name, context.method_name))
        assert all(isinstance(a, jax.Array) for a in (*args, y))
        return y

    with nn.intercept_methods(interceptor):
        variables = module.init(jax.random.key(0), x)
        assert calls == [("norm", "__call__"), ("dense", "__call__"), (None, "__call__")]
        calls.clear()
        y, captured = module.apply(variables, x, capture_intermediates=True)
        assert calls == [(None, "__call__")]
        cls((2, 3), dot_general=jax.lax.dot_general).apply(variables, x)  # apart: as in Flax
        assert calls[1:] == [("norm", "__call__"), ("dense", "__call__"), (None, "__call__")]
    assert captured == {"intermediates": {"__call__": (y,)}}
    table = module.tabulate(jax.random.key(0), x, console_kwargs={"width": 200})
    assert all(name in table for name in (cls.__name__, "DenseGeneral", "[3,2,3]"))


BAD = {
    "an axis out of range": (lambda c: c(reduction_axes=7), jnp.ones(SHAPE)),
    "a feature axis out of range": (lambda c: c(feature_axes=7), jnp.ones(SHAPE)),
    "an integer dtype": (lambda c: c(dtype=jnp.int32), jnp.ones(SHAPE)),
    "an unbound axis_name": (lambda c: c(axis_name="nowhere"), jnp.ones(SHAPE)),
    "an unknown field": (lambda c: c(scale=True), jnp.ones(SHAPE)),
    "a list": (lambda c: c(), [1.0, 2.0]),
    "a string": (lambda c: c(), "x"),
    "a scalar": (lambda c: c(), jnp.ones(())),
}


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("bad", BAD)
def test_rejected_alike(name, bad):
    make, x = BAD[bad]
    with pytest.raises(Exception) as theirs:
        make(getattr(nn, name)).init_with_output(jax.random.key(0), x)
    with pytest.raises(type(theirs.value)):
        make(getattr(ours, name)).init_with_output(jax.random.key(0), x)


@pytest.mark.parametrize(
    "params", [{"scale": jnp.ones(5), "bias": jnp.ones(5)}, {"bias": jnp.ones(8)}, {}], ids=described
)
def test_wrong_or_missing_parameters(params):
    with pytest.raises(Exception) as theirs:
        nn.LayerNorm().apply({"params": params}, jnp.ones(SHAPE))
    with pytest.raises(type(theirs.value)):
        ours.LayerNorm().apply({"params": params}, jnp.ones(SHAPE))


@pytest.mark.parametrize(
    "params",
    [{"kernel": jnp.ones((8, 4)), "bias": jnp.ones(4)}, {"kernel": jnp.ones((8, 5)), "bias": jnp.ones(4)},
     {"kernel": jnp.ones((7, 5)), "bias": jnp.ones(5)}, {"bias": jnp.ones(5)}, {"kernel": jnp.ones((8, 5))}],
    ids=lambda params: " ".join(f"{k}{list(a.shape)}" for k, a in params.items()),
)  # fmt: skip
def test_wrong_or_missing_parameters_of_the_dense(params):
    with pytest.raises(Exception) as theirs:
        nn.DenseGeneral(5).apply({"params": params}, jnp.ones(SHAPE))
    norm = {"scale": jnp.ones(8), "bias": jnp.ones(8)}
    with pytest.raises(type(theirs.value)):
        ours.LayerNormDense(5).apply({"params": {"norm": norm, "dense": params}}, jnp.ones(SHAPE))


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_checkpoints_go_both_ways(name, tmp_path):
    x = jnp.ones(SHAPE)
    checkpoint = pytest.importorskip("orbax.checkpoint")
    with checkpoint.StandardCheckpointer() as checkpointer:
        for i, (writer, reader) in enumerate([(nn, ours), (ours, nn)]):
            written = randomised(getattr(writer, name)().init(jax.random.key(0), x))
            template = getattr(reader, name)().init(jax.random.key(1), x)
            checkpointer.save(tmp_path / f"{i}", written)
            checkpointer.wait_until_finished()
            read = checkpointer.restore(tmp_path / f"{i}", template)
            jax.tree.map(np.testing.assert_array_equal, read, written)
            read = serialization.from_bytes(template, serialization.to_bytes(written))
            jax.tree.map(np.testing.assert_array_equal, read, written)


def test_automatic_names_metadata_and_lifted_transformations():
    """A model that takes its norm from either library: remat, scan over layers, partitioning boxes."""
    x = normal(0, (4, 8), "float32")

    class Block(nn.Module):
        library: object

        @nn.compact
        def __call__(self, x, _):
            boxed = nn.with_partitioning(nn.initializers.ones, ("model",))
            x = self.library.LayerNorm(scale_init=boxed)(x)
            return self.library.RMSNorm()(jnp.sin(x)), None

    class Model(nn.Module):
        library: object

        @nn.compact
        def __call__(self, x):
            layers = nn.scan(
                nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )  # fmt: skip
            return layers(self.library)(x, None)[0]

    theirs, own = (Model(library).init(jax.random.key(0), x) for library in (nn, ours))
    assert jax.tree.structure(theirs) == jax.tree.structure(own)
    jax.tree.map(np.testing.assert_array_equal, theirs, own)

    def gradients(library):
        return jax.jit(jax.grad(lambda v: jnp.sum(jnp.cos(Model(library).apply(v, x)))))(theirs)

    # six layers of float32, each gradient the sum of 4 rows
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), gradients(ours), gradients(nn))

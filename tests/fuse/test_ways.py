"""The ways in which people write norms and the sums in front of them: each is found, and nothing changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from proof import Case, H, difference, listed, normal, operators

CASES: dict[str, Case] = {}
case = listed(CASES)
pytestmark = pytest.mark.usefixtures("promoted_ranks")
# [2, 3, H]: more rows than one, of two axes. Parameters, an upward and a downward matrix.
X, R, Z = normal(2, 3, H), normal(2, 3, H) * 0.7 + 0.1, normal(2, 3, H) * 0.5 - 0.2
S, B, W, V, C = normal(H), normal(H) * 0.3, normal(H, 4), normal(4, H), normal(4)
EPS = 1e-6


def mean(x):
    return jnp.mean(x, -1, keepdims=True)


def rms(x, s=None):
    y = x * lax.rsqrt(mean(x * x) + EPS)
    return y if s is None else y * s


def layer(x, s, b):
    d = x - mean(x)
    return d * lax.rsqrt(jnp.var(x, -1, keepdims=True) + EPS) * s + b


# Frameworks. Each function takes x and draws the layer's own parameters.


def _linen(cls, **options):
    import flax.linen as nn

    norm = getattr(nn, cls)(**options)
    return lambda p, x: norm.apply(p, x), jax.device_get(norm.init(jax.random.key(0), jnp.asarray(X)))


def _nnx(cls, **options):
    from flax import nnx

    graph, state = nnx.split(getattr(nnx, cls)(H, rngs=nnx.Rngs(0), **options))
    return lambda p, x: nnx.merge(graph, p)(x), state


def _haiku(cls, **options):
    import haiku as hk

    norm = hk.without_apply_rng(hk.transform(lambda x: getattr(hk, cls)(**options)(x)))
    return norm.apply, norm.init(jax.random.key(0), X)


def _equinox(cls, **options):
    import equinox as eqx

    norm = getattr(eqx.nn, cls)(H, **options)
    arrays, rest = eqx.partition(norm, eqx.is_array)
    return lambda p, x: jax.vmap(jax.vmap(eqx.combine(p, rest)))(x), arrays


FRAMEWORKS = {
    "linen LayerNorm": (_linen, "LayerNorm", {}),
    "linen LayerNorm, slow variance": (_linen, "LayerNorm", {"use_fast_variance": False}),
    "linen LayerNorm without parameters": (_linen, "LayerNorm", {"use_scale": False, "use_bias": False}),
    "linen RMSNorm": (_linen, "RMSNorm", {}),
    "linen RMSNorm, slow variance": (_linen, "RMSNorm", {"use_fast_variance": False}),
    "nnx LayerNorm": (_nnx, "LayerNorm", {}),
    "nnx LayerNorm, slow variance": (_nnx, "LayerNorm", {"use_fast_variance": False}),
    "nnx RMSNorm": (_nnx, "RMSNorm", {}),
    "haiku LayerNorm": (_haiku, "LayerNorm", {"axis": -1, "create_scale": True, "create_offset": True}),
    "haiku RMSNorm": (_haiku, "RMSNorm", {"axis": -1}),
    "equinox LayerNorm": (_equinox, "LayerNorm", {}),
    "equinox RMSNorm": (_equinox, "RMSNorm", {}),
}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_frameworks_layer_is_found(name):
    of, cls, options = FRAMEWORKS[name]
    function, parameters = of(cls, **options)
    # A dtype of its own: frameworks compute in float32 what comes as less, in float64 what comes as that.
    parameters = jax.tree.map(lambda a: np.asarray(a, np.float64), parameters)
    expected = {"layer_norm" if "Layer" in cls else "rms_norm": 1}
    # equinox's LayerNorm differs by the parameters' float32, nothing else.
    assert operators(function, parameters, X) == expected
    assert difference(function, parameters, X) <= 1e-12


# Formulas.


@case(X, S, finds="rms_norm")
def t5(x, s):
    variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return s * (x / jnp.sqrt(variance + EPS))


@case(X, S, finds="rms_norm")
def gemma(x, s):
    variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    x = jnp.asarray(x * jnp.reciprocal(jnp.sqrt(variance + EPS)))
    return x * (1 + jnp.expand_dims(s, axis=range(len(x.shape) - 1)))


@case(X, S, B, finds="layer_norm")
def keras(x, gamma, beta):
    """Keras 3: statistics by ops.moments, and one product and one sum per element."""
    m = jnp.mean(x, -1, keepdims=True)
    v = jnp.mean(jnp.square(x), -1, keepdims=True) - jnp.square(m)
    inv = lax.rsqrt(v + 1e-3)
    gamma, beta = jnp.reshape(gamma, (1, 1, H)), jnp.reshape(beta, (1, 1, H))
    inv = inv * gamma
    return x * inv + (beta - m * inv)


@case(X, S, finds="rms_norm")
def keras_rms(x, gamma):
    rrms = lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-3)
    return (x * rrms) * jnp.reshape(gamma, (1, 1, H))


@case(X, S, B, finds="layer_norm")
def penzai(x, s, b):
    """Penzai: each position by vmap, standardised, then scaled and shifted by name."""

    def standardised(row):
        m, v = jnp.mean(row), jnp.var(row)
        return (row - m) * lax.rsqrt(v + EPS)

    y = jax.vmap(jax.vmap(standardised))(x)
    y = jax.vmap(lambda column, s: column * s, (-1, 0), -1)(y, s)
    return jax.vmap(lambda column, b: column + b, (-1, 0), -1)(y, b)


@case(X, S, finds="rms_norm")
def penzai_rms(x, s):
    y = jax.vmap(jax.vmap(lambda row: row * lax.rsqrt(jnp.mean(jnp.square(row)) + EPS)))(x)
    return jax.vmap(lambda column, s: column * s, (-1, 0), -1)(y, s)


@case(X, S, finds="rms_norm")
def llama(x, s):
    return s * (x * jnp.power(jnp.mean(x**2, -1, keepdims=True) + EPS, -0.5))


@case(X, finds="layer_norm")
def standardize(x):
    return jax.nn.standardize(x, epsilon=1e-5)


@case(X, finds="layer_norm")
def variance_with_ddof_0(x):
    return (x - mean(x)) / jnp.sqrt(jnp.var(x, axis=-1, ddof=0, keepdims=True) + EPS)


@case(X, finds="layer_norm")
def variance_of_the_centred(x):
    d = x - mean(x)
    return d / jnp.sqrt(jnp.var(d, axis=-1, keepdims=True) + EPS)


@case(X, finds="layer_norm")
def mean_of_squares_minus_squared_mean(x):
    return (x - mean(x)) * lax.rsqrt(mean(x * x) - mean(x) ** 2 + EPS)


@case(X, finds="rms_norm")
def power_minus_a_half(x):
    return x * (mean(x**2) + EPS) ** -0.5


@case(X, finds="rms_norm")
def exponential_of_half_a_logarithm(x):
    return x * jnp.exp(-0.5 * jnp.log(mean(x**2) + EPS))


@case(X, finds="rms_norm")
def divided_by_a_root(x):
    return x / (mean(x**2) + EPS) ** 0.5


@case(X, finds="rms_norm")
def an_einsum_with_itself(x):
    return x * lax.rsqrt(jnp.einsum("bsh,bsh->bs", x, x)[..., None] / H + EPS)


@case(X, finds="rms_norm")
def vecdot(x):
    return x * lax.rsqrt(jnp.vecdot(x, x)[..., None] / H + EPS)


@case(X, finds="rms_norm")
def length(x):
    return x / jnp.sqrt(jnp.linalg.norm(x, axis=-1, keepdims=True) ** 2 / H + EPS)


@case(X, finds="rms_norm")
def length_without_epsilon(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True) * H**0.5


@case(X, finds="rms_norm")
def a_dot_general(x):
    return x * lax.rsqrt(lax.dot_general(x, x, (((2,), (2,)), ((0, 1), (0, 1))))[..., None] / H + EPS)


@case(X, finds="rms_norm")
def rows_without_kept_axes(x):
    return x * lax.rsqrt(jnp.mean(x * x, -1) + EPS)[:, :, None]


@case(X, finds="rms_norm")
def rows_by_vmap(x):
    return jax.vmap(jax.vmap(lambda row: row / jnp.sqrt(row @ row / H + EPS)))(x)


@case(X, S, finds="rms_norm")
def a_sum_times_one_over_the_features(x, s):
    return x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) * (1 / H) + EPS) * s


@case(normal(4, 768, dtype=np.float32), finds="rms_norm")
def one_over_features_that_float32_rounds(x):
    return x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) * (1 / 768) + EPS)


@case(normal(4, 768, dtype=np.float32), finds="rms_norm")
def a_root_of_the_features_that_float32_rounds(x):
    return x / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True)) * 768**0.5


@case(X, finds="layer_norm")
def an_expression_that_is_written_twice(x):
    return (x - jnp.mean(x, -1, keepdims=True)) / jnp.sqrt(
        jnp.mean((x - jnp.mean(x, -1, keepdims=True)) ** 2, -1, keepdims=True) + EPS
    )


@case(X, S, finds="rms_norm")
def a_product_that_is_written_twice(x, s):
    return (x * s) * lax.rsqrt(mean((x * s) ** 2) + EPS)


# Casts.


@case(X.astype(np.float32), S.astype(np.float32), finds="rms_norm")
def an_upcast(x, s):
    wide = x.astype(jnp.float64)
    return (wide * lax.rsqrt(mean(wide * wide) + EPS) * s).astype(x.dtype)


@case(X.astype(np.float32), finds="layer_norm")
def float32_whose_norm_is_computed_in_float64(x):
    wide = x.astype(jnp.float64)
    return (wide - mean(wide)) * lax.rsqrt(jnp.var(wide, -1, keepdims=True) + EPS)


@case(X.astype(jnp.bfloat16), S.astype(np.float32), finds="rms_norm")
def bfloat16_cast_back_before_the_scale(x, s):
    wide = x.astype(jnp.float32)
    return s.astype(x.dtype) * (wide * lax.rsqrt(mean(wide * wide) + EPS)).astype(x.dtype)


@case(X.astype(jnp.bfloat16), S.astype(np.float32), W.astype(jnp.bfloat16), finds="rms_norm")
def a_float32_result_that_every_product_casts_back(x, s, w):
    wide = x.astype(jnp.float32)
    y = wide * lax.rsqrt(mean(wide * wide) + EPS) * s
    return y.astype(w.dtype) @ w, y.astype(w.dtype) @ (w + 1)


# Axes.


@case(normal(2, H, 5), normal(H), normal(H), finds="layer_norm")
def channels_first(x, s, b):
    m, v = jnp.mean(x, 1, keepdims=True), jnp.var(x, 1, keepdims=True)
    return (x - m) * lax.rsqrt(v + EPS) * s[:, None] + b[:, None]


@case(normal(2, 16, 4, 8), finds="rms_norm")
def several_axes(x):
    return x * lax.rsqrt(jnp.mean(x * x, (1, 2, 3), keepdims=True) + EPS)


@case(normal(2, 16, 3, 32), normal(16, 1, 32), finds="rms_norm")
def axes_apart(x, s):
    return x * lax.rsqrt(jnp.mean(x * x, (1, 3), keepdims=True) + EPS) * s


@case(normal(3, 4 * H), normal(4, H), finds="rms_norm")
def groups(x, s):
    g = x.reshape(3, 4, H)
    return (g * lax.rsqrt(jnp.mean(g * g, -1, keepdims=True) + EPS) * s).reshape(3, 4 * H)


@case(X, normal(2, 1, H), normal(2, 1, H) + 0.1, finds="layer_norm")
def adaln(x, scale, shift):
    y = (x - mean(x)) * lax.rsqrt(jnp.var(x, -1, keepdims=True) + EPS)
    return y * (1 + scale) + shift


@case(X, normal(2, H), normal(2, H) + 0.1, finds="layer_norm")
def adaln_of_two_axes(x, scale, shift):
    y = (x - mean(x)) * lax.rsqrt(jnp.var(x, -1, keepdims=True) + EPS)
    return y * (1 + scale[:, None, :]) + shift[:, None, :]


# Gates.


@case(X, Z, S, finds="rms_norm_gated")
def a_silu_gate_behind(x, z, s):
    return rms(x, s) * jax.nn.silu(z)


@case(X, Z, S, finds="rms_norm_gated")
def a_silu_gate_before_the_scale(x, z, s):
    return rms(x) * (z * jax.nn.sigmoid(z)) * s


@case(X, Z, S, finds="rms_norm_gated")
def a_silu_gate_written_first(x, z, s):
    return jax.nn.silu(z) * (s * rms(x))


@case(X, Z, S, finds="rms_norm")
def a_silu_gate_behind_a_norm_that_others_read(x, z, s):
    y = rms(x, s)
    return jnp.concatenate([y * jax.nn.silu(z), y])


@case(X, Z, S, finds="rms_norm")
def a_silu_gate_in_front(x, z, s):
    return rms(x * jax.nn.silu(z), s)


@case(X, Z, S, B, finds="layer_norm")
def a_layer_norm_with_a_silu_gate(x, z, s, b):
    return layer(x, s, b) * jax.nn.silu(z)


# Sums in front.


@case(X, R, S, finds="add_rms_norm")
def a_sum(x, r, s):
    total = r + x
    return rms(total, s), total


@case(X, V, R, B, W, finds="add_layer_norm")
def a_linears_bias_added_last(u, k, r, b, w):
    total = r + (u @ w @ k + b)
    return layer(total, b, b) @ w, total


@case(X, V, R, B, W, finds="add_layer_norm")
def a_linears_bias_behind_the_sum(u, k, r, b, w):
    total = r + u @ w @ k + b
    return layer(total, b, b) @ w, total


@case(X, R, finds="add_rms_norm")
def a_difference(x, r):
    total = r - x
    return rms(total), total


@case(X, R, B, normal(2, 1, H), finds="add_layer_norm")
def a_gate_of_each_example(x, r, b, gate):
    total = r + gate * (x + b)
    return layer(total, b, b), total


@case(X, R, S, finds="add_rms_norm")
def layer_scale(x, r, gamma):
    total = r + gamma * x
    return rms(total), total


@case(X, R, np.asarray([[[1.0]], [[0.0]]]), finds="add_rms_norm")
def stochastic_depth(x, r, kept):
    total = r + x * kept / 0.9
    return rms(total), total


@case(X, R, np.uint32(1), finds="add_rms_norm")
def stochastic_depth_of_a_key(x, r, seed):
    kept = jax.random.bernoulli(jax.random.key(seed), 0.5, (x.shape[0], 1, 1))
    total = r + x * (kept / 0.5)
    return rms(total), total


@case(X, R, finds="add_rms_norm")
def a_scaled_residual(x, r):
    total = r + 0.1 * x
    return rms(total), total


@case(X, R, S, finds="add_rms_norm")
def a_reshape_of_rows_between(x, r, s):
    total = r + x
    return rms(total.reshape(-1, H), s), total


@case(X, R, S, finds="add_rms_norm")
def a_sharding_constraint_on_the_stream(x, r, s):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    total = lax.with_sharding_constraint(r + x, NamedSharding(mesh, P("data")))
    return rms(total, s), total


@case(X, R, S, S + 1, finds="rms_norm_add_rms_norm")
def norms_on_both_sides(x, r, s, t):
    total = r + rms(x, s)
    return rms(total, t), total


@case(X, R, S, S + 1, finds="rms_norm_add_rms_norm")
def norms_on_both_sides_around_zero(x, r, s, t):
    total = r + rms(x) * (1 + s)
    return rms(total) * (1 + t), total


@case(X, R, S, B, S + 1, finds="layer_norm_add layer_norm")
def layer_norms_on_both_sides(x, r, s, b, t):
    total = r + layer(x, s, b)
    return layer(total, t, b), total


@case(X, R, S, B, S + 1, finds="rms_norm_add layer_norm")
def norms_of_two_kinds_on_both_sides(x, r, s, b, t):
    total = r + rms(x, s)
    return layer(total, t, b), total


@case(X, R, S, normal(2, 1, H), finds="rms_norm add_rms_norm")
def a_gated_norm_in_front(x, r, s, gate):
    total = r + gate * rms(x, s)
    return rms(total, s), total


@case(X, R, S, B, finds="add_layer_norm")
def a_post_norm(x, r, s, b):
    return layer(r + x, s, b)


@case(X, R, S, finds="rms_norm_add")
def a_norm_of_the_branch_alone(x, r, s):
    """OLMo 2: the sum behind is normed by nobody here."""
    return r + rms(x, s)


@case(X, W, V, S, S + 1, finds="rms_norm_add rms_norm_add")
def two_blocks_of_olmo_2(x, w, v, s, t):
    x = x + rms(jnp.tanh(x @ w) @ v, s)
    return x + rms(jnp.tanh(x @ w) @ v, t)


@case(X, R, Z, S, finds="add_rms_norm")
def a_sum_of_three(x, r, z, s):
    total = r + x + z
    return rms(total, s), total


@case(X, W, V, S, S + 1, finds="rms_norm add_rms_norm")
def two_norms_of_one_stream(x, w, v, s, t):
    h = x + jnp.tanh(rms(x, s) @ w) @ v
    return h + jnp.tanh(rms(h, t) @ w) @ v


@case(X, W, V, S, B, finds="layer_norm add_layer_norm")
def a_parallel_block(x, w, v, s, b):
    y = layer(x, s, b)
    x = x + jnp.tanh(y @ w) @ v + jnp.sin(y @ w) @ v
    return layer(x, s, b) @ w, x


# Linears.


@case(X, S, W, finds="rms_norm_linear", linears=True)
def a_linear(x, s, w):
    return rms(x, s) @ w


@case(X, S, B, W, C, finds="layer_norm_linear", linears=True)
def a_linear_with_a_bias(x, s, b, w, c):
    return layer(x, s, b) @ w + c


@case(X, S, normal(H, 3, 4), normal(3, 4), finds="rms_norm_linear", linears=True)
def an_einsum_to_heads(x, s, w, c):
    return jnp.einsum("bsh,hnd->bsnd", rms(x, s), w) + c


@case(X, S, W, finds="rms_norm_linear", linears=True)
def a_dot_general_with_the_kernel_first(x, s, w):
    return lax.dot_general(w, rms(x, s), (((0,), (2,)), ((), ())))


@case(X, S, V, finds="rms_norm_linear", linears=True)
def a_transposed_kernel(x, s, v):
    return jnp.einsum("bsh,nh->bsn", rms(x, s), v)


@case(X, R, S, W, W + 1, C, finds="add_rms_norm_linear", linears=True)
def several_linears_behind_a_sum(x, r, s, w, v, c):
    total = r + x
    y = rms(total, s)
    return y @ w + c, jax.nn.silu(y @ v), total


@pytest.mark.parametrize("name", CASES)
def test_it_is_found_and_nothing_changes(name):
    function, args, finds, options = CASES[name]
    # What was rounded more often than the operator rounds differs by that; what is computed in float64 of float32 by
    # the rounding of its gradient alone.
    dtypes = {np.dtype(a.dtype).name for a in args}
    is_wider = any(a.dtype == np.float64 for a in jax.tree.leaves(jax.eval_shape(function, *args)))
    rounding = 1e-12 if "float64" in dtypes else 4e-2 if "bfloat16" in dtypes else 2e-7 if is_wider else 2e-6
    assert (operators(function, *args, **options), difference(function, *args, **options) <= rounding) == (finds, True)


def test_a_result_that_every_product_casts_back_is_written_as_the_products_read_it():
    function, args, *_ = CASES["a_float32_result_that_every_product_casts_back"]
    import jln

    program = jax.make_jaxpr(jln.fuse(function))(*args)
    casts = [
        e for e in program.eqns if e.primitive.name == "convert_element_type" and e.outvars[0].aval.shape == X.shape
    ]
    assert not casts, casts

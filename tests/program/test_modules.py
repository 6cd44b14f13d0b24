"""Rung 4: whole steps of models that were not written for jln, as they are and fused."""

import jax
import jax.numpy as jnp
import pytest

import jln
import program
from absent_gpu import triton_kernels

nnx = pytest.importorskip("flax.nnx")
eqx = pytest.importorskip("equinox")

WIDTH, LAYERS = 1024, 3
X = jax.ShapeDtypeStruct((16, 256, WIDTH), jnp.bfloat16)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        options = {"dtype": jnp.bfloat16, "rngs": rngs}
        self.norm = nnx.LayerNorm(WIDTH, **options)
        self.qkv = nnx.LinearGeneral(WIDTH, (3, 8, WIDTH // 8), **options)
        self.out = nnx.LinearGeneral((8, WIDTH // 8), WIDTH, axis=(-2, -1), **options)
        self.norm2 = nnx.RMSNorm(WIDTH, **options)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, **options)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, **options)

    def __call__(self, x):
        query, key, value = jnp.moveaxis(self.qkv(self.norm(x)), -3, 0)
        x = x + self.out(jax.nn.dot_product_attention(query, key, value))
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def as_it_is(loss):
    return loss


def with_linears(loss):
    return jln.fuse(loss, linears=True)


def nnx_report(model, transformation):
    graphdef, state = nnx.split(model)

    def loss(state, x):
        return jnp.mean(nnx.merge(graphdef, state)(x).astype("float32") ** 2)

    return program.compile_for(jax.value_and_grad(transformation(loss)), state, X)


class EqxBlock(eqx.Module):
    norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    norm2: eqx.nn.RMSNorm

    def __init__(self, key):
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.up = eqx.nn.Linear(WIDTH, 4 * WIDTH, key=key)
        self.down = eqx.nn.Linear(4 * WIDTH, WIDTH, key=key)
        self.norm2 = eqx.nn.RMSNorm(WIDTH)

    def __call__(self, x):
        h = jax.vmap(self.up)(jax.vmap(self.norm)(x))
        return x + jax.vmap(self.norm2)(jax.vmap(self.down)(jax.nn.gelu(h)))


def eqx_report(blocks, transformation):
    arrays, rest = eqx.partition(blocks, eqx.is_array)

    def loss(arrays, x):
        for block in eqx.combine(arrays, rest):
            x = jax.vmap(block)(x)
        return jnp.mean(x.astype("float32") ** 2)

    step = jax.value_and_grad(transformation(loss))
    return program.compile_for(step, jax.tree.map(lambda a: a.astype("bfloat16"), arrays), X)


def test_nnx_step():
    """Each of the seven norms is one kernel forward, one backward, and one that adds up dscale and doffset.

    For Linears of many features, which XLA multiplies, the backward kernel makes the norm's result again.
    """
    model = NnxModel(nnx.Rngs(0))
    plain, norms, linears = (nnx_report(model, of) for of in (as_it_is, jln.fuse, with_linears))
    for name, report in (("Flax", plain), ("norms", norms), ("with Linears", linears)):
        print(f"{name}: {report.bytes_total / 1e6:.0f} MB moved, {report.temp_bytes / 1e6:.0f} MB temporary")
    assert triton_kernels(plain) == []
    assert len(triton_kernels(norms)) == len(triton_kernels(linears)) == 3 * (2 * LAYERS + 1)
    assert norms.bytes_total < plain.bytes_total and linears.bytes_total < plain.bytes_total
    assert linears.temp_bytes < norms.temp_bytes < plain.temp_bytes


def test_equinox_step():
    """Examples under two vmaps share the parameters still: a norm is three kernels, and no gradient is per example.

    Equinox's RMSNorm has a bias, which is the operator's offset.
    """
    blocks = [EqxBlock(k) for k in jax.random.split(jax.random.key(0), LAYERS)]
    plain, norms, linears = (eqx_report(blocks, of) for of in (as_it_is, jln.fuse, with_linears))
    assert triton_kernels(plain) == []
    assert len(triton_kernels(norms)) == 3 * 2 * LAYERS
    assert norms.bytes_total < plain.bytes_total
    assert len(triton_kernels(linears)) == 3 * 2 * LAYERS
    assert linears.bytes_total < plain.bytes_total


def test_bfloat16_input_and_float32_parameters():
    """Flax's default dtypes take one kernel, which reads bfloat16 x and writes float32 y, and no float32 copy of x."""
    graphdef, state = nnx.split(jln.nnx.LayerNorm(WIDTH, rngs=nnx.Rngs(0)))
    report = program.compile_for(lambda state, x: nnx.merge(graphdef, state)(x), state, X)
    (kernel,) = report.kernels
    assert kernel.is_triton
    elements = 16 * 256 * WIDTH
    assert (kernel.bytes_read, kernel.bytes_written) == (2 * elements + 2 * 4 * WIDTH, 4 * elements)


class Queries(nnx.Module):
    """A norm with three Linears behind it."""

    def __init__(self, rngs):
        options = {"dtype": jnp.bfloat16, "use_bias": False, "rngs": rngs}
        self.norm = nnx.RMSNorm(WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.q, self.k, self.v = (nnx.Linear(WIDTH, n, **options) for n in (WIDTH, 512, 512))

    def __call__(self, x):
        z = self.norm(x)
        return self.q(z), self.k(z), self.v(z)


def of_queries(transformation, sharding=None):
    """Return the report of the gradients of parameters and x, on one device or where the shardings say."""
    graphdef, state = nnx.split(Queries(nnx.Rngs(0)))

    def loss(state, x):
        return sum(jnp.mean(y.astype("float32") ** 2) for y in nnx.merge(graphdef, state)(x))

    step = jax.grad(transformation(loss), (0, 1))
    if sharding is None:
        return program.compile_for(step, state, X)
    rows, columns, whole = sharding

    def placed(a):
        of = columns if a.ndim == 2 else whole
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=of)

    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=rows)
    return program.compile_for(step, jax.tree.map(placed, state), x, devices=8)


def test_the_result_is_made_again_once_for_all_linears_that_read_it():
    """The backward kernel makes the norm's result again, once for three Linears: it is not kept, and written again."""
    norms, linears = of_queries(jln.fuse), of_queries(with_linears)
    assert len(triton_kernels(norms)) == len(triton_kernels(linears)) == 3
    large = X.size * 2
    assert linears.bytes_total <= norms.bytes_total + 1.01 * large  # whose products have a y of their own


@pytest.mark.parametrize("rows", [("data", None), (None, "tensor")], ids=["batch", "sequence"])
def test_making_the_result_again_communicates_no_more_than_keeping_it_but_one_gather_of_a_sequence(rows):
    mesh = program.mesh("h200", (2, 4), ("data", "tensor"))

    def of(*axes):
        return jax.NamedSharding(mesh, jax.P(*axes))

    sharding = of("data", rows[1]), of(None, "tensor"), of()
    norms, linears = of_queries(jln.fuse, sharding), of_queries(with_linears, sharding)
    more = sum(c.bytes for c in linears.collectives) - sum(c.bytes for c in norms.collectives)
    gather = X.size * 2 // 2  # of all rows of one of the two data shards
    assert more <= (gather if rows[1] else 0)

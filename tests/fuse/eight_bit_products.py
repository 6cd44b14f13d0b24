"""Products in eight bits as libraries and people write them, and proofs that fuse changes nothing of them."""

import jax
import jax.numpy as jnp
import numpy as np
from flax.linen import fp8_ops

import jln

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
H, FEATURES = 128, 96


def arrays(*shape: int, size: float = 1.0) -> jax.Array:
    drawn = np.random.default_rng([7, *shape]).normal(0.2, size, shape)
    return jnp.asarray(drawn, jnp.float32)


def multiplied_on_a_cpu(a, b, a_scale, b_scale, preferred_element_type=jnp.float32):
    """The product of cuDNN, which XLA lowers for NVIDIA's GPUs alone."""
    a, b = (v.astype(jnp.float32) * jnp.repeat(s.astype(jnp.float32), 32, -1) for v, s in ((a, a_scale), (b, b_scale)))
    return jnp.einsum("bmk,bnk->bmn", a, b).astype(preferred_element_type)


def by_jax(z, w, axis=0):
    """JAX's own product of blocks, over the last axis of z and one of w."""
    configs = [jax.nn.get_scaled_dot_general_config("mxfp8")] * 3
    axes = (((z.ndim - 1,), (axis,)), ((), ()))
    return jax.nn.scaled_dot_general(z, w, axes, preferred_element_type=jnp.float32, configs=configs)


def metadata(size: float = 1.0) -> dict[str, jax.Array]:
    """The last scale and maxima, which Flax keeps of an operand."""
    history = jnp.zeros((4,)).at[0].set(5.0 * size)
    return {"scale": jnp.full((1,), 0.01 * size), "amax_history": history}


def direct_by_flax(z, w, of_z, of_w, of_dy):
    """Flax's product of operands with delayed scales (`Fp8DirectDotGeneralOp`)."""
    axes = (((z.ndim - 1,), (0,)), ((), ()))
    names = zip(("lhs", "rhs", "grad"), (of_z, of_w, of_dy), strict=True)
    more = {f"{side}_{name}": a for side, of in names for name, a in of.items()}
    return fp8_ops.fp8_scaled_dot_general(
        z, w, axes, preferred_element_type=jnp.float32, quantize_compute_type=jnp.float32, **more
    )


def rounded_by_flax(z, w, of_z, of_w, of_dy):
    """Flax's product whose operands are rounded to eight bits and back (`Fp8DotGeneralOp`)."""
    z, w = (fp8_ops.in_qdq(jnp.float32, E4M3, a, of["scale"], of["amax_history"]) for a, of in ((z, of_z), (w, of_w)))
    y = fp8_ops.dot_general_with_precision(z, w, (((z.ndim - 1,), (0,)), ((), ())))
    return fp8_ops.out_qdq(jnp.float32, E5M2, y, of_dy["scale"], of_dy["amax_history"])


def clipped(a, dtype=E4M3):
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(a, -largest, largest).astype(dtype)


def current_scale(z):
    return jnp.maximum(jnp.max(jnp.abs(z)), 1e-6) / 448


@jax.custom_vjp
def by_current_scales(z, w):
    """A product of one's own, of operands whose scales are current."""
    of_z, of_w = current_scale(z), current_scale(w)
    return jnp.dot(clipped(z / of_z), clipped(w / of_w), preferred_element_type=jnp.float32) * (of_z * of_w)


def _forward(z, w):
    return by_current_scales(z, w), (z, w)


def _backward(kept, dy):
    z, w = kept
    dz, dw = jnp.dot(dy, w.T), jnp.einsum("...k,...n->kn", z, dy)
    return dz, dw


by_current_scales.defvjp(_forward, _backward)


@jax.custom_vjp
def with_a_cotangent_of_its_own(z, w):
    """A product and an activation, whose cotangent is made of z."""
    q = clipped(z * 32)
    return jnp.tanh(jnp.dot(q, clipped(w), preferred_element_type=jnp.float32) / 32)


def _tanh_forward(z, w):
    return with_a_cotangent_of_its_own(z, w), (z, w)


def _tanh_backward(kept, dy):
    z, w = kept
    y = jnp.tanh(jnp.dot(z, w))
    d = dy * (1 - y * y)
    return jnp.dot(d, w.T), jnp.einsum("...k,...n->kn", z, d)


with_a_cotangent_of_its_own.defvjp(_tanh_forward, _tanh_backward)


def in_blocks(z, dtype=E4M3, block=32):
    """Blocks whose scales are rounded up, by logarithms: the eight bits, and the scales."""
    blocks = z.reshape(*z.shape[:-1], -1, block)
    largest = jnp.max(jnp.abs(blocks), -1, keepdims=True)
    exponent = jnp.ceil(jnp.log2(jnp.where(largest == 0, 2.0**-119, largest) / float(jnp.finfo(dtype).max)))
    values = clipped(blocks / jnp.exp2(exponent), dtype).reshape(z.shape)
    return values, jnp.exp2(exponent[..., 0]).astype(jnp.float8_e8m0fnu)


def read(values, scales=None):
    """Numbers of eight bits, as a program would read them that JAX does not differentiate."""
    values = values.astype(jnp.float32)
    if scales is not None:
        values = values * jnp.repeat(scales.astype(jnp.float32), values.shape[-1] // scales.shape[-1], -1)
    return values


# [2, 16, H]: rows of two axes, 32 in all, as JAX's product of blocks wants them. W, V: of products behind.
X, R, S, B = arrays(2, 16, H), arrays(2, 16, H, size=0.5), arrays(H), arrays(H, size=0.3)
W, V, G = arrays(H, FEATURES, size=0.1), arrays(H, FEATURES, size=0.2), arrays(2, 16, H, size=0.9)
OF_Z, OF_W, OF_DY = metadata(), metadata(0.3), metadata(2.0)
NUMBER = jnp.float32(0.013)


def quantised(function, *args, **options):
    """The operators that fuse has quantise, and those that it has not."""
    routes = jln.explain(jln.fuse(function, **options), *args)
    routes = [r for r in routes if r.layer.startswith("jln.")]
    in_eight_bits = [r.layer.removeprefix("jln.") for r in routes if "quantize" in r.why.split(";")[0]]
    return in_eight_bits, len(routes) - len(in_eight_bits)


def everything(function):
    """The function's results, and the gradients of all its arguments."""

    def loss(*args):
        made = function(*args)
        return sum(jnp.sum(jnp.sin(a)) for a in jax.tree.leaves(made)), made

    def values(*args):
        return jax.value_and_grad(loss, range(len(args)), has_aux=True)(*args)

    return values


def parted(got, wanted):
    """The largest difference beside the array's largest number; infinity where one alone is NaN."""
    got, wanted = (np.asarray(a, np.float32) for a in (got, wanted))
    if got.shape != wanted.shape or not np.array_equal(np.isnan(got), np.isnan(wanted)):
        return np.inf
    return float(np.nanmax(np.abs(got - wanted)) / max(np.nanmax(np.abs(wanted)), 1e-30))


def differences(function, fused, *args):
    wanted, got = (jax.tree.leaves(jax.jit(f)(*args)) for f in (function, fused))
    assert [a.dtype for a in wanted] == [a.dtype for a in got]
    return max(parted(a, b) for a, b in zip(got, wanted, strict=True))


# Float32 throughout, so that the operator's numbers are the program's but for their last bits, and a number that lies
# between two of eight bits is rare: in these arrays there is none.
ROUNDING = 1e-5

"""Products in eight bits as libraries and people write them, and arrays for them."""

import jax
import jax.numpy as jnp
import numpy as np
from flax.linen import fp8_ops

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
H, FEATURES = 128, 96


def arrays(*shape: int, size: float = 1.0) -> jax.Array:
    drawn = np.random.default_rng([7, *shape]).normal(0.2, size, shape)
    return jnp.asarray(drawn, jnp.float32)


def multiply_on_a_cpu(a, b, a_scale, b_scale, preferred_element_type=jnp.float32):
    """The product of cuDNN, which XLA lowers for NVIDIA's GPUs alone."""
    a, b = (v.astype(jnp.float32) * jnp.repeat(s.astype(jnp.float32), 32, -1) for v, s in ((a, a_scale), (b, b_scale)))
    return jnp.einsum("bmk,bnk->bmn", a, b).astype(preferred_element_type)


def by_jax(z, w):
    """JAX's own product of blocks."""
    configs = [jax.nn.get_scaled_dot_general_config("mxfp8")] * 3
    axes = (((z.ndim - 1,), (0,)), ((), ()))
    return jax.nn.scaled_dot_general(z, w, axes, preferred_element_type=z.dtype, configs=configs)


def metadata(size: float = 1.0) -> dict[str, jax.Array]:
    """The last scale and maxima, which Flax keeps of an operand."""
    history = jnp.zeros((1024,), jnp.float32).at[0].set(5.0 * size)
    return {"scale": jnp.full((1,), 0.01 * size, jnp.float32), "amax_history": history}


def by_flax(z, w, of_z, of_w, of_dy):
    """Flax's product of operands with delayed scales (`Fp8DirectDotGeneralOp`)."""
    axes = (((z.ndim - 1,), (0,)), ((), ()))
    names = zip(("lhs", "rhs", "grad"), (of_z, of_w, of_dy), strict=True)
    more = {f"{side}_{name}": a for side, of in names for name, a in of.items()}
    how = {"preferred_element_type": z.dtype, "quantize_compute_type": jnp.float32}
    return fp8_ops.fp8_scaled_dot_general(z, w, axes, **how, **more)


def by_flax_with_roundings(z, w, of_z, of_w, of_dy):
    """Flax's product whose operands are rounded to eight bits and back (`Fp8DotGeneralOp`)."""
    z, w = (fp8_ops.in_qdq(z.dtype, E4M3, a, of["scale"], of["amax_history"]) for a, of in ((z, of_z), (w, of_w)))
    y = fp8_ops.dot_general_with_precision(z, w, (((z.ndim - 1,), (0,)), ((), ())))
    return fp8_ops.out_qdq(z.dtype, E5M2, y, of_dy["scale"], of_dy["amax_history"])


def to_eight_bits(a, dtype=E4M3):
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(a, -largest, largest).astype(dtype)


def current_scale(z):
    return jnp.maximum(jnp.max(jnp.abs(z)).astype(jnp.float32), 1e-6) / 448


@jax.custom_vjp
def by_current_scales(z, w):
    """A product of one's own, of operands whose scales are current."""
    of_z, of_w = current_scale(z), current_scale(w)
    y = jnp.dot(to_eight_bits(z / of_z), to_eight_bits(w / of_w), preferred_element_type=jnp.float32) * (of_z * of_w)
    return y.astype(z.dtype)


def gradients_of_a_product(kept, dy):
    z, w = kept
    return jnp.dot(dy, w.T), jnp.einsum("...k,...n->kn", z, dy)


by_current_scales.defvjp(lambda z, w: (by_current_scales(z, w), (z, w)), gradients_of_a_product)


# [2, 16, H]: rows of two axes, 32 in all, as JAX's product of blocks wants them. W, V: of products behind.
X, R, S, B = arrays(2, 16, H), arrays(2, 16, H, size=0.5), arrays(H), arrays(H, size=0.3)
W, V = arrays(H, FEATURES, size=0.1), arrays(H, FEATURES, size=0.2)
SCALES = metadata(), metadata(0.3), metadata(2.0)
# Products, and what they are given beside operands.
PRODUCTS = {
    "JAX": (by_jax, ()),
    "Flax": (by_flax, SCALES),
    "Flax, rounded": (by_flax_with_roundings, SCALES),
    "current scales": (by_current_scales, ()),
}

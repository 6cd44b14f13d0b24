"""Gradients through norms that quantise: those of the norm that does not, whatever is around it."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln
import workbench

QUANTIZE = {"blocks": jln.MXFloat8(), "given scale": jln.Float8(0.03), "current scale": jln.Float8()}
H = 64


def test_the_carrier_is_in_the_dtype_of_y():
    x, residual = workbench.normal(0, (4, H), "bfloat16"), workbench.normal(1, (4, H), "float32")
    assert jln.rms_norm(x, quantize=jln.Float8()).carrier.dtype == "bfloat16"
    assert jln.rms_norm_add(x, residual, quantize=jln.Float8()).carrier.dtype == "float32"


def test_dequantized_numbers_are_what_the_bits_stand_for():
    """Numbers of -0 stay what they are, which adding a carrier of 0 would turn into 0."""
    q = jln.rms_norm(jnp.zeros((4, H), "float32").at[0].set(-1e-9), quantize=jln.Float8(1.0))
    bits = [np.asarray(a).view("u4") for a in (q.dequantized(), q._replace(carrier=None).dequantized())]
    np.testing.assert_array_equal(*bits)
    assert np.any(bits[0] == 1 << 31)


@jax.custom_vjp
def product(z, kernel):
    return z.dequantized() @ kernel


def product_forward(z, kernel):
    return product(z, kernel), (z.values, z.scale, kernel)


def product_backward(kept, dy):
    values, scale, kernel = kept
    dz = jln.Quantized(None, None, None, dy @ kernel.T)
    return dz, jln.Quantized(values, scale).dequantized().reshape(-1, kernel.shape[0]).T @ dy.reshape(-1, dy.shape[-1])


product.defvjp(product_forward, product_backward)
X, W, K = (workbench.normal(i, shape, "float32") for i, shape in enumerate([(3, 4, H), (3, H), (H, 8)]))


def layer(kind, implementation):
    """A norm and a product of the user's own."""
    return lambda x, w, k: product(jln.rms_norm(x, w, quantize=QUANTIZE[kind], implementation=implementation), k)


def by_hand(kind, implementation):
    """The same by the plain norm, whose result moves to the numbers of eight bits, and its gradient does not."""

    def f(x, w, k):
        z = jln.rms_norm(x, w, implementation=implementation)
        q = jln.rms_norm(x, w, quantize=QUANTIZE[kind], implementation=implementation)
        return (z + jax.lax.stop_gradient(q.dequantized() - z)) @ k

    return f


def loss(f):
    return lambda *a: jnp.sum(jnp.sin(f(*a)))


def gradients(f):
    return jax.value_and_grad(loss(f), (0, 1, 2))


def scanned(f):
    return lambda x, w, k: jax.lax.scan(lambda carry, x: (carry, f(x, w[0], k)), None, x)[1]


def in_the_middle(f):
    """Examples that are behind rows, which XLA takes, inside of the derivative."""
    return lambda x, w, k: jax.vmap(f, (1, None, None))(x, w[0], k)


AROUND = {
    "vmap": lambda f: gradients(lambda x, w, k: jax.vmap(f, (0, None, None))(x, w[0], k)),
    "vmap of scales": lambda f: gradients(jax.vmap(f, (0, 0, None))),
    "vmap of kernels": lambda f: gradients(lambda x, w, k: jax.vmap(f, (None, None, 1))(x, w[0], k.reshape(H, 2, 4))),
    "vmap of gradients": lambda f: jax.vmap(gradients(f), (0, 0, None)),
    "checkpoint in a scan": lambda f: gradients(scanned(jax.checkpoint(f))),
    "cond": lambda f: gradients(lambda x, w, k: jax.lax.cond(k[0, 0] < 9, f, lambda x, w, k: f(x, w, -k), x, w[0], k)),
}
CASES = [(around, implementation) for around in AROUND for implementation in ("xla", "triton")]


@pytest.mark.parametrize(("around", "implementation"), [*CASES, ("examples behind rows", "xla")])
@pytest.mark.parametrize("kind", QUANTIZE)
def test_transformations(kind, around, implementation):
    transform = AROUND.get(around, lambda f: gradients(in_the_middle(f)))
    got, true = (jax.jit(transform(of(kind, implementation)))(X, W, K) for of in (layer, by_hand))
    chex.assert_trees_all_close(got, true, rtol=1e-5, atol=1e-5)


def requests(function, *operands):
    """The requests to the norm's operations in the traced function, at whatever depth, as (forward, backward)."""
    found = {"jln_norm_forward": [], "jln_norm_backward": []}

    def enter(jaxpr):
        for e in jaxpr.eqns:
            if e.primitive.name in found:
                found[e.primitive.name].append(e.params["request"])
            elif e.primitive.name != "jln_reverse_mode":
                for inner in jax.tree.leaves([*e.params.values()], is_leaf=lambda a: hasattr(a, "eqns")):
                    if hasattr(inner, "eqns"):
                        enter(inner)

    enter(jax.make_jaxpr(function)(*operands).jaxpr)
    return found.values()


@pytest.mark.parametrize("wanted", [(0,), (1,), (0, 2), (2,)], ids=str)
def test_what_is_wanted_is_what_is_computed(wanted):
    """Nothing is made of frozen arguments; where the kernel alone is trained the norm has no backward pass."""
    forward, backward = requests(jax.grad(loss(layer("blocks", "xla")), wanted), X, W[0], K)
    assert [{*r.dtypes.present()} for r in backward] == (
        [] if wanted == (2,) else [{("x", "scale")[i] for i in wanted if i < 2}]
    )
    assert [r.dtypes.rstd for r in forward] == ([] if wanted == (2,) else ["float32"])


def test_gradients_have_no_derivatives():
    f = loss(layer("blocks", "xla"))
    for second in (jax.hessian(f), jax.grad(lambda x, *a: jnp.sum(jax.grad(f)(x, *a)))):
        with pytest.raises(TypeError, match="straight through"):
            second(X, W[0], K)


def test_eight_bits_have_none():
    """A cotangent of values is an error, also where the carrier was left out; not that of the largest number."""

    def f(x, what):
        q = jln.rms_norm(x, quantize=jln.Float8())
        return jnp.sum({"values": q.values, "numbers": q._replace(carrier=None).dequantized(), "amax": q.amax}[what])

    for what in ("values", "numbers"):
        with pytest.raises(TypeError, match="no derivative"):
            jax.grad(f)(X, what)
    np.testing.assert_array_equal(jax.grad(f)(X, "amax"), 0)


LEFT = {
    "a scan": lambda q: lambda x: jax.lax.scan(lambda carry, x: (carry, q(x)), None, x)[1],
    "a scan's carry": lambda q: lambda x: jax.lax.scan(lambda carry, x: (q(x), None), q(x[0]), x)[0],
    "a cond": lambda q: lambda x: jax.lax.cond(x[0, 0, 0] < 9, q, lambda x: q(-x), x),
}


@pytest.mark.parametrize(
    ("left", "kind"), [*((left, "given scale") for left in LEFT), ("a scan", "blocks"), ("a scan", "current scale")]
)
def test_results_of_control_flow(left, kind):
    """Control flow that hands a result on gives its values no cotangent, which would be an error."""

    def quantised(x):
        return jln.rms_norm(x, quantize=QUANTIZE[kind])

    def rounded(x):
        y = jln.rms_norm(x)
        return y + jax.lax.stop_gradient(quantised(x).dequantized() - y)

    losses = (lambda x: LEFT[left](quantised)(x).dequantized(), LEFT[left](rounded))
    got, true = jax.jit(lambda x: [jax.grad(loss(f))(x) for f in losses])(X)
    np.testing.assert_allclose(got, true, rtol=1e-5, atol=1e-6)

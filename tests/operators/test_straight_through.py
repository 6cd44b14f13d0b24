"""Gradients through norms that quantise: those of the norm that does not, whatever is around it."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln
import workbench
from catalogue import FORMS, sizes

QUANTIZE = {"blocks": jln.MXFloat8(), "given scale": jln.Float8(0.03), "current scale": jln.Float8()}
NORMS = [name for name, form in FORMS.items() if not form.is_linear]
H = 64


def function(name, implementation, quantize=None, dtype=None):
    """The operator of a form, of its operands in order: a list of y's numbers, and of the total where it has one."""
    form = FORMS[name]
    operator = form.in_order(getattr(jln, form.name), form.names, implementation=implementation, quantize=quantize)

    def f(*operands):
        y, *total = operator(*operands) if form.adds else (operator(*operands),)
        return [y if quantize is None else y.dequantized(dtype or y.carrier.dtype), *total]

    return f


def operands(name, shape, dtype):
    arrays = [a.of(sizes(shape, -1, ()), dtype, "float32") for a in FORMS[name].arguments]
    return [workbench.normal(i, a.shape, a.dtype) for i, a in enumerate(arrays)]


def pulled(f, given, dy):
    return jax.jit(lambda given, dy: jax.vjp(f, *given)[1](dy))(given, dy)


# One tile of rows, ragged ones; chunks, whose statistics grow on the way.
@pytest.mark.parametrize("shape", [(5, 64), (37, 96), (2, 20000)], ids=str)
@pytest.mark.parametrize("kind", QUANTIZE)
@pytest.mark.parametrize("name", NORMS)
def test_every_gradient_is_that_of_the_norm(name, kind, shape, implementation):
    """Bit for bit: the same kernel makes it of the same x, statistics and cotangents, that of the total too."""
    given = operands(name, shape, "bfloat16")
    plain = function(name, implementation)
    dy = workbench.cotangents(jax.eval_shape(plain, *given))
    got = pulled(function(name, implementation, QUANTIZE[kind]), given, dy)
    chex.assert_trees_all_equal(got, pulled(plain, given, dy))


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
        numbers = jax.lax.stop_gradient(q).dequantized()
        return (z + jax.lax.stop_gradient(numbers - z)) @ k

    return f


def loss(f):
    return lambda *a: jnp.sum(jnp.sin(f(*a)))


def scanned(f):
    def g(x, w, k):
        _, y = jax.lax.scan(lambda carry, x: (carry, f(x, w[0], k)), None, x)
        return y

    return g


AROUND = {
    "as it is": lambda f: lambda x, w, k: f(x, w[0], k),
    "a jitted norm": lambda f: lambda x, w, k: jax.jit(f)(x, w[0], k),
    "vmap": lambda f: lambda x, w, k: jax.vmap(f, (0, None, None))(x, w[0], k),
    "vmap of scales": lambda f: jax.vmap(f, (0, 0, None)),
    "vmap of kernels": lambda f: lambda x, w, k: jax.vmap(f, (None, None, 1))(x, w[0], k.reshape(H, 2, 4)),
    "scan": scanned,
    "checkpoint": lambda f: lambda x, w, k: jax.checkpoint(f)(x, w[0], k),
    "checkpoint in a scan": lambda f: scanned(jax.checkpoint(f)),
    "cond": lambda f: lambda x, w, k: jax.lax.cond(k[0, 0] < 9, f, lambda x, w, k: f(x, w, -k), x, w[0], k),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("kind", QUANTIZE)
def test_transformations(kind, around, implementation):
    f, g = (loss(AROUND[around](of(kind, implementation))) for of in (layer, by_hand))
    got, true = (jax.jit(jax.value_and_grad(f, (0, 1, 2)))(X, W, K) for f in (f, g))
    chex.assert_trees_all_close(got, true, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", QUANTIZE)
def test_gradients_of_examples(kind, implementation):
    """Examples may be in the middle by XLA, inside of the derivative, too."""
    f, g = (jax.vmap(jax.grad(loss(of(kind, implementation)), (0, 1, 2)), (0, 0, None)) for of in (layer, by_hand))
    chex.assert_trees_all_close(f(X, W, K), g(X, W, K), rtol=1e-5, atol=1e-5)
    if implementation == "xla":
        losses = (jax.vmap(loss(of(kind, "xla")), (1, None, None)) for of in (layer, by_hand))
        f, g = (jax.grad(lambda *a, of=of: jnp.sum(of(*a)), (0, 1, 2)) for of in losses)
        chex.assert_trees_all_close(f(X, W[0], K), g(X, W[0], K), rtol=1e-5, atol=1e-5)


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


def test_examples_are_rows_of_one_backward_kernel():
    """One operation adds up dscale under a vmap inside of the derivative, as of the plain norm."""

    def of(w):
        return jnp.sum(jax.vmap(lambda x: jln.rms_norm(x, w, quantize=jln.MXFloat8()).dequantized())(X))

    _, backward = requests(jax.grad(of), W[0])
    assert [r.batch_dims for r in backward] == [0]


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
    "a checkpoint": jax.checkpoint,
    "a jitted function": jax.jit,
}


@pytest.mark.parametrize("kind", QUANTIZE)
@pytest.mark.parametrize("left", LEFT)
def test_results_of_control_flow(left, kind):
    """Control flow that hands a result on gives its values no cotangent, which would be an error."""

    def quantised(x):
        return jln.rms_norm(x, quantize=QUANTIZE[kind])

    def rounded(x):
        y = jln.rms_norm(x)
        return y + jax.lax.stop_gradient(quantised(x).dequantized() - y)

    got = jax.grad(lambda x: jnp.sum(jnp.sin(LEFT[left](quantised)(x).dequantized())))(X)
    true = jax.grad(lambda x: jnp.sum(jnp.sin(LEFT[left](rounded)(x))))(X)
    np.testing.assert_allclose(got, true, rtol=1e-5, atol=1e-6)

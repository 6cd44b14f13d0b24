"""The product that is kept where features are few beside a row's elements, so that no pass over x makes row sums."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_few_features_of_examples import ROWS, all_at_once, by_kernels, wide

import jln
import workbench
from jln._junction.arrays import Arrays, Junction, Norm, Switches
from jln._junction.linears import formulas, launches
from jln._junction.linears.tiles import forward_tile, keeps_product
from jln._junction.operations import forward_in_one
from jln._triton import target
from jln._triton.chip import CHIPS, Chip
from jln._triton.launch import INTERPRETED
from junctions import made

# Two chunks of columns and a ragged one, whose rows start on 16 bytes, as those of 8 features do; 9 may be kept.
H, N = 144, 8
KEPT = {"forward_kernel", "row_sums_of_product_kernel", "backward_kernel", "parameters_kernel"}
# The name, the gate, along what parameters vary, axes of rows, arguments that are left out.
CASES = [
    ("layer_norm_linear", "no gate", "shared", ROWS, ()),
    ("rms_norm_linear", "no gate", "shared", ROWS, ("scale",)),
    ("layer_norm_linear", "no gate", "shared", ROWS, ("scale", "offset", "bias")),
    ("add_layer_norm_linear", "H", "shared", ROWS, ()),
    ("add_rms_norm_linear", "rows", "by example", ROWS, ()),
    ("add_layer_norm_linear", "by example", "by example", ROWS, ()),
    ("add_layer_norm_linear", "by example", "shared", ROWS, ("scale",)),
    ("layer_norm_linear", "no gate", "apart", (2, 3, 70), ()),
]


def arguments(name, gate, varies, rows, left_out=(), dtype="bfloat16"):
    """Return arguments by name and options: an offset and a bias take most digits of y, and c1 is as large as c2."""
    given, options = made(name, gate=gate, varies=varies, shape=(*rows, H), dtype=dtype)
    given |= {"kernel": (1 + given["kernel"][..., : N // 2]) / np.sqrt(H).astype(dtype), "scale": 1 + given["scale"]}
    given |= {"bias": given["bias"][..., : N // 2] * 100}
    if "offset" in given:
        given["offset"] = given["offset"] * (30 if dtype == "bfloat16" else 1)  # else y is too large for float16
    return {n: None if n in left_out else a for n, a in given.items()}, options


def assert_accurate(got, plain, true):
    """Hold that each array's largest error is at most twice plain jnp's and a rounding."""
    chex.assert_trees_all_equal_shapes(got, true)
    for a, of_plain, t in zip(*map(jax.tree.leaves, (got, plain, true)), strict=True):
        error, allowed = (np.max(np.abs(b.astype("float64") - t)) for b in (a, of_plain))
        assert error <= 2 * allowed + float(jnp.finfo(a.dtype).eps) * np.max(np.abs(t))


@pytest.mark.parametrize(("name", "gate", "varies", "rows", "left_out"), CASES, ids=str)
def test_values_and_every_gradient(name, gate, varies, rows, left_out):
    """Values and gradients are those of float64, but for bfloat16's roundings, and no kernel makes row sums of x."""
    given, options = arguments(name, gate, varies, rows, left_out)
    got, kernels = by_kernels(lambda a: all_at_once(jln, name, a, implementation="triton", **options), given)
    assert kernels == KEPT
    of_reference = jax.jit(lambda a: all_at_once(jln.reference, name, a, **options))
    assert_accurate(got, of_reference(given), of_reference(wide(given)))


def several(module, **options):
    """Return a function of named arguments: products of 4 and of 2 x 2 features, the second without a bias."""

    def run(kernels, bias, **arrays):
        return module.layer_norm_linear(**arrays, kernel=kernels, bias=(bias, None), **options)

    return run


@pytest.mark.parametrize("used", [(0, 1), (1,)], ids=str)
def test_several_linears(used):
    """Products of several Linears are kept side by side; one that nobody uses has no part in the gradients."""
    given, _ = arguments("layer_norm_linear", "no gate", "shared", ROWS)
    kernel, bias = given.pop("kernel"), given.pop("bias")
    given |= {"kernels": (kernel[:, 0], 2 * kernel[:, :, :2]), "bias": bias[0]}

    def gradients(module, arrays, **options):
        def loss(arrays):
            y = several(module, **options)(**arrays)
            return sum(jnp.sum(jnp.sin(y[i].astype("float32"))) for i in used)

        return jax.grad(loss)(arrays)

    got, kernels = by_kernels(lambda a: gradients(jln, a, implementation="triton"), given)
    assert kernels == KEPT
    plain = jax.jit(lambda a: gradients(jln.reference, a))
    assert_accurate(got, plain(given), plain(wide(given)))


# Of 40 cores several programs have shares of an example's rows; of three each has several tiles.
@pytest.mark.parametrize("cores", [3, 40])
@pytest.mark.parametrize("varies", ["shared", "by example"])
def test_several_programs(varies, cores):
    """Row sums and shares of the bias's gradient are those of all tiles."""
    given, _ = arguments("layer_norm_linear", "no gate", varies, (2, 400))
    with target.using(target.Interpreter(Chip(INTERPRETED.name, 90, cores))):
        got = jax.jit(lambda a: all_at_once(jln, "layer_norm_linear", a, implementation="triton"))(given)
    plain = jax.jit(lambda a: all_at_once(jln.reference, "layer_norm_linear", a))
    assert_accurate(got, plain(given), plain(wide(given)))


def with_large_columns(x):
    """Two columns as real transformers have them: of such a row c2 leaves almost nothing of the larger one's dx."""
    return x.at[..., 3].add(1000).at[..., 90].add(-30)


def with_a_large_mean(x):
    return x + 1000


def with_first_columns_equal(x):
    """A first chunk without spread, of which the kernel takes its first unit."""
    return x.at[..., :64].set(0.0)


@pytest.mark.parametrize("data", [with_large_columns, with_a_large_mean, with_first_columns_equal])
@pytest.mark.parametrize("name", ["add_layer_norm_linear", "add_rms_norm_linear"])
def test_every_column_of_dx_keeps_its_digits(name, data):
    """Each column's largest error is at most twice plain jnp's in that column, of a stream in float32."""
    given, _ = arguments(name, "no gate", "shared", ROWS)
    given["x"] = data(given["x"])
    stream = given.pop("residual").astype("float32")
    dy = workbench.normal(9, (*ROWS, 2, N // 2), "bfloat16")

    def dx(module, stream, dy, arrays, **options):
        def y(stream):
            return getattr(module, name)(**arrays, residual=stream, **options)[0]

        return jax.vjp(y, stream)[1](dy)[0]

    got = jax.jit(functools.partial(dx, jln, implementation="triton"))(stream, dy, given)
    plain = jax.jit(functools.partial(dx, jln.reference))
    of_plain, true = plain(stream, dy, given), plain(wide(stream), wide(dy), wide(given))
    error, allowed = (np.max(np.abs(a.astype("float64") - true), axis=(0, 1)) for a in (got, of_plain))
    assert (error <= 2 * allowed).all(), np.max(error / allowed)


@pytest.mark.parametrize(("of_scale", "of_dy"), [(1e-5, 1e3), (1e5, 1e-4)], ids=["small", "large"])
def test_scales_whose_products_float16_has_no_range_for(of_scale, of_dy):
    """Gradients of x are as good as plain jnp's where x_hat * scale is a subnormal of float16, or overflows it."""
    given, _ = arguments("rms_norm_linear", "no gate", "shared", ROWS, ("bias",), "float16")
    given["scale"] = of_scale * given["scale"].astype("float32")
    x, dy = given.pop("x"), (of_dy * workbench.normal(9, (*ROWS, 2, N // 2), "float32")).astype("float16")

    def dx(module, x, dy, arrays, **options):
        return jax.vjp(lambda x: module.rms_norm_linear(x, **arrays, **options), x)[1](dy)[0]

    got = jax.jit(functools.partial(dx, jln, implementation="triton"))(x, dy, given)
    plain = jax.jit(functools.partial(dx, jln.reference))
    assert_accurate(got, plain(x, dy, given), plain(wide(x), wide(dy), wide(given)))


@pytest.mark.parametrize("varies", ["shared", "by example"])
def test_a_rows_dx_has_no_mean(varies):
    """The elements of dx add up to nothing, but for their roundings, of which 2**-7 of a row's norm is seven sigma."""
    given, _ = arguments("layer_norm_linear", "no gate", varies, ROWS)

    def loss(x):
        return jnp.sum(jnp.cos(jln.layer_norm_linear(**given | {"x": x}, implementation="triton").astype("float32")))

    dx = wide(jax.jit(jax.grad(loss))(given["x"]))
    assert (np.abs(dx.sum(-1)) <= 2**-7 * np.linalg.norm(dx, axis=-1)).all()


def kept_by(forward, varies):
    """Return the product that a forward operation makes, and the true one, of less spread in the first chunk."""
    given, _ = arguments("layer_norm_linear", "no gate", varies, ROWS)
    x, scale, kernel, bias = (given[n] for n in ("x", "scale", "kernel", "bias"))
    x = x.at[..., :64].multiply(0.1)
    scale, offset = (a.reshape(-1, 1, H) for a in (scale, given["offset"]))
    norm = Norm(-1, workbench.EPSILON, Switches(subtract_mean=True), examples=int(varies == "by example"))
    operands = Arrays(x=x, scale=scale, offset=offset, kernel=(kernel,), bias=(bias,))
    dtypes = Arrays(y=("bfloat16",), product=("float32",))
    (product,) = forward(operands, Junction(norm, features=(2,), in_one=True), dtypes).product
    true = jln.reference.layer_norm(*map(wide, (x, scale)), None, epsilon=workbench.EPSILON)
    return product, jnp.tensordot(true, wide(kernel), 1)


@pytest.mark.parametrize("implementation", ["triton", "xla"])
@pytest.mark.parametrize("varies", ["shared", "by example"])
def test_what_is_kept(varies, implementation):
    """The product is that of x_hat * scale and the kernel in float32, without offset and bias, of rows in bfloat16.

    XLA makes it for the kernels that read it.
    """
    by_kernel = functools.partial(forward_in_one, implementation="triton")
    forward = by_kernel if implementation == "triton" else functools.partial(formulas.forward, batch_dims=0)
    product, true = kept_by(forward, varies)
    assert product.dtype == "float32"
    np.testing.assert_allclose(product, true, rtol=0, atol=2**-15 * float(np.max(np.abs(true))))


def test_a_cpu_has_no_product_that_kernels_could_mistake_for_one():
    """Numbers in the place of a product that no rule reads are absurd, but finite, as debuggers stop at NaN."""
    product, true = kept_by(functools.partial(forward_in_one, implementation="xla"), "shared")
    assert product.shape == true.shape and product.dtype == "float32"
    assert jnp.isfinite(product).all() and jnp.min(product) > 1e38


def keeps(dtype="bfloat16", rows=8192, h=1024, features=((64,),), beside=(), in_one=True, **settings):
    """Return whether it is kept. beside: the names of what is beside x. settings: the norm's."""
    rows = rows if isinstance(rows, tuple) else (rows,)
    x, kernels = jax.ShapeDtypeStruct((*rows, h), dtype), [jax.ShapeDtypeStruct((h, *f), dtype) for f in features]
    norm = Norm(-1, workbench.EPSILON, Switches(subtract_mean=True), **settings)
    junction = Junction(norm, features=tuple(map(len, features)), in_one=in_one)
    return keeps_product(Arrays(x=x, kernel=tuple(kernels), **dict.fromkeys(beside, x)), junction)


def test_where_it_is_kept():
    """A product is kept where it is small, exact, and made on the way by the kernel that normalises."""
    assert keeps() and keeps(features=((4, 8), (32,))) and keeps(rows=1)
    assert not keeps(h=1023) and not keeps(features=((4, 8), (33,)))  # not small beside x
    assert not keeps(features=((80,),), h=4096)  # not one tile of sums beside that of y
    assert not keeps("float32") and not keeps("float64")  # TF32 has no digits of a sum that is to be consistent with dz
    assert not keeps("float16")  # which has no range for what rounding loses
    assert not keeps(rows=64, h=4096) and keeps(rows=8192, h=4096)  # a long walk of few programs
    of_few = (64, 4096, 64, "bfloat16", CHIPS["h200"])  # as on a device that has some of the rows
    assert forward_tile(*of_few) is None and forward_tile(*of_few, keeps=True) is not None
    assert not keeps(remat=True) and not keeps(in_one=False) and not keeps(rows=(0, 64), examples=1)


def test_kept_where_both_passes_are_fused():
    """A product is kept where no chip composes the forward and has kernels for the backward."""
    of_examples = functools.partial(keeps, examples=1)
    assert of_examples(rows=(256, 32)) and not of_examples(rows=(256, 24))  # an A100's tiles are 64 rows and 32
    assert of_examples(rows=(120, 65)) and keeps(rows=(256, 24))
    assert keeps(h=1028) and not keeps(h=1028, beside=["x_bias"])  # which only the forward counts where it is frozen
    assert keeps(beside=["x_bias"]) and not of_examples(rows=(256, 32), beside=["x_bias"])
    assert of_examples(rows=(256, 32), beside=["x_bias", "gate"]) and not keeps(h=1028, beside=["gate"])


def test_what_is_not_made_is_not_asked_for():
    """An export with a symbolic number of rows, of which nobody knows how many there are, keeps none."""
    given, _ = arguments("layer_norm_linear", "no gate", "shared", (5,))
    (rows,) = jax.export.symbolic_shape("rows")
    x = jax.ShapeDtypeStruct((rows, H), "bfloat16")

    def gradient(x):
        return jax.grad(lambda x: jln.layer_norm_linear(**given | {"x": x}).astype("float32").sum())(x)

    exported = jax.export.export(jax.jit(gradient))(x)
    chex.assert_trees_all_close(exported.call(given["x"]), gradient(given["x"]), atol=1e-3)


def held(some, **options):
    """Return the shapes of what is held of 70 rows for the gradients of some arguments."""
    given, _ = arguments("layer_norm_linear", "no gate", "shared", (70,))
    rest = {n: a for n, a in given.items() if n not in some}

    def function(arrays):
        return jln.layer_norm_linear(**arrays, **rest, **options)

    _, pullback = jax.vjp(function, {n: given[n] for n in some})
    return sorted(a.shape for a in jax.tree.leaves(pullback) if a.size and a.shape[0] == 70)


def test_held_for_what_is_made_of_it_alone(implementation):
    """The product is held for gradients of x alone, of which there are row sums."""
    rows = [(70, 1), (70, 1), (70, H)]
    if implementation == "triton":
        assert held(["x"], implementation="triton") == [*rows[:2], (70, 2, N // 2), rows[2]]
    else:
        assert held(["x"], implementation="xla") == rows
    assert held(["scale", "kernel"], implementation=implementation) == rows
    assert held(["offset", "bias"], implementation=implementation) == []
    assert held(["x"], implementation=implementation, remat=True) == rows[2:]


POLICIES = {
    "none": None,
    "products": jln.checkpoint_policies.dots_saveable,
    "products and statistics": jln.checkpoint_policies.dots_and_statistics_saveable,
}


@pytest.mark.parametrize("policy", POLICIES)
def test_checkpoints(policy):
    """The product is made again with the statistics under a checkpoint, or saved with them."""
    given, _ = arguments("layer_norm_linear", "no gate", "shared", ROWS)

    def gradient(module, wrap=lambda f: f, **options):
        @wrap
        def call(arrays):
            return module.layer_norm_linear(**arrays, **options)

        return jax.grad(lambda arrays: jnp.sum(jnp.sin(call(arrays).astype("float32"))))

    wrap = functools.partial(jax.checkpoint, policy=POLICIES[policy])
    ours, plain = gradient(jln, wrap, implementation="triton"), jax.jit(gradient(jln.reference))
    with target.recording() as launches:
        jax.jit(lambda a: ours(a)).lower(given)
    kernels = [run.kernel.fn.__name__ for run in launches]
    assert kernels.count("forward_kernel") == (1 if policy == "products and statistics" else 2)
    assert kernels.count("row_sums_of_product_kernel") == 1 and "row_sums_kernel" not in kernels
    assert_accurate(jax.jit(lambda a: ours(a))(given), plain(given), plain(wide(given)))


def test_a_sum_alone_is_made_again_without_products():
    """No kernel multiplies for a sum that a checkpoint makes again where it keeps all else."""
    given, _ = arguments("add_layer_norm_linear", "no gate", "shared", ROWS)
    call = jax.checkpoint(
        lambda a: jln.add_layer_norm_linear(**a, implementation="triton"),
        policy=jln.checkpoint_policies.dots_and_statistics_saveable,
    )
    with target.recording() as launches:
        jax.jit(jax.grad(lambda a: sum(jnp.sum(jnp.sin(r.astype("float32"))) for r in call(a)))).lower(given)
    kernels = [(run.kernel.fn.__module__.split(".")[-1], run.kernel.fn.__name__) for run in launches]
    assert kernels.count(("with_linear", "forward_kernel")) == 1 and len(kernels) == 5


def test_second_derivatives():
    """Second derivatives, whose formulas read no product, are plain jnp's in float64, but for bfloat16's roundings."""
    given, _ = arguments("layer_norm_linear", "no gate", "shared", (70,))

    def second(module, given, **options):
        def loss(x):
            y = module.layer_norm_linear(**given | {"x": x}, **options)
            return 100 * jnp.sum(jnp.sin(y.astype(jnp.promote_types(y.dtype, "float32")) / 100))

        def of_gradient(x):
            d = jax.grad(loss)(x)
            return jnp.sum(jnp.sin(d.astype(jnp.promote_types(d.dtype, "float32"))))

        return jax.jit(jax.grad(of_gradient))(given["x"])

    got = second(jln, given, implementation="triton").astype("float64")
    true = second(jln.reference, wide(given))
    np.testing.assert_allclose(got, true, rtol=0, atol=2**-5 * float(np.max(np.abs(true))))


def test_a_composed_forward_makes_it_too(monkeypatch):
    """The product is made by XLA where the forward cannot be one kernel, and the backward kernels read it."""
    given, _ = arguments("layer_norm_linear", "no gate", "shared", ROWS)
    monkeypatch.setattr(launches.tiles, "forward", lambda *_, **__: None)
    got, kernels = by_kernels(lambda a: all_at_once(jln, "layer_norm_linear", a, implementation="triton"), given)
    assert kernels == KEPT - {"forward_kernel"}
    plain = jax.jit(lambda a: all_at_once(jln.reference, "layer_norm_linear", a))
    assert_accurate(got, plain(given), plain(wide(given)))


@pytest.mark.parametrize("way", ["one program", "a scan", "two programs"])
def test_xla_makes_no_product_that_nobody_reads(way):
    """XLA multiplies as often as without a product on a CPU, where no rule reads it."""
    given, _ = arguments("layer_norm_linear", "no gate", "shared", (70,))

    def products(features):
        arrays = given | {"kernel": jnp.concatenate([given["kernel"]] * features, 1)}
        arrays["bias"] = jnp.concatenate([given["bias"]] * features, 0)

        def call(x, _=None):
            y = jln.layer_norm_linear(**arrays | {"x": x})
            return x + jnp.sum(jnp.sin(y), (1, 2))[:, None].astype(x.dtype), None

        def loss(x):
            x = jax.lax.scan(call, x, length=3)[0] if way == "a scan" else call(x)[0]
            return jnp.sum(x.astype("float32"))

        step = functools.partial(jax.vjp, loss) if way == "two programs" else jax.value_and_grad(loss)
        text = jax.jit(step).lower(given["x"]).compile().as_text()
        return text.count(" dot(") + text.count("custom-call(") + text.count("dot_general")

    assert products(1) == products(2)

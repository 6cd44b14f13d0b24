"""LayerNorm and the Linears behind it, forward and backward derived by hand, the norm by whatever computes it.

Rows are indexed by m, the H elements of a row by h, the N results by n. x_hat, s, mean and rstd are those of
`jln._junction.formulas`, whose terms (1) to (9) are cited here; K is the kernel, b the offset (0 when absent).

With several Linears (11) to (13) are of each of them, and (14) is the sum over all. With a residual the row is
`total`, and its own cotangent is added to (17), as in `jln._junction.formulas`.

Forward:

    (10) z_mh = x_hat_mh * s_h + b_h                        rounded to the dtype of the product's operands
    (11) y_mn = sum_h z_mh * K_hn + bias_n

Backward. (11) is linear in each of its parts:

    (12) dbias_n   = sum_m dy_mn
    (13) dkernel_hn = sum_m z_mh * dy_mn
    (14) dz_mh     = sum_n dy_mn * K_hn

dz is what (5) to (9) call dy, so with it

    (15) doffset_h = sum_m dz_mh = sum_n K_hn * dbias_n     (5), the sums exchanged
    (16) dscale_h  = sum_m dz_mh * x_hat_mh                 (6)
    (17) g  = dz * s,  dx = rstd * (g - c1 - x_hat * c2)    (7) to (9)

Nothing of the size of x is kept between forward and backward but x: (13) makes z again.

Other forms of these terms, which the fused kernels use. What is said of their errors comes from simulating bfloat16 and
float16 operands with float32 sums.

    (21) G_hn       = sum_m x_hat_mh * dy_mn
    (22) dkernel_hn = s_h * G_hn + b_h * dbias_n              (13), by (10)

- (22) is as good as (13), if G is in float32. It saves nothing here, where z costs what x_hat costs.
- (15) by the second form reads K and a vector, not dz, and is as good as the direct sum or better.
- (16) as sum_n K * G is 380 times worse where one column of x is near 1000, as in real transformers: not used.
- dz in 16 bits underflows for small dy in float16: it stays in the compute dtype.

Shapes are those of `jln._junction.arrays`. No operand is written out over vmap's axes: einsum drops axes of
size 1 that the other side has longer. A result is in the dtype that `dtypes` names for it, and is not computed, nor
what only it needs, where that is None. With `h_axes`, as in `jln._junction.formulas`, the sums of (11) are taken over
the devices too. With `gathered`, axes of x and for each the mesh axes that split it, a device has its own rows of x and
of all that has x's shape, and those of all devices along these axes of y and dy, whose features they split (Megatron's
sequence parallelism): z is gathered, and dz added up where its rows are.

Dtypes: a product's operands are in promote_types(y_dtype or x.dtype, kernel.dtype), the dtype of its y, and its sums
in the compute dtype, float32 or for float64 float64. y is rounded once, with one exception (`affine`).
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jln._junction import formulas as norms_in_jnp
from jln._junction import gradients as gradients_in_jnp
from jln._junction.arrays import DY, Arrays, Junction
from jln._junction.linears import eight_bits
from jln._junction.linears.axes import Axes, einsum


def column_sums(operands: Arrays, junction: Junction, dtypes: Arrays, batch_dims: int) -> Arrays:
    """Term (12) of one Linear: the sum of each column of dy over all rows, as the gradient of a bias."""
    (dy,), (features,), (dtype,) = operands.dy, junction.features, dtypes.bias
    wide = jnp.promote_types(norms_in_jnp.compute_dtype(dy.dtype), dtype)
    return Arrays(bias=(jnp.sum(dy.astype(wide), range(batch_dims, dy.ndim - features)).astype(dtype),))  # (12)


Gathered = tuple[tuple[int, norms_in_jnp.MeshAxes], ...]


class Norms(NamedTuple):
    """The norm between the products, by whatever computes it: functions of (operands, settings, dtypes, batch_dims).

    forward, backward: the norm's two operations, of a `Norm`. column_sums: sums over rows, of a `Junction`.
    """

    forward: Callable[..., Arrays]
    backward: Callable[..., Arrays]
    column_sums: Callable[..., Arrays]


IN_JNP = Norms(norms_in_jnp.forward, gradients_in_jnp.backward, column_sums)
IN_JNP_ON_CPU = Norms(norms_in_jnp.forward_cpu, gradients_in_jnp.backward_cpu, column_sums)
IN_JNP_ON_TPU = Norms(norms_in_jnp.forward_tpu, gradients_in_jnp.backward_tpu, column_sums)


def affine(
    z: Array, kernel: Array, bias: Array | None, axes: Axes, precision: Any, h_axes: norms_in_jnp.MeshAxes = ()
) -> Array:
    """Term (11), rounded once to the dtype of z; in bfloat16 with a bfloat16 bias, twice.

    XLA adds a 16-bit bias inside its product only if the product is rounded to 16 bits first, else it writes the
    product in float32 and reads it again: (8192, 4096, 12288) in bfloat16 moves 503 MB forward or 1309. Two roundings
    are the price in bfloat16, whose range is float32's; a float16 product may overflow where y does not. A float32 bias
    XLA adds to the float32 product inside, if the bias is an argument of the program.
    """
    compute = norms_in_jnp.compute_dtype(z.dtype)
    rounded_first = not h_axes and (bias is None or z.dtype == bias.dtype == jnp.bfloat16)
    sums = z.dtype if rounded_first else compute
    how = {"precision": precision, "preferred_element_type": sums}
    y = einsum(z, axes.z, kernel.astype(z.dtype), axes.kernel, axes.y, **how)  # (11)
    if h_axes:
        y = lax.psum(y, h_axes)
    if bias is not None:
        y = y + jnp.expand_dims(bias.astype(sums), axes.without(axes.bias))  # (11)
    return y.astype(z.dtype)


def forward(
    operands: Arrays,
    junction: Junction,
    dtypes: Arrays,
    batch_dims: int,
    *,
    norms: Norms = IN_JNP,
    h_axes: norms_in_jnp.MeshAxes = (),
    gathered: Gathered = (),
) -> Arrays:
    """Terms (10) and (11)."""
    batch = norms_in_jnp.common_batch(batch_dims, *jax.tree.leaves(operands))
    results = norms.forward(  # (10)
        operands._replace(kernel=None, bias=None),
        junction.norm,
        dtypes._replace(y=widest(dtypes.y)),
        batch_dims,
        **({"h_axes": h_axes} if h_axes else {}),
    )
    z = _all_rows(results.y, gathered)
    y = []
    of_each = zip(operands.kernel, operands.bias, junction.features, dtypes.y, strict=True)
    for kernel, bias, features, dtype in of_each:
        axes = Axes.of(operands.x.ndim, batch_dims, features)
        y.append(None if dtype is None else affine(z.astype(dtype), kernel, bias, axes, junction.precision, h_axes))
    return jax.tree.map(lambda a: norms_in_jnp.with_batch(a, batch), results._replace(y=tuple(y)))


def _all_rows(z: Array | None, gathered: Gathered) -> Any:
    for axis, over in gathered:
        z = z if z is None else lax.all_gather(z, over, axis=axis, tiled=True)
    return z


def widest(dtypes: Sequence[str | None]) -> str | None:
    """The dtype to which those of `dtypes` that are not None promote."""
    given = [jnp.dtype(d) for d in dtypes if d is not None]
    return functools.reduce(jnp.promote_types, given).name if given else None


def product_dtypes(operands: Arrays, junction: Junction) -> tuple[str, ...]:
    """The dtype of each product."""
    z = operands.x.dtype if junction.eight_bits else junction.y_dtype or operands.x.dtype
    return tuple(jnp.promote_types(z, kernel.dtype).name for kernel in operands.kernel)


def backward(
    operands: Arrays,
    junction: Junction,
    dtypes: Arrays,
    batch_dims: int,
    *,
    norms: Norms = IN_JNP,
    h_axes: norms_in_jnp.MeshAxes = (),
    gathered: Gathered = (),
) -> Arrays:
    """Terms (12) to (17)."""
    dy, kernels, norm = operands.dy, operands.kernel, junction.norm
    of_norm = dtypes._replace(kernel=None, bias=None)
    batch = norms_in_jnp.common_batch(batch_dims, *jax.tree.leaves(operands))
    used = [i for i, d in enumerate(dy) if d is not None]
    axes = {i: Axes.of(dy[i].ndim - junction.features[i] + 1, batch_dims, junction.features[i]) for i in used}
    needs_dz = any(d is not None for d in of_norm._replace(offset=None)) or (
        of_norm.offset is not None and (norm.has_groups or junction.eight_bits != "")
    )
    z_dtype = widest([dy[i].dtype.name for i in used if dtypes.kernel[i] is not None])
    pulled, z = Arrays(), None
    if junction.eight_bits and z_dtype is not None:  # not rounded to 16 bits in front of eight
        z_dtype = "float32" if norm.remat else None
        if not norm.remat:  # by XLA, where it quantises
            row = operands.total, operands.scale, operands.offset, operands.mean, operands.rstd
            z = norms_in_jnp.apply_statistics(*row, norm)
    if needs_dz or z_dtype is not None:
        dz = []
        if needs_dz:
            dz = [_dz(dy[i], kernels[i], axes[i], junction) for i in used]
            first = 0 if gathered else len(DY) - 1  # of those that are added up here
            dz[first:] = [gradients_in_jnp.add_up(dz[first:])] if dz[first:] else []
            for axis, over in gathered:
                dz = [lax.psum_scatter(dz[0], over, scatter_dimension=axis, tiled=True)]
        pulled = norms.backward(  # (16), (17), and (10) again
            operands._replace(**dict(itertools.zip_longest(DY, dz)), kernel=None, y_scale=None),
            norm,
            of_norm._replace(y=z_dtype, offset=of_norm.offset if needs_dz else None),
            batch_dims,
            **({"h_axes": h_axes} if h_axes else {}),
        )
        z = z if pulled.y is None else _all_rows(pulled.y, gathered)
    z_eight = eight_bits.z_along_rows(z, operands, junction) if junction.eight_bits and z is not None else None

    doffset = pulled.offset
    dkernel: list[Array | None] = [None] * len(dy)
    dbias: list[Array | None] = [None] * len(dy)
    from_bias = of_norm.offset is not None and not needs_dz
    for i in used:
        if (dtype := dtypes.kernel[i]) is not None:
            if z_eight is not None:
                sums = jnp.promote_types(dtype, dy[i].dtype)
                in_eight_bits = eight_bits.dkernel(dy[i], axes[i].features, z_eight, junction, sums)  # (13)
                dkernel[i] = jnp.moveaxis(in_eight_bits, -1, batch_dims).astype(dtype)
            else:
                assert z is not None
                of = dy[i]
                if norms is IN_JNP_ON_CPU:  # where XLA multiplies bfloat16 to float32, as shares are, in few layouts
                    of = of.astype(jnp.promote_types(dtype, of.dtype))
                dkernel[i] = _dkernel(of, z, axes[i], junction.precision, dtype)
        if from_bias or dtypes.bias[i] is not None:
            dtype = norms_in_jnp.compute_dtype(dy[i].dtype).name if from_bias else dtypes.bias[i]
            of_one = Junction(norm, features=(junction.features[i],))
            (sums,) = norms.column_sums(Arrays(dy=(dy[i],)), of_one, Arrays(bias=(dtype,)), batch_dims).bias
            dbias[i] = None if dtypes.bias[i] is None else sums.astype(dtypes.bias[i])
            if from_bias:
                share = _doffset_from(sums, kernels[i], axes[i])
                doffset = share if doffset is None else doffset + share
    doffset = None if doffset is None else doffset.astype(of_norm.offset)
    gradients = pulled._replace(y=None, offset=doffset, kernel=tuple(dkernel), bias=tuple(dbias))
    return jax.tree.map(lambda a: norms_in_jnp.with_batch(a, batch), gradients)


def _dz(dy: Array, kernel: Array, axes: Axes, junction: Junction) -> Array:
    """Term (14) for one product."""
    dtype = gradients_in_jnp.dtype_in_memory(dy.dtype)
    if junction.eight_bits:
        return eight_bits.dz(dy, kernel, axes.features, junction, dtype)  # (14)
    how: Any = {"precision": junction.precision, "preferred_element_type": dtype}
    return einsum(dy, axes.y, kernel.astype(dy.dtype), axes.kernel, axes.z, **how)  # (14)


def _dkernel(dy: Array, z: Array, axes: Axes, precision: Any, dtype: Any) -> Array:
    """Term (13) for one product, in `dtype`.

    dy first, then transposed, as JAX transposes a product. The other way round XLA's CPU backend (jaxlib from 0.10.2
    on) returns garbage for the sum over examples of a product, if rows have several axes and dy is a broadcast, such as
    a mean's cotangent: `tests/operators/test_shared_operands.py`.
    """
    how = {"precision": precision, "preferred_element_type": jnp.promote_types(dtype, dy.dtype)}
    transposed = sorted(axes.kernel, key=lambda label: label not in axes.y)
    dkernel = einsum(dy, axes.y, z.astype(dy.dtype), axes.z, transposed, **how)  # (13)
    return dkernel.transpose([transposed.index(label) for label in axes.kernel]).astype(dtype)


def _doffset_from(dbias: Array, kernel: Array, axes: Axes) -> Array:
    """The second form of (15), for dbias [*batch, *features] in the compute dtype; of the rank of x."""
    row = jnp.expand_dims(dbias, dbias.ndim - axes.features)
    doffset = jnp.sum(kernel.astype(dbias.dtype) * row, axis=range(-axes.features, 0))  # (15)
    return jnp.expand_dims(doffset, axes.without(axes.bias))


forward_cpu = functools.partial(forward, norms=IN_JNP_ON_CPU)
backward_cpu = functools.partial(backward, norms=IN_JNP_ON_CPU)
forward_tpu = functools.partial(forward, norms=IN_JNP_ON_TPU)
backward_tpu = functools.partial(backward, norms=IN_JNP_ON_TPU)

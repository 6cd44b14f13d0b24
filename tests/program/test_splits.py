"""Tests: kernels launched and bytes communicated where arrays are split, on eight H200s."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jln
import program
from absent_gpu import MB, H, M, N, gradient, launches, struct

SUM, GATHER, SCATTER = "all-reduce", "all-gather", "reduce-scatter"


def on(spec, sizes):
    return NamedSharding(program.mesh("h200", sizes, ("data", "tensor")), P(*spec))


def on_mesh(*shape, spec=(), dtype="bfloat16", sizes=(4, 2)):
    return struct(*shape, dtype=dtype, sharding=on(spec, sizes))


def communicated(f, arguments):
    """Return kinds and bytes; a gather's bytes are its result's, a scatter's its operand's."""
    return sorted((c.kind, c.bytes) for c in program.compile_for(f, *arguments, devices=8).collectives)


def placed(step, arguments):
    """Return a step whose gradients have their arguments' shardings."""

    def placed_as_given(*a):
        return jax.tree.map(lambda g, like: jax.lax.with_sharding_constraint(g, like.sharding), step(*a), arguments)

    return placed_as_given


def norm(spec, dtype="float32", of_parameters=()):
    """Return x and the parameters of a norm."""
    return on_mesh(16, M, H, spec=spec), *[on_mesh(H, spec=of_parameters, dtype=dtype)] * 2


def linear(kernel_spec, features=(N,), kernel_dtype="float32"):
    """Return x, with its rows split over "data", and the parameters."""
    kernel = on_mesh(H, *features, spec=kernel_spec, dtype=kernel_dtype)
    bias = on_mesh(*features, spec=kernel_spec[1:], dtype="float32")
    scale = on_mesh(H, dtype="float32")
    return on_mesh(16, M // 8, H, spec=("data",)), scale, scale, kernel, bias


DATA, BOTH, SPLIT_H = ("data",), (("data", "tensor"),), ("data", None, "tensor")
DZ = 4 * M // 8 * H  # elements of z's cotangent on a device
VECTORS = 4 * (2 * H + N // 2)
OF_HEADS = linear((None, None, "tensor"), (3, 8, N // 24), "bfloat16")
of_norm, of_linear = gradient(jln.layer_norm), gradient(jln.layer_norm_linear, 5)
by_triton = functools.partial(jln.layer_norm, implementation="triton")
# A function or a step, its arguments, and what devices send each other.
TABLE = {
    # The means over H are communicated, 4 bytes a row and sum, and not x.
    "H": (jln.layer_norm, norm(SPLIT_H, of_parameters=("tensor",)), [(SUM, 4 * 4 * M)] * 2),
    # Kernels need whole rows, and what is named runs.
    "H, by Triton": (by_triton, norm(SPLIT_H)[:1], [(GATHER, 2 * 4 * M * H)]),
    "a Linear's rows": (of_linear, linear(()), [(SUM, 4 * (H * N + 2 * H + N))]),
    # The gradient of a 16-bit kernel is added up in its own dtype, but that of few features with the vectors.
    "a kernel of 16 bits": (of_linear, linear((), kernel_dtype="bfloat16"), [(SUM, 4 * (2 * H + N)), (SUM, 2 * H * N)]),
    "few features": (of_linear, linear((), (128,), "bfloat16"), [(SUM, 4 * (H * 128 + 2 * H + 128))]),
    # As plain jnp: nothing forward; backward dz is added up over "tensor", in the dtype of y, the rest over "data".
    "features": (of_linear, linear((None, "tensor")), [(SUM, 4 * DZ), (SUM, 4 * H * N // 2 + VECTORS)]),
    "heads, in 16 bits": (of_linear, OF_HEADS, [(SUM, VECTORS), (SUM, 2 * DZ), (SUM, 2 * H * N // 2)]),
}


@pytest.mark.parametrize("split", TABLE)
def test_arrays_that_are_split(split):
    function, arguments, expected = TABLE[split]
    assert communicated(function, arguments) == expected


@pytest.mark.parametrize(("spec", "dtype", "megabytes"), [(DATA, "float32", 126), (BOTH, "bfloat16", 67)])
def test_each_gpu_computes_its_own_rows(spec, dtype, megabytes):
    """One all-reduce carries dscale and doffset, in float32 for 16-bit parameters too."""
    report = program.compile_for(of_norm, *norm(spec, dtype), devices=8)
    assert launches(report) == [1, 1, 1] and round(report.bytes_total / MB) <= megabytes
    assert [(c.kind, c.bytes) for c in report.collectives] == [(SUM, 2 * 4 * H)]


def test_kernels_run_where_mesh_axes_are_left_to_the_compiler():
    """Kernels run on each device's rows in a shard_map over pipeline stages alone; only gradients are summed."""
    mesh = program.mesh("h200", (2, 2, 2), ("stage", "data", "tensor"))

    @jax.shard_map(mesh=mesh, in_specs=P("stage"), out_specs=P("stage"), axis_names={"stage"})
    def stage(*arrays):
        return jln.layer_norm(*(a[0] for a in arrays))[None]

    x = struct(2, 16, M, H, sharding=NamedSharding(mesh, P("stage", "data")))
    parameters = [struct(2, H, dtype="float32", sharding=NamedSharding(mesh, P("stage")))] * 2
    report = program.compile_for(gradient(stage), x, *parameters, devices=8)
    assert launches(report) == [1, 1, 1]
    assert [(c.kind, c.bytes) for c in report.collectives] == [(SUM, 2 * 4 * H)]


def test_layers_of_16_bit_kernels_take_no_more_all_reduces_than_plain_jnp():
    """An all-reduce has one type: the float32 vectors of all layers go together, and the 16-bit kernels as they are."""
    x, scale, _, kernel, bias = linear((), kernel_dtype="bfloat16")
    layer = (scale, scale, kernel, bias, on_mesh(N, H))

    def network(x, layers):
        for *arrays, back in layers:
            x = x + jnp.tanh(jln.layer_norm_linear(x, *arrays)) @ back
        return jnp.sum(jnp.sin(x.astype("float32")))

    found = communicated(jax.grad(network, 1), (x, [layer] * 2))
    assert {kind for kind, _ in found} == {SUM} and len(found) <= 2
    assert sum(size for _, size in found) == 2 * 4 * (2 * H + N) + 2 * 2 * 2 * H * N


@pytest.mark.parametrize(("features", "parts"), [(128, ("data", "tensor")), (N, ("data",))])
def test_gradients_asked_for_in_parts_are_scattered(features, parts):
    """Gradients are scattered over the axes that split the rows, and summed over an axis that splits rows alone."""
    kernel, bias = on_mesh(H, features, spec=(parts,)), on_mesh(features, spec=(parts,), dtype="float32")
    scale = on_mesh(H, spec=(parts,), dtype="float32")
    arguments = on_mesh(16, M // 8, H, spec=BOTH), scale, scale, kernel, bias
    found = communicated(placed(of_linear, arguments), arguments)
    vectors = 4 * (2 * H + features)
    sums = [vectors + 4 * H * features] if features == 128 else [vectors, 2 * H * features]
    added = [] if len(parts) == 2 else [(SUM, size // 4) for size in sums]
    assert [c for c in found if c[0] != GATHER] == added + [(SCATTER, size) for size in sums]


# Megatron's sequence parallelism: x of a device has a part of the sequence, z and its cotangent all of it.
on_sequences = functools.partial(on_mesh, sizes=(2, 4))
B, T, WIDTH = 4, 512, 256
GATHERED = 2 * B // 2 * T * WIDTH  # bytes of z in 16 bits on a device
BY_ROWS, BY_FEATURES = ("data", "tensor"), ("data", None, "tensor")
FEATURES = {"many": ((1024,),), "few": ((128,),), "several": ((1024,), (256,), (256,)), "heads": ((8, 128), (4, 128))}
# Bytes of the parameters' gradients on a device: of few features in float32, of others' kernels in 16 bits.
SUMMED = {"many": 133120, "few": 34816, "several": 198656, "heads": 198656}


def of_sequences(features):
    """Return x, scale, offset and kernels."""
    scale = on_sequences(WIDTH, dtype="float32")
    kernels = tuple(on_sequences(WIDTH, *f, spec=(None, "tensor")) for f in FEATURES[features])
    return on_sequences(B, T, WIDTH, spec=BY_ROWS), scale, scale, kernels


def asked(a, spec):
    return jax.tree.map(lambda a: jax.lax.with_sharding_constraint(a, on(spec, (2, 4))), a)


def layer(*arguments):
    return asked(jln.layer_norm_linear(*arguments), BY_FEATURES)


def test_z_is_gathered_once_forward():
    assert communicated(layer, of_sequences("several")) == [(GATHER, GATHERED)]


@pytest.mark.parametrize("features", FEATURES)
def test_z_is_gathered_and_dz_scattered_in_16_bits(features):
    """The gradient, whose loss reads y, gathers twice and scatters dz once, which plain jnp does in float32."""
    arguments = of_sequences(features)
    found = communicated(placed(gradient(layer, 4), arguments), arguments)
    assert [c for c in found if c[0] != SUM] == [(GATHER, GATHERED)] * 2 + [(SCATTER, GATHERED)]
    assert sum(size for kind, size in found if kind == SUM) <= SUMMED[features]


@pytest.mark.parametrize("names", [(), ("z",)])
def test_a_policy_chooses_whether_z_is_gathered_again(names):
    """A norm and Linears by themselves hold the gathered z: under a checkpoint where the policy names it."""

    def of_z(x, scale, offset, kernels):
        z = checkpoint_name(asked(jln.layer_norm(x, scale, offset), ("data",)), "z")
        return asked(tuple(z @ kernel for kernel in kernels), BY_FEATURES)

    arguments = of_sequences("several")
    step = gradient(jax.checkpoint(of_z, policy=jax.checkpoint_policies.save_only_these_names(*names)), 4)
    found = communicated(placed(step, arguments), arguments)
    assert [c for c in found if c[0] == GATHER] == [(GATHER, GATHERED)] * (1 if names else 2)


@pytest.mark.parametrize("features", [None, "many"])
def test_a_scatter_feeds_local_rows(features):
    """One scatter adds up the shares of a product by rows, the norm is local, and only a product gathers z."""
    hidden, lead = on_sequences(B, T, 1024, spec=BY_FEATURES), on_sequences(1024, WIDTH, spec=("tensor",))
    residual, scale, _, kernels = of_sequences(features or "few")

    def behind_a_product(hidden, lead, residual, scale, kernels):
        if features is None:
            y, total = jln.add_rms_norm(hidden @ lead, residual, scale)
            return asked(y, BY_ROWS), total
        y, total = jln.add_rms_norm_linear(hidden @ lead, residual, scale, kernels)
        return asked(y, BY_FEATURES), total

    found = communicated(behind_a_product, (hidden, lead, residual, scale, kernels))
    assert found == [(GATHER, GATHERED)] * (features is not None) + [(SCATTER, GATHERED)]

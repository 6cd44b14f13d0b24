"""Rung 4: kernels launched and bytes communicated where arrays are split, on eight H200s."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from transformed import H, M, N, gradient, launches

import jln
import program
from absent_gpu import struct

MESH = ("h200", (4, 2), ("data", "tensor"))


def on_mesh(*shape, spec=(), dtype="bfloat16"):
    return struct(*shape, dtype=dtype, sharding=NamedSharding(program.mesh(*MESH), P(*spec)))


def communicated(report):
    return sorted((c.kind, c.bytes) for c in report.collectives)


@pytest.mark.parametrize("split", [("data",), (("data", "tensor"),)], ids=str)
def test_norm_with_rows_split(split):
    """Each GPU computes its own rows, and one all-reduce carries dscale and doffset."""
    parameters = [on_mesh(H, dtype="float32")] * 2
    report = program.compile_for(gradient(jln.layer_norm), on_mesh(16, M, H, spec=split), *parameters, devices=8)
    assert launches(report) == [1, 1, 1]
    assert communicated(report) == [("all-reduce", 2 * 4 * H)]
    one = program.compile_for(
        gradient(jln.layer_norm),
        struct(16 * M // (4 if split == ("data",) else 8), H),
        *[struct(H, dtype="float32")] * 2,
    )
    assert report.bytes_total <= 1.01 * one.bytes_total


def test_shares_of_16_bit_parameters_are_added_up_in_float32():
    parameters = [on_mesh(H)] * 2
    step = gradient(jln.layer_norm)
    report = program.compile_for(step, on_mesh(16, M, H, spec=("data",)), *parameters, devices=8)
    assert communicated(report) == [("all-reduce", 2 * 4 * H)]


def test_norm_with_h_split():
    """A split H has the means over H communicated, 4 bytes a row and sum, and not x."""
    x = on_mesh(16, M, H, spec=("data", None, "tensor"))
    report = program.compile_for(jln.layer_norm, x, *[on_mesh(H, spec=("tensor",), dtype="float32")] * 2, devices=8)
    assert communicated(report) == [("all-reduce", 4 * 4 * M)] * 2


def in_a_stage(f):
    """Return `f` in a shard_map over pipeline stages, which leaves "data" and "tensor" to the compiler."""

    def stage(*arrays):
        return jax.tree.map(lambda a: a[None], f(*(a[0] for a in arrays)))

    specs = {"in_specs": P("stage"), "out_specs": P("stage"), "axis_names": {"stage"}}
    return jax.shard_map(stage, mesh=program.mesh("h200", (2, 2, 2), ("stage", "data", "tensor")), **specs)


def test_kernels_run_where_mesh_axes_are_left_to_the_compiler():
    """Kernels run on each device's rows, and only parameters' gradients are communicated, as with plain jnp."""
    on = NamedSharding(program.mesh("h200", (2, 2, 2), ("stage", "data", "tensor")), P("stage", "data"))
    x = struct(2, 16, M, H, sharding=on)
    parameters = [struct(2, H, dtype="float32", sharding=NamedSharding(on.mesh, P("stage")))] * 2
    report = program.compile_for(gradient(in_a_stage(jln.layer_norm)), x, *parameters, devices=8)
    plain = program.compile_for(gradient(in_a_stage(jln.reference.layer_norm)), x, *parameters, devices=8)
    assert launches(report) == [1, 1, 1]
    kinds, of_plain = ([c.kind for c in r.collectives] for r in (report, plain))
    assert set(kinds) == set(of_plain) == {"all-reduce"} and len(kinds) <= len(of_plain)
    assert sum(c.bytes for c in report.collectives) <= sum(c.bytes for c in plain.collectives)


def test_named_triton_gathers_h():
    """A split H is gathered for implementation="triton", as the kernels need whole rows and what is named runs."""
    x = on_mesh(16, M, H, spec=("data", None, "tensor"))
    report = program.compile_for(lambda x: jln.layer_norm(x, implementation="triton"), x, devices=8)
    assert launches(report) == [1]
    assert communicated(report) == [("all-gather", 2 * 4 * M * H)]


def linear(kernel_spec, features=(N,), kernel_dtype="float32"):
    """Return x, with its rows split over "data", and the parameters."""
    kernel = on_mesh(H, *features, spec=kernel_spec, dtype=kernel_dtype)
    bias = on_mesh(*features, spec=kernel_spec[1:], dtype="float32")
    scale = on_mesh(H, dtype="float32")
    return on_mesh(16, M // 8, H, spec=("data",)), scale, scale, kernel, bias


def test_linear_with_rows_split():
    report = program.compile_for(gradient(jln.layer_norm_linear, 5), *linear(()), devices=8)
    assert communicated(report) == [("all-reduce", 4 * (H * N + 2 * H + N))]


def test_linear_with_a_16_bit_kernel():
    """The gradient of a 16-bit kernel is added up in its own dtype, those of the vectors in float32."""
    report = program.compile_for(gradient(jln.layer_norm_linear, 5), *linear((), kernel_dtype="bfloat16"), devices=8)
    assert communicated(report) == [("all-reduce", 4 * (2 * H + N)), ("all-reduce", 2 * H * N)]


def test_few_features_of_a_16_bit_kernel():
    """The fused operator adds up all its parameters' gradients in float32, in one all-reduce."""
    report = program.compile_for(gradient(jln.layer_norm_linear, 5), *linear((), (128,), "bfloat16"), devices=8)
    assert communicated(report) == [("all-reduce", 4 * (H * 128 + 2 * H + 128))]


def test_layers_of_16_bit_kernels_take_no_more_all_reduces_than_plain_jnp():
    """Layers with 16-bit kernels take no more all-reduces than plain jnp's, and fewer bytes.

    An all-reduce has one element type, and XLA joins those of equal type. The float32 vectors of all layers go
    together, and the 16-bit kernels go as they are. Plain jnp adds up half of the kernels in float32.
    """
    x, scale, _, kernel, bias = linear((), kernel_dtype="bfloat16")
    layer = (scale, scale, kernel, bias, on_mesh(N, H))

    def step(module):
        def network(x, layers):
            for *arrays, back in layers:
                x = x + jnp.tanh(module.layer_norm_linear(x, *arrays)) @ back
            return jnp.sum(jnp.sin(x.astype("float32")))

        return jax.grad(network, 1)

    ours, plain = (communicated(program.compile_for(step(m), x, [layer] * 2, devices=8)) for m in (jln, jln.reference))
    assert {kind for kind, _ in ours} == {"all-reduce"} and len(ours) <= len(plain)
    vectors, kernels = 2 * 4 * (2 * H + N), 2 * 2 * 2 * H * N
    assert sum(size for _, size in ours) == vectors + kernels
    assert sum(size for _, size in plain) == vectors + kernels * 3 // 2


# One axis of features, and an axis of heads behind another axis.
@pytest.mark.parametrize(("features", "spec"), [((N,), (None, "tensor")), ((3, 8, N // 24), (None, None, "tensor"))])
@pytest.mark.parametrize("kernel_dtype", ["float32", "bfloat16"])
def test_linear_with_features_split(kernel_dtype, features, spec):
    """A Linear with split features communicates what plain JAX's does: nothing in the forward pass.

    In the backward pass dz is added up over "tensor", in the dtype of y, and the gradients of parameters over "data",
    the vectors' in float32.
    """
    arguments = linear(spec, features, kernel_dtype)
    forward = program.compile_for(jln.layer_norm_linear, *arguments, devices=8)
    assert communicated(forward) == []
    report = program.compile_for(gradient(jln.layer_norm_linear, 5), *arguments, devices=8)
    itemsize = jnp.dtype(kernel_dtype).itemsize
    dz, dkernel, vectors = itemsize * 4 * M // 8 * H, itemsize * H * N // 2, 4 * (2 * H + N // 2)
    of_parameters = [dkernel + vectors] if kernel_dtype == "float32" else [dkernel, vectors]
    assert communicated(report) == sorted(("all-reduce", size) for size in (dz, *of_parameters))


def test_linear_with_a_kernel_stored_in_parts():
    """A kernel stored in parts (FSDP) is gathered, and its gradient, asked for in parts, is added up by a scatter."""
    arguments = linear(("data",))

    def step(*a):
        gradients = gradient(jln.layer_norm_linear, 5)(*a)
        return [
            jax.lax.with_sharding_constraint(g, like.sharding) for g, like in zip(gradients, arguments, strict=True)
        ]

    report = program.compile_for(step, *arguments, devices=8)
    kinds = [c.kind for c in report.collectives]
    assert sorted(set(kinds)) == ["all-gather", "all-reduce", "reduce-scatter"]
    assert ("reduce-scatter", 4 * H * N) in communicated(report)
    assert ("all-reduce", 4 * (2 * H + N)) in communicated(report)


@pytest.mark.parametrize("features", [128, N])
def test_gradients_asked_for_in_parts_are_scattered(features):
    """Gradients asked for in parts are all scattered over the axes that split the rows.

    Over an axis of the rows that splits no gradient the parts are added up by an all-reduce.
    """

    def step(*arguments):
        def call(*a):
            gradients = gradient(jln.layer_norm_linear, 5)(*a)
            pairs = zip(gradients, arguments, strict=True)
            return [jax.lax.with_sharding_constraint(g, like.sharding) for g, like in pairs]

        return communicated(program.compile_for(call, *arguments, devices=8))

    def arguments(*parts):
        kernel, bias = on_mesh(H, features, spec=(parts,)), on_mesh(features, spec=(parts,), dtype="float32")
        scale = on_mesh(H, spec=(parts,), dtype="float32")
        return on_mesh(16, M // 8, H, spec=(("data", "tensor"),)), scale, scale, kernel, bias

    vectors = 4 * (2 * H + features)
    sums = [vectors + 4 * H * features] if features == 128 else [vectors, 2 * H * features]
    scattered = [("reduce-scatter", size) for size in sums]
    assert [c for c in step(*arguments("data", "tensor")) if c[0] != "all-gather"] == scattered
    of_parts = [("all-reduce", size // 4) for size in sums]
    assert [c for c in step(*arguments("data")) if c[0] != "all-gather"] == of_parts + scattered

"""Rung 4: kernels launched and bytes communicated when a step is transformed, on one H200 and on eight.

`pytest -n0 -s --confcutdir=tests/program tests/program/test_transforms.py -k vmap` prints what vmaps move.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jln
from absent_gpu import struct, triton_kernels
from jln import program

M, H, N = 2048, 1024, 3072
save_statistics = jax.checkpoint_policies.save_only_these_names(jln.STATISTICS)


def launches(report):
    """Return how often each Triton kernel of the program runs, in the order in which they first run."""
    return [k.times for k in triton_kernels(report)]


def gradient(f, n=3):
    return jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a).astype("float32"))), range(n))


def layers(body):
    def network(x, *stacked):
        return jax.lax.scan(lambda x, parameters: (body(jnp.sin(x), *parameters), None), x, stacked)[0]

    return network


def scale_and_offset(*lead):
    return struct(*lead, H, dtype="float32"), struct(*lead, H, dtype="float32")


over_x = (0, None, None)
TRANSFORMED = {
    "grad": lambda f: (gradient(f), struct(M, H), *scale_and_offset()),
    "vmap(grad)": lambda f: (jax.vmap(gradient(f), over_x), struct(4, M, H), *scale_and_offset()),
    "grad(vmap)": lambda f: (gradient(jax.vmap(f, over_x)), struct(4, M, H), *scale_and_offset()),
    "vmap(vmap(grad))": lambda f: (
        jax.vmap(jax.vmap(gradient(f), over_x), (0, 0, 0)),
        struct(2, 4, M, H),
        *scale_and_offset(2),
    ),
    "cond": lambda f: (
        lambda p, *a: jax.lax.cond(p, gradient(f), lambda *a: a, *a),
        struct(dtype="bool"),
        struct(M, H),
        *scale_and_offset(),
    ),
}


@pytest.mark.parametrize("forward_mode", [False, True])
@pytest.mark.parametrize("name", TRANSFORMED)
def test_one_kernel_forward_and_one_backward(name, forward_mode):
    """A step has one kernel forward, one backward, and one that adds up shares of the parameters' gradients."""
    step, *arguments = TRANSFORMED[name](lambda *a: jln.layer_norm(*a, forward_mode=forward_mode))
    assert launches(program.compile_for(step, *arguments)) == [1, 1, 1]


@pytest.mark.parametrize("forward_mode", [False, True])
@pytest.mark.parametrize(
    "policy", [None, save_statistics, "nothing"], ids=["plain", "statistics saved", "nothing saved"]
)
def test_three_layers_in_a_scan(policy, forward_mode):
    """Checkpointed layers in a scan run the forward kernel again only where not even the statistics are saved."""

    def body(*a):
        return jln.layer_norm(*a, forward_mode=forward_mode)

    wrapped = jax.checkpoint(body, policy=None if policy == "nothing" else policy) if policy else body
    report = program.compile_for(gradient(layers(wrapped)), struct(M, H), *scale_and_offset(3))
    assert launches(report) == [3] * (4 if policy == "nothing" else 3)


def test_forward_mode_keeps_no_more():
    """The arrays kept between forward and backward are the same with forward_mode as without."""

    def held(forward_mode):
        def step(x, scale, offset):
            y, pullback = jax.vjp(lambda *a: jln.layer_norm(*a, forward_mode=forward_mode), x, scale, offset)
            return y, jax.tree.leaves(pullback)

        return program.compile_for(step, struct(M, H), *scale_and_offset()).output_bytes

    # Without forward_mode there is an array without elements too, whose shape says what is wanted. Of it a program
    # returns the address, 8 bytes.
    assert held(True) == held(False) - 8


def test_vmap_over_scales_writes_no_copies_of_x():
    """A vmap over 64 scales, of 32 rows each or the same 32, moves little more than one scale over 64 x 32 rows."""
    scale, offset = scale_and_offset()
    scales = struct(64, H, dtype="float32")
    flat = program.compile_for(gradient(jln.layer_norm), struct(64 * 32, H), scale, offset)
    own = program.compile_for(jax.vmap(gradient(jln.layer_norm), (0, 0, None)), struct(64, 32, H), scales, offset)
    same = program.compile_for(jax.vmap(gradient(jln.layer_norm), (None, 0, None)), struct(32, H), scales, offset)
    assert own.bytes_total <= 1.2 * flat.bytes_total
    assert same.bytes_total <= flat.bytes_total


@pytest.mark.parametrize(("lead", "wanted"), [((256, 8), 3), ((16, 8, 16), 1)], ids=["groups", "rows"])
def test_vmap_over_an_axis_that_is_not_in_front_transposes_nothing(lead, wanted):
    """A vmap over the second axis moves what one over the first does; of x alone where it has rows behind it, too."""
    middle = jax.vmap(jln.layer_norm, (1, None, None), 1)
    report = program.compile_for(gradient(middle, wanted), struct(*lead, H), *scale_and_offset())
    first = program.compile_for(
        gradient(jax.vmap(jln.layer_norm, over_x), wanted), struct(8, 256, H), *scale_and_offset()
    )
    assert report.bytes_total <= 1.01 * first.bytes_total


def tell(own, plain):
    print(f"\n{own.bytes_total / 1e6:.0f} MB, {own.bytes_total / plain.bytes_total:.2f} of plain jnp")


def with_gradients(f):
    def step(dy, *operands):
        y, pullback = jax.vjp(f, *operands)
        return y, pullback(dy)

    return step


def both_ways(f, *operands):
    """The report of a step that returns the result of `f`, and all gradients under a cotangent that is given."""

    return program.compile_for(with_gradients(f), jax.eval_shape(f, *operands), *operands)


@pytest.mark.parametrize("around", [False, True], ids=["inside", "around"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_examples_with_parameters_of_their_own_stay_where_they_lie(axis, around):
    """A vmap with parameters of each example moves every array once: in front, between rows, and before H.

    In the middle it moved 2.6 times as much, with x, its gradient, and their results transposed.
    """
    rows = [(32, 8, 2048, 128), (8, 32, 2048, 128), (8, 2048, 32, 128)][axis]
    own, x = struct(32, 128), struct(*rows)

    def f(x, residual, scale, offset, gate):
        return jln.add_layer_norm(x, residual, scale, offset, gate=gate)

    def of_one(*a):
        y, pullback = jax.vjp(f, *a[:5])
        return y, pullback(a[5:])

    places = (axis, axis, 0, None, 0)
    operands = x, x, own, struct(128), own
    if around:
        gradients = (axis, axis, 0, 0, 0)
        mapped = jax.vmap(of_one, (*places, axis, axis), ((axis, axis), gradients))
        report = program.compile_for(mapped, *operands, x, x)
    else:
        report = both_ways(jax.vmap(f, places, axis), *operands)
    of_rows, numbers = 2 * x.size * 10, 2 * 4 * 2 * x.size // 128
    assert report.bytes_total <= 1.01 * (of_rows + numbers)


def gated_sum(module, **how):
    return lambda x, residual, scale, offset, gate: module.add_layer_norm(x, residual, scale, offset, gate=gate, **how)


# A function of a module, the places of examples in the operands and in the result, the shapes, and the most that is
# moved beside plain jnp.
OF_EXAMPLES = {
    "in the middle": (lambda m: m.rms_norm, (2, 0), 2, ((8, 2048, 32, 128), (32, 128)), 0.83),
    "behind H": (lambda m: m.rms_norm, (3, 0), 3, ((8, 2048, 128, 32), (32, 128)), 1.17),
    "a residual for all": (
        lambda m: m.add_rms_norm,
        (2, None, None),
        2,
        ((8, 2048, 32, 128), (8, 2048, 128), (128,)),
        1.0,
    ),
    "a gated branch for all": (
        gated_sum,
        (None, 2, 0, 0, 0),
        2,
        ((8, 2048, 128), (8, 2048, 32, 128), *[(32, 128)] * 3),
        1.001,
    ),
    "a gated branch for all, behind H": (
        gated_sum,
        (None, 3, 0, 0, 0),
        3,
        ((8, 2048, 128), (8, 2048, 128, 32), *[(32, 128)] * 3),
        0.94,
    ),
}


@pytest.mark.parametrize("around", [False, True], ids=["inside", "around"])
@pytest.mark.parametrize(("f", "axes", "out", "shapes", "most"), OF_EXAMPLES.values(), ids=OF_EXAMPLES)
def test_vmap_of_norms_beside_plain_jnp(f, axes, out, shapes, most, around):
    """Examples that lie where a kernel does not take them move what XLA moves, and what they share stays one array.

    Behind H plain jnp reads x once for the sums of both passes, which in a model are apart: XLA reads it once more.
    """

    def report(f):
        mapped, operands = jax.vmap(f, axes, out), [struct(*shape) for shape in shapes]
        if not around:
            return both_ways(mapped, *operands)
        step = jax.vmap(with_gradients(f), (out, *axes), (out, tuple(a or 0 for a in axes)))
        return program.compile_for(step, jax.eval_shape(mapped, *operands), *operands)

    own, plain = report(f(jln)), report(f(jln.reference))
    tell(own, plain)
    assert own.bytes_total <= most * plain.bytes_total and own.temp_bytes <= 1.01 * plain.temp_bytes


def both_sides(module, **how):
    return lambda *a: module.rms_norm_add_rms_norm(*a, **how)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("f", "columns"), [(gated_sum, 3), (both_sides, 2)], ids=["gate", "both sides"])
def test_sums_by_xla_beside_plain_jnp(f, columns, dtype):
    """The total's cotangent, of which several gradients are made, is in memory once, and no wider than total.

    Plain jnp makes rstd with the sums of the backward pass in one read, which in a model are apart.
    """
    x, column = struct(8192, 4096, dtype=dtype), struct(4096, dtype=dtype)
    operands = x, x, *[column] * columns
    own, plain = (both_ways(g, *operands) for g in (f(jln, implementation="xla"), f(jln.reference)))
    tell(own, plain)
    once_more = x.size * x.dtype.itemsize
    assert own.bytes_total <= plain.bytes_total + 1.02 * once_more and own.temp_bytes <= 1.02 * plain.temp_bytes


@pytest.mark.parametrize("n", [64, 4096], ids=["few", "many"])
def test_vmap_that_shares_a_linear_has_one_gradient_of_its_kernel(n):
    """A vmap with a scale and an offset of each example moves what an axis of examples does, and holds no more."""
    x, own, kernel, bias = struct(4, 2048, 4096), struct(4, 4096), struct(4096, n), struct(n)
    mapped = [jax.vmap(m.layer_norm_linear, (0, 0, 0, None, None)) for m in (jln, jln.reference)]
    batched, plain = (both_ways(f, x, own, own, kernel, bias) for f in mapped)
    tell(batched, plain)
    own_axis = struct(4, 1, 4096)
    flat = both_ways(jln.layer_norm_linear, x, own_axis, own_axis, kernel, bias)
    assert batched.bytes_total <= 1.001 * flat.bytes_total and batched.temp_bytes <= 1.001 * flat.temp_bytes


def test_examples_that_share_a_linear_take_its_one_kernel_forward():
    """A vmap that nobody differentiates, with a scale of each example, writes no norm to memory."""
    x, own = struct(4, 2048, 2048), struct(4, 2048)
    report = program.compile_for(jax.vmap(jln.rms_norm_linear, (0, 0, None)), x, own, struct(2048, 64))
    assert len(triton_kernels(report)) == 1 and report.bytes_total <= 1.06 * 2 * x.size


@pytest.mark.parametrize("forward_mode", [False, True])
def test_examples_inside_of_the_derivative_are_rows(forward_mode):
    """The program of grad(vmap) over rows moves as many bytes as without vmap: no example has a dkernel of its own."""
    operands = (struct(16, 256, H), struct(H), struct(H), struct(H, N), struct(N))

    def f(*a):
        return jln.layer_norm_linear(*a, forward_mode=forward_mode)

    flat = program.compile_for(gradient(f, 5), *operands)
    batched = program.compile_for(gradient(jax.vmap(f, (0, *[None] * 4)), 5), *operands)
    assert batched.bytes_total == flat.bytes_total and batched.temp_bytes == flat.temp_bytes


def test_heads_inside_of_the_derivative_are_features():
    """A vmap over kernels that read one x moves what one kernel with an axis of heads does: x has one gradient.

    Heads that do not lie where the product has them are transposed, kernels and results, as plain jnp's are.
    """
    x, scale, kernel = struct(8, 1024, 2048), struct(2048), struct(2048, 32, 64)

    def step(f, dy, *kernel_first):
        return program.compile_for(lambda dy, *a: jax.vjp(f, *a)[1](dy), dy, x, scale, *kernel_first)

    flat = step(jln.rms_norm_linear, struct(8, 1024, 32, 64), kernel)
    in_place = step(jax.vmap(jln.rms_norm_linear, (None, None, 1), 2), struct(8, 1024, 32, 64), kernel)
    assert in_place.bytes_total == flat.bytes_total and in_place.temp_bytes == flat.temp_bytes
    in_front = jax.vmap(jln.rms_norm_linear, (None, None, 0))
    moved = step(in_front, struct(32, 8, 1024, 64), struct(32, 2048, 64))
    transposed = 2 * (2 * 2048 * 2048 * 2 + 8 * 1024 * 2048 * 2)  # kernel and dkernel, and dy, read and written
    assert moved.bytes_total <= flat.bytes_total + 1.01 * transposed


def test_what_is_not_differentiated_is_no_wider_call():
    """A vmap over kernels in front transposes none of them where x has no gradient: norm and product, as without."""
    x, scale, kernels = struct(8192, 2048), struct(2048), struct(32, 2048, 64)
    forward = program.compile_for(jax.vmap(jln.rms_norm_linear, (None, None, 0)), x, scale, kernels)
    arrays = 3 * 8192 * 2048 * 2 + 32 * 2048 * 64 * 2  # x, the norm's result written and read, y is as large
    assert forward.bytes_total <= 1.01 * (arrays + 8192 * 2048 * 2)


# By vmaps from the innermost, with the places of x, scale, kernel and bias in each, the shapes, and the most that is
# moved beside what plain jnp moves.
MIXED = {
    "experts": (((None, None, 0, None), (0, None, 0, None)), ((4, M, H), (H,), (4, 8, H, 512), (512,)), 0.87),
    "heads around experts": (
        ((0, None, 0, None), (None, None, 0, None)),
        ((4, M, H), (H,), (8, 4, H, 512), (512,)),
        0.8,
    ),
    "one expert each": (((0, None, 0, None),), ((8, M, H), (H,), (8, H, 512), (512,)), 0.79),
    "experts of members": (((0, 0, 0, None), (None, 0, 0, None)), ((8, M, H), (4, 8, H), (4, 8, H, 512), (512,)), 0.89),
    "members": (((None, 0, 0, None),), ((M, H), (8, H), (8, H, 512), (512,)), 0.92),
    "biases": (((None, None, None, 0),), ((M, H), (H,), (H, N), (8, N)), 0.87),
    "biases of rows": (((0, None, None, 0),), ((8, M, H), (H,), (H, 512), (8, 512)), 0.74),
}


@pytest.mark.parametrize(("vmaps", "shapes", "most"), MIXED.values(), ids=MIXED)
def test_vmap_of_some_arrays_and_not_of_others(vmaps, shapes, most):
    """Vmaps that mix rows with kernels, scales or biases of examples move less than plain jnp's, forward and backward.

    There is one norm of the rows, each product by itself, and nothing written for examples that share it.
    """

    def report(module):
        f = functools.reduce(jax.vmap, vmaps, module.rms_norm_linear)
        return program.compile_for(gradient(f, 4), *(struct(*shape) for shape in shapes))

    own, plain = report(jln), report(jln.reference)
    tell(own, plain)
    assert own.bytes_total <= most * plain.bytes_total and own.temp_bytes <= 1.01 * plain.temp_bytes


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

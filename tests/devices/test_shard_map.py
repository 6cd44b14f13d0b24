"""The operators in `jax.shard_map`, which checks what varies over the mesh and what does not."""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jln
from catalogue import OPERATORS
from jln._core.operation import Operation
from matrix import loss_by_name, mesh, operands

CLOSE = {"rtol": 1e-11, "atol": 1e-11}

if len(jax.devices()) < 8:
    pytest.skip("needs eight devices", allow_module_level=True)

# How operands are split, by their roles. "rows": the parameters are shared. "features": a device has y and dy of its
# own features, and dx is added up. "rows and parameters": every device of the second mesh axis has parameters of its
# own, which have an axis for it in front.
SPLITS = {
    "rows": {"activation": P("data", "tensor")},
    "features": {"kernel": P(None, "tensor"), "bias": P("tensor")},
    "rows and parameters": {
        "activation": P("data"),
        **dict.fromkeys(("scale", "offset", "kernel", "bias"), P("tensor")),
    },
}
CASES = [(name, split) for split in SPLITS for name, o in OPERATORS.items() if o.is_linear or split != "features"]


def placed(name, split):
    """Return the operands by name, how each is split, and the names of those with an axis of the mesh in front."""
    roles = {a.name: a.role for a in OPERATORS[name].arguments}
    own = [n for n, role in roles.items() if split == "rows and parameters" and role != "activation"]
    given = {n: jnp.stack([a, 2 * a]) if n in own else a for n, a in operands(name).items()}
    return given, {n: SPLITS[split].get(roles[n], P()) for n in given}, own


@pytest.mark.parametrize(("name", "split"), CASES)
def test_gradients_of_what_devices_share_are_added_up(name, split, implementation):
    """Gradients of what devices share are added up over the devices, and no others are.

    The loss is taken of all results outside of the `shard_map`, or of each device's results and added up inside.
    """
    given, specs, own = placed(name, split)
    function = functools.partial(getattr(jln, name), implementation=implementation)
    shard = functools.partial(jax.shard_map, mesh=mesh(), in_specs=(specs,))

    if split == "rows and parameters":

        def local(arrays):
            loss = loss_by_name(function)(arrays | {n: arrays[n][0] for n in own})
            return jax.lax.psum(loss, ("data", "tensor"))

        sharded = shard(local, out_specs=P())
    else:

        def local(arrays):
            result = function(**arrays)
            if split == "rows" or not OPERATORS[name].adds:
                return result
            y, total = result  # total varies, as all results do, wherever any argument does
            return y, jax.lax.pmean(total, "tensor")

        of_y = P("data", "tensor") if split == "rows" else P(None, None, "tensor")
        out_specs = OPERATORS[name].packed(
            of_y if r.name == "y" or split == "rows" else P() for r in OPERATORS[name].results
        )
        sharded = loss_by_name(lambda **arrays: shard(local, out_specs=out_specs)(arrays))

    def plain(arrays):
        whole = loss_by_name(getattr(jln.reference, name))
        return sum(whole(arrays | {n: arrays[n][i] for n in own}) for i in (range(2) if own else [0]))

    ours, expected = (jax.jit(jax.value_and_grad(f))(given) for f in (sharded, plain))
    chex.assert_trees_all_close(ours, expected, **CLOSE)


@pytest.mark.parametrize(("name", "split"), [c for c in CASES if c[1] != "rows and parameters"])
def test_a_result_that_varies_is_not_taken_for_a_copy(name, split, implementation):
    given, specs, _ = placed(name, split)
    function = functools.partial(getattr(jln, name), implementation=implementation)
    with pytest.raises(ValueError, match="out_specs"):
        jax.shard_map(lambda a: function(**a), mesh=mesh(), in_specs=(specs,), out_specs=P())(given)


# Axes of a mesh with a pipeline's stages, in several orders. All but "stage" are left to the compiler.
STAGED = [("stage", "data", "tensor"), ("data", "stage", "tensor"), ("data", "tensor", "stage")]


def by_stages(name, axes, given):
    """Return (loss, gradients) of two stages, each with its own arrays, twice: by a `shard_map` and by plain jnp."""
    staged = jax.make_mesh((2, 2, 2), axes, axis_types=(AxisType.Auto,) * 3)
    given = {n: jnp.stack([a, 2 * a]) for n, a in given.items()}
    roles = {a.name: a.role for a in OPERATORS[name].arguments}
    on = {"activation": P("stage", "data", None, "tensor"), "kernel": P("stage", None, "tensor")}
    put = {n: jax.device_put(a, NamedSharding(staged, on.get(roles[n], P("stage")))) for n, a in given.items()}

    def stage(arrays):
        results = getattr(jln, name)(**{n: a[0] for n, a in arrays.items()})
        return jax.tree.map(lambda a: a[None], results)

    def staged_results(**arrays):
        specs = {"mesh": staged, "in_specs": P("stage"), "out_specs": P("stage"), "axis_names": {"stage"}}
        return jax.shard_map(stage, **specs)(arrays)

    def one_by_one(**arrays):
        of_each = [getattr(jln.reference, name)(**{n: a[i] for n, a in arrays.items()}) for i in range(2)]
        return jax.tree.map(lambda *a: jnp.stack(a), *of_each)

    return (jax.jit(jax.value_and_grad(loss_by_name(f)))(a) for f, a in ((staged_results, put), (one_by_one, given)))


@pytest.fixture(params=["jnp", "kernels"])
def by(request, monkeypatch):
    """Run a test with jnp, and with jnp in the place of kernels, where JAX cannot look into it either."""
    if request.param == "kernels":
        monkeypatch.setattr(Operation, "_by_kernels", lambda self, *_: functools.partial(self._formula))


@pytest.mark.parametrize("axes", STAGED, ids="-".join)
@pytest.mark.parametrize("name", OPERATORS)
def test_over_some_axes(name, axes, by):
    """Each stage has parameters of its own; the compiler splits its rows, and H too where no kernels run."""
    chex.assert_trees_all_close(*by_stages(name, axes, operands(name)), **CLOSE)


@pytest.mark.parametrize("name", [name for name, o in OPERATORS.items() if o.is_linear])
def test_few_features_over_some_axes(name, by):
    """The norm and few features are one operation in float32, whose dx is a sum over the features."""
    given = {n: a.astype("float32") for n, a in operands(name).items()}
    chex.assert_trees_all_close(*by_stages(name, STAGED[0], given), rtol=1e-3, atol=1e-3)


def test_few_features_of_examples_over_some_axes(by):
    """The compiler adds up the Linear's gradients over the devices that split the examples, and not the scale's."""
    given = {n: a.astype("float32") for n, a in operands("rms_norm_linear").items()}
    given["scale"] = jnp.stack([given["scale"] * f for f in range(1, len(given["x"]) + 1)])[:, None]
    specs = {"x": P("stage", "data", "tensor"), "scale": P("stage", "data")}
    staged = jax.make_mesh((2, 2, 2), STAGED[0], axis_types=(AxisType.Auto,) * 3)
    given = {n: jnp.stack([a, 2 * a]) for n, a in given.items()}
    put = {n: jax.device_put(a, NamedSharding(staged, specs.get(n, P("stage")))) for n, a in given.items()}

    def of_stage(arrays):
        return jln.rms_norm_linear(**{n: a[0] for n, a in arrays.items()})[None]

    def staged_results(**arrays):
        how = {"mesh": staged, "in_specs": P("stage"), "out_specs": P("stage"), "axis_names": {"stage"}}
        return jax.shard_map(of_stage, **how)(arrays)

    def one_by_one(**arrays):
        return jax.vmap(lambda a: jln.reference.rms_norm_linear(**a))(arrays)

    got, expected = (
        jax.jit(jax.value_and_grad(loss_by_name(f)))(a) for f, a in ((staged_results, put), (one_by_one, given))
    )
    chex.assert_trees_all_close(got, expected, rtol=1e-3, atol=1e-3)


def test_sequence_parallelism_over_some_axes(by):
    """The compiler gathers x for the forward operation of few features; the backward one has the whole kernel."""
    staged = jax.make_mesh((2, 2, 2), STAGED[0], axis_types=(AxisType.Auto,) * 3)
    given = {n: jnp.stack([a, 2 * a]).astype("float32") for n, a in operands("layer_norm_linear").items()}
    specs = {"x": P("stage", "data", "tensor"), "kernel": P("stage", None, "tensor")}
    put = {n: jax.device_put(a, NamedSharding(staged, specs.get(n, P("stage")))) for n, a in given.items()}

    def of_stage(arrays):
        return jln.layer_norm_linear(**{n: a[0] for n, a in arrays.items()})[None]

    def by_features(**arrays):
        y = jax.shard_map(of_stage, mesh=staged, in_specs=P("stage"), out_specs=P("stage"), axis_names={"stage"})(
            arrays
        )
        y = jax.lax.with_sharding_constraint(y, NamedSharding(staged, P("stage", "data", None, "tensor")))
        return jnp.cumsum(y, 2)  # so that a row's place matters

    def one_by_one(**arrays):
        return jnp.cumsum(jax.vmap(lambda a: jln.reference.layer_norm_linear(**a))(arrays), 2)

    got, expected = (
        jax.jit(jax.value_and_grad(loss_by_name(f)))(a) for f, a in ((by_features, put), (one_by_one, given))
    )
    chex.assert_trees_all_close(got, expected, rtol=1e-3, atol=1e-3)


# Which operands differ between the examples of a vmap, by their roles.
EXAMPLES = [("activation",), ("activation", "kernel"), ("activation", "scale", "bias"), ("kernel", "scale")]
OF_EXAMPLES = [(n, own) for n, o in OPERATORS.items() for own in EXAMPLES if o.is_linear or "kernel" not in own]


@pytest.mark.parametrize("forward_mode", [False, True], ids=["reverse", "forward"])
@pytest.mark.parametrize(("name", "own"), OF_EXAMPLES)
def test_under_a_vmap_that_splits_its_examples(name, own, forward_mode):
    """`spmd_axis_name` has the operands with examples, and no others, vary over a mesh axis inside of a `shard_map`."""
    roles = {a.name: a.role for a in OPERATORS[name].arguments}
    given = {n: jnp.stack([a, 2 * a]) if roles[n] in own else a for n, a in operands(name).items()}
    specs = {n: P("data") if roles[n] == "activation" else P() for n in given}
    axes = {n: 0 if roles[n] in own else None for n in given}
    function = functools.partial(getattr(jln, name), forward_mode=forward_mode)
    shard = jax.shard_map(lambda a: function(**a), mesh=mesh(), in_specs=(specs,), out_specs=P("data"))

    def loss(of_one, **how):
        return loss_by_name(lambda **arrays: jax.vmap(of_one, (axes,), **how)(arrays))

    spread = loss(shard, spmd_axis_name="tensor")
    plain = loss(lambda a: getattr(jln.reference, name)(**a))
    ours, expected = (jax.jit(jax.value_and_grad(f))(given) for f in (spread, plain))
    chex.assert_trees_all_close(ours, expected, **CLOSE)

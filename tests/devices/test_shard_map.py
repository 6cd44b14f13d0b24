"""The operators in `jax.shard_map`, which checks what varies over the mesh and what does not."""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jln
from catalogue import FORMS
from jln._core.operation import Operation
from matrix import OPTIONAL, along, bind, every, gradient, loss_by_name, mesh, operands
from placements import CLOSE, by_role, placed, put

# One operator for each kind of operands.
NORMS = ("layer_norm", "add_rms_norm", "rms_norm_gated", "rms_norm_add_rms_norm")
LINEARS = ("layer_norm_linear", "add_rms_norm_linear")
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
CASES = [(name, split) for split in SPLITS for name in (*NORMS, *LINEARS) if name in LINEARS or split != "features"]


def compare(ours, given, plain, arrays, **close):
    """Compare losses of arguments by name, and all gradients: ours of what is given, and plain jnp's of the arrays."""
    got, expected = (jax.jit(jax.value_and_grad(f))(a) for f, a in ((ours, given), (plain, arrays)))
    chex.assert_trees_all_close(got, expected, **(close or CLOSE))


@pytest.mark.parametrize(("name", "split"), CASES)
def test_gradients_of_what_devices_share_are_added_up(name, split, implementation):
    """Gradients of what devices share are added up over the devices, and no others are.

    The loss is taken of all results outside of the `shard_map`, or of each device's results and added up inside. A
    result that varies is not taken for a copy.
    """
    specs = by_role(name, SPLITS[split])
    own = [n for n in specs if specs[n] == P("tensor") and split == "rows and parameters"]
    given = {n: jnp.stack([a, 2 * a]) if n in own else a for n, a in operands(name).items()}
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
            if split == "rows" or not FORMS[name].adds:
                return result
            y, total = result  # total varies, as all results do, wherever any argument does
            return y, jax.lax.pmean(total, "tensor")

        of_y = P("data", "tensor") if split == "rows" else P(None, None, "tensor")
        out_specs = FORMS[name].packed(of_y if r.name == "y" or split == "rows" else P() for r in FORMS[name].results)
        sharded = loss_by_name(lambda **arrays: shard(local, out_specs=out_specs)(arrays))
        with pytest.raises(ValueError, match="out_specs"):
            shard(lambda arrays: function(**arrays), out_specs=P())(given)

    def plain(arrays):
        whole = loss_by_name(getattr(jln.reference, name))
        return sum(whole(arrays | {n: arrays[n][i] for n in own}) for i in (range(2) if own else [0]))

    compare(sharded, given, plain, given)


H_AND_FEATURES = {"activation": P("data", None, "tensor"), "kernel": P(None, "tensor")}
# Axes of a mesh with a pipeline's stages, in several orders. All but "stage" are left to the compiler.
STAGED = [("stage", "data", "tensor"), ("data", "stage", "tensor"), ("data", "tensor", "stage")]


def compare_stages(name, given, specs, axes=STAGED[0], of_y=None, implementation=None, **close):
    """Compare two stages, each with its own arrays: in a `shard_map`, and by plain jnp one after the other.

    specs: how arrays are split, beside the stages in front. of_y: how y is asked for; then the order of rows matters.
    """
    staged = jax.make_mesh((2, 2, 2), axes, axis_types=(AxisType.Auto,) * 3)
    given = {n: jnp.stack([a, 2 * a]) for n, a in given.items()}
    specs = {n: P("stage", *specs.get(n, ())) for n in given}
    weighed = functools.partial(jnp.cumsum, axis=2) if of_y else lambda results: results

    def stage(arrays):
        of_one = {n: a[0] for n, a in arrays.items()}
        return jax.tree.map(lambda a: a[None], getattr(jln, name)(**of_one, implementation=implementation))

    def in_stages(**arrays):
        how = {"mesh": staged, "in_specs": P("stage"), "out_specs": P("stage"), "axis_names": {"stage"}}
        results = jax.shard_map(stage, **how)(arrays)
        return weighed(
            jax.lax.with_sharding_constraint(results, NamedSharding(staged, P("stage", *of_y))) if of_y else results
        )

    def one_by_one(**arrays):
        return weighed(jax.vmap(lambda arrays: getattr(jln.reference, name)(**arrays))(arrays))

    compare(loss_by_name(in_stages), put(given, specs, staged), loss_by_name(one_by_one), given, **close)


@pytest.fixture(params=["jnp", "kernels"])
def by(request, monkeypatch):
    """Run a test with jnp, and with jnp in the place of kernels, where JAX cannot look into it either."""
    if request.param == "kernels":
        monkeypatch.setattr(Operation, "_by_kernels", lambda self, *_: functools.partial(self._formula))


@pytest.mark.parametrize("axes", STAGED, ids="-".join)
@pytest.mark.parametrize("name", (*NORMS, *LINEARS))
def test_over_some_axes(name, axes, by):
    """Each stage has parameters of its own; the compiler splits its rows, and H too where no kernels run."""
    compare_stages(name, operands(name), by_role(name, H_AND_FEATURES), axes)


# Norm and few features are one operation in float32, whose dx is a sum over the features; its kernels are interpreted.
IN_ONE = {"rtol": 1e-3, "atol": 1e-3}


@pytest.mark.parametrize("name", LINEARS)
def test_few_features_over_some_axes(name, by):
    given = {n: a.astype("float32") for n, a in operands(name).items()}
    compare_stages(name, given, by_role(name, H_AND_FEATURES), **IN_ONE)


@pytest.mark.parametrize("name", ["layer_norm", "add_layer_norm_linear"])
def test_kernels_over_some_axes(name):
    given = {n: a.astype("float32") for n, a in operands(name).items()}
    compare_stages(name, given, by_role(name, {"activation": P("data")}), implementation="triton", **IN_ONE)


def test_few_features_of_examples_over_some_axes(by):
    """The compiler adds up the Linear's gradients over the devices that split the examples, and not the scale's."""
    given = {n: a.astype("float32") for n, a in operands("rms_norm_linear").items()}
    given["scale"] = jnp.stack([given["scale"] * f for f in range(1, len(given["x"]) + 1)])[:, None]
    specs = {"x": P("data", "tensor"), "scale": P("data")}
    compare_stages("rms_norm_linear", given, specs, **IN_ONE)


def test_sequence_parallelism_over_some_axes(by):
    """The compiler gathers x for the forward operation of few features; the backward one has the whole kernel."""
    given = {n: a.astype("float32") for n, a in operands("layer_norm_linear").items()}
    specs = {"x": P("data", "tensor"), "kernel": P(None, "tensor")}
    compare_stages("layer_norm_linear", given, specs, of_y=P("data", None, "tensor"), **IN_ONE)


# Which operands differ between the examples of a vmap, by their roles.
EXAMPLES = [("activation",), ("activation", "kernel"), ("activation", "scale", "bias"), ("kernel", "scale")]
OF_EXAMPLES = [(n, own) for n in (*NORMS, *LINEARS) for own in EXAMPLES if n in LINEARS or "kernel" not in own]


@pytest.mark.parametrize("forward_mode", [False, True], ids=["reverse", "forward"])
@pytest.mark.parametrize(("name", "own"), OF_EXAMPLES)
def test_under_a_vmap_that_splits_its_examples(name, own, forward_mode):
    """`spmd_axis_name` has the operands with examples, and no others, vary over a mesh axis inside of a `shard_map`."""
    roles = {a.name: a.role for a in FORMS[name].arguments}
    given = {n: jnp.stack([a, 2 * a]) if roles[n] in own else a for n, a in operands(name).items()}
    axes = {n: 0 if roles[n] in own else None for n in given}
    function = functools.partial(getattr(jln, name), forward_mode=forward_mode)
    specs = by_role(name, {"activation": P("data")})
    shard = jax.shard_map(lambda a: function(**a), mesh=mesh(), in_specs=(specs,), out_specs=P("data"))

    def loss(of_one, **how):
        return loss_by_name(lambda **arrays: jax.vmap(of_one, (axes,), **how)(arrays))

    plain = loss(lambda a: getattr(jln.reference, name)(**a))
    compare(loss(shard, spmd_axis_name="tensor"), given, plain, given)


# A `shard_map` over "data", which splits the rows, that leaves "tensor" explicit.

TRANSFORMED = {
    "gradient": lambda f, a: jax.jit(gradient(f, a))(*a),
    "eager": lambda f, a: (f(*a), gradient(f, a)(*a)),  # where JAX does not evaluate `auto_axes` itself
    "second derivative": lambda f, a: jax.jit(jax.grad(along(f, a), every(a)))(*a),
}
TRANSFORMED |= {f"{how}, parameters closed over": TRANSFORMED[how] for how in ("gradient", "eager")}
LEFT_EXPLICIT = [("gradient", name, "rows over both axes") for name in NORMS]
LEFT_EXPLICIT += [("gradient", "add_layer_norm, x_bias and gate", "rows over both axes")]
LEFT_EXPLICIT += [("gradient", name, "rows and columns") for name in LINEARS]
LEFT_EXPLICIT += [(how, n, "rows") for how in list(TRANSFORMED)[1:3] for n in ("add_rms_norm", "layer_norm_linear")]
LEFT_EXPLICIT += [(how, n, "rows") for how in list(TRANSFORMED)[3:] for n in ("rms_norm", "layer_norm_linear")]


@pytest.mark.parametrize("forward_mode", [False, True])
@pytest.mark.parametrize(("how", "name", "placement"), LEFT_EXPLICIT)
def test_axes_left_explicit(how, name, placement, forward_mode):
    """Derivatives are right, also of what the devices of "data" share. JAX itself has none of `auto_axes` there."""
    on = mesh(AxisType.Explicit)
    _, arrays, given = placed(name, placement, on)
    function, _ = bind(name, OPTIONAL[name], forward_mode=forward_mode)
    in_specs = tuple(by_role(name, {"activation": P("data")}).values())

    def spread(*operands):
        passed = operands[:1] if "closed over" in how else operands
        inside = lambda *arrays: function(*arrays, *operands[len(arrays) :])  # noqa: E731
        around = {"mesh": on, "in_specs": in_specs[: len(passed)], "out_specs": P("data"), "axis_names": {"data"}}
        return jax.shard_map(inside, **around)(*passed)

    with jax.set_mesh(on):
        found = TRANSFORMED[how](spread, given)
    expected = TRANSFORMED[how](bind(name, OPTIONAL[name], jln.reference)[0], arrays)
    chex.assert_trees_all_close(found, expected, **CLOSE)

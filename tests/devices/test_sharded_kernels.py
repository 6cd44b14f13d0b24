"""The kernels on a mesh of CPU devices, in Triton's interpreter: each device runs them on its part of the arrays."""

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jln
import workbench
from catalogue import OPERATORS
from matrix import communication, loss_by_name, mesh, operands

if len(jax.devices()) < 8:
    pytest.skip("needs eight devices", allow_module_level=True)

CLOSE = {"rtol": 2e-3, "atol": 2e-3}  # sums of cosines in float32
SPLITS = {
    "rows": {"activation": P("data", "tensor")},
    "columns": {"activation": P("data"), "kernel": P(None, "tensor"), "bias": P("tensor")},
    "H": {"activation": P("data", None, "tensor"), "kernel": P("tensor")},  # kernels gather H
}
CASES = [(n, split) for split in SPLITS for n, o in OPERATORS.items() if o.is_linear or split != "columns"]


def placed(name, split):
    roles = {a.name: a.role for a in OPERATORS[name].arguments}
    given = {n: a.astype("float32") for n, a in operands(name).items()}
    return given, {
        n: jax.device_put(a, NamedSharding(mesh(), SPLITS[split].get(roles[n], P()))) for n, a in given.items()
    }


def value_and_gradient(module, name, **options):
    return jax.jit(jax.value_and_grad(loss_by_name(lambda **a: getattr(module, name)(**a, **options))))


@pytest.mark.parametrize(("name", "split"), CASES)
def test_every_operator(name, split):
    """Every operator's kernels have the reference's loss and gradients on a mesh, however the arrays are split.

    Norm and few features are one operation, whose kernels run on each device's rows and features.
    """
    given, put = placed(name, split)
    got = value_and_gradient(jln, name, implementation="triton")(put)
    chex.assert_trees_all_close(got, value_and_gradient(jln.reference, name)(given), **CLOSE)


def test_sequence_parallelism():
    """Kernels normalise each device's rows, and the results are gathered for the products with its features."""
    given = workbench.named("add_rms_norm_linear", (4, 2, 16), "float32", features=((16,), (8,)))
    rows = P("data", "tensor")
    specs = {"x": rows, "residual": rows, "kernel": P(None, "tensor")}
    where = {n: NamedSharding(mesh(), specs.get(n, P())) for n in given}
    put = {n: jax.tree.map(lambda a, n=n: jax.device_put(a, where[n]), a) for n, a in given.items()}

    def by_features(**arrays):
        y, total = jln.add_rms_norm_linear(**arrays, implementation="triton")
        wanted = NamedSharding(mesh(), P("data", None, "tensor"))
        return [jax.lax.with_sharding_constraint(a, wanted) for a in y], total

    step = jax.jit(jax.value_and_grad(loss_by_name(by_features)))
    count, size = communication(step.lower(put).compile())
    assert size["all-gather"] == 2 * given["x"].nbytes // 4 and "all-to-all" not in count
    chex.assert_trees_all_close(step(put), value_and_gradient(jln.reference, "add_rms_norm_linear")(given), **CLOSE)


@pytest.mark.parametrize("name", ["layer_norm", "add_layer_norm_linear"])
def test_where_mesh_axes_are_left_to_the_compiler(name):
    staged = jax.make_mesh((2, 2, 2), ("stage", "data", "tensor"), axis_types=(AxisType.Auto,) * 3)
    given, _ = placed(name, "rows")
    both = {n: jnp.stack([a, 2 * a]) for n, a in given.items()}
    roles = {a.name: a.role for a in OPERATORS[name].arguments}
    put = {
        n: jax.device_put(a, NamedSharding(staged, P("stage", "data" if roles[n] == "activation" else None)))
        for n, a in both.items()
    }

    def stage(arrays):
        made = getattr(jln, name)(**{n: a[0] for n, a in arrays.items()}, implementation="triton")
        return jax.tree.map(lambda a: a[None], made)

    spread = {"mesh": staged, "in_specs": P("stage"), "out_specs": P("stage"), "axis_names": {"stage"}}
    got = jax.jit(jax.value_and_grad(loss_by_name(lambda **a: jax.shard_map(stage, **spread)(a))))(put)

    def one_by_one(**arrays):
        of_each = [getattr(jln.reference, name)(**{n: a[i] for n, a in arrays.items()}) for i in range(2)]
        return jax.tree.map(lambda *a: jnp.stack(a), *of_each)

    chex.assert_trees_all_close(got, jax.jit(jax.value_and_grad(loss_by_name(one_by_one)))(both), **CLOSE)

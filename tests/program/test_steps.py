"""Tests: whole steps of the zoo's models, fused: what they move, hold and make again."""

import functools
import json
import pathlib

import jax
import pytest

import jln
import program
from absent_gpu import struct

for _name in ("flax", "haiku", "equinox", "typer"):
    pytest.importorskip(_name)

from flax import nnx  # noqa: E402

import checkpointed_blocks  # noqa: E402
import steps  # noqa: E402
from counted import found as found_by_fuse  # noqa: E402
from zoo.llama import llama  # noqa: E402
from zoo.models import MODELS, Model, functional  # noqa: E402

RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results" / "h200" / "models.json"
KEPT = {step["name"]: step for step in json.loads(RESULTS.read_text())["steps"]}
FUSED = ("fused", "with Linears")


@pytest.mark.parametrize(("name", "by"), [(name, FUSED[i % 2]) for i, name in enumerate(MODELS)])
def test_a_step_is_as_the_results_say(name, by):
    """A step has the norms, sums and Linears of the results, kernels, and but for some percent their bytes."""
    model, kept = functional(MODELS[name]), KEPT[name]
    step = steps.FUSED[by](model.function)
    facts, before = steps.facts(step, model, "h200", "XLA"), kept["programs"][by]
    counts = found_by_fuse(step, model.parameters, model.x)
    assert (counts.norms, counts.sums) == (kept["norms"], kept["sums"]) or by != "fused"
    assert counts.linears == kept["linears"] or by == "fused"
    assert facts == pytest.approx(before, rel=0.05) and facts["kernels"] == before["kernels"]
    gained = (facts["bytes"] - before["bytes"]) / kept["programs"]["as it is"]["bytes"]
    assert abs(gained) < 0.002  # what is gained may be less than the bytes are allowed to change


def test_a_row_has_the_step_as_it_is_and_without_norms_too():
    found, kept = steps.on_one_device("AlphaFold", None, "h200", "XLA"), KEPT["AlphaFold"]
    for by, facts in kept["programs"].items():
        assert found["programs"][by] == pytest.approx(facts, rel=0.05), by
    assert json.loads(json.dumps(found | {"programs": None})) == kept | {"programs": None}
    assert steps.row(kept)[4:6] == ["128 / 115 / 115 / 80", "10.14 / 7.27 / 7.27 / 6.72"]


@pytest.mark.parametrize(("policy", "again"), [("dots_with_no_batch_dims_saveable", 0), ("nothing_saveable", 2 * 6)])
def test_a_policy_that_saves_products_has_none_made_again(policy, again):
    """A Linear is three products, one forward and two backward; without a policy all but a block's last are four."""
    make = functools.partial(llama, policy=getattr(jax.checkpoint_policies, policy))
    model = functional(Model("nnx", make, MODELS["Llama"].size))
    compiled = program.compile_for(steps.step(steps.FUSED["with Linears"](model.function)), model.parameters, model.x)
    made = sum(k.times for k in compiled.kernels if k.product and not k.kind.startswith("__cudnn$fmha"))
    assert made == 2 * 3 * 7 + again


SMALL_BLOCKS = checkpointed_blocks.Size(layers=2, batch=2, tokens=1024, width=1024, keys=256, hidden=2048)


@pytest.mark.parametrize(
    ("policy", "form", "passes"),
    [
        ("dots_with_no_batch_dims_saveable", "that with `remat=True`", 4.0),
        ("nothing_saveable", "`add_rms_norm`, x handed on", 2.75),
    ],
)
def test_norms_under_a_checkpoint_are_no_passes_of_their_own(policy, form, passes):
    """The best form by hand moves that many arrays of x's size fewer in a block than plain jnp, and `fuse` as few."""
    plain, by_hand, fused = (
        checkpointed_blocks.compiled(name, policy, SMALL_BLOCKS).bytes_total for name in ("plain jnp", form, "fuse")
    )
    x = 2 * SMALL_BLOCKS.batch * SMALL_BLOCKS.tokens * SMALL_BLOCKS.width
    assert plain - by_hand >= 0.98 * passes * x * SMALL_BLOCKS.layers
    assert fused <= by_hand


def test_a_module_writes_no_float32_copy_of_x():
    """Flax's default dtypes take one kernel, which reads bfloat16 x and writes float32 y."""
    width, x = 1024, struct(16, 256, 1024)
    graph, state = nnx.split(jln.nnx.LayerNorm(width, rngs=nnx.Rngs(0)))
    (kernel,) = program.compile_for(lambda state, x: nnx.merge(graph, state)(x), state, x).kernels
    assert kernel.is_triton
    assert (kernel.bytes_read, kernel.bytes_written) == (2 * x.size + 2 * 4 * width, 4 * x.size)

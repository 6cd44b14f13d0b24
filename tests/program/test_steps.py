"""Rung 4: whole steps of the zoo's models, as they are and fused: what they move, hold and make again."""

import contextlib
import functools
import io
import json
import pathlib

import jax
import pytest

import absent_gpu
import jln
import program

for _name in ("flax", "haiku", "equinox", "typer"):
    pytest.importorskip(_name)

import checkpointed_blocks  # noqa: E402
import steps  # noqa: E402
from zoo.llama import llama  # noqa: E402
from zoo.models import MODELS, Model, functional  # noqa: E402

RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results" / "h200" / "models.json"
KEPT = {step["name"]: step for step in json.loads(RESULTS.read_text())["steps"]}
QUICK = ("GPT, norms in float32", "AlphaFold", "Parallel")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.heavy) for n in MODELS])
def test_a_step_is_as_the_results_say(name):
    """A step has the norms, sums and Linears of the results, and but for some percent their kernels and bytes."""
    found, kept = json.loads(json.dumps(steps.on_one_device(name, None, "h200", "XLA"))), KEPT[name]
    programs = found.pop("programs")
    assert found == {fact: value for fact, value in kept.items() if fact != "programs"}
    assert programs.keys() == kept["programs"].keys()
    for by, facts in programs.items():
        assert facts == pytest.approx(kept["programs"][by], rel=0.05), by
    plain, kept_plain = programs["as it is"]["bytes"], kept["programs"]["as it is"]["bytes"]
    for by in steps.FUSED:  # what is gained may be less than the bytes are allowed to change
        gained = programs[by]["bytes"] / plain, kept["programs"][by]["bytes"] / kept_plain
        assert gained[0] == pytest.approx(gained[1], abs=0.002), by


@pytest.mark.parametrize("name", ["GPT", "Gemma"])
def test_a_norm_is_three_kernels(name):
    """A norm, with the sum in front and the bias in it, is a kernel forward, one backward, and one that adds up."""
    model = functional(MODELS[name], layers=1)
    compiled = program.compile_for(steps.step(jln.fuse(model.function)), model.parameters, model.x)
    assert len(absent_gpu.triton_kernels(compiled)) == 3 * {"GPT": 3, "Gemma": 3}[name]


@pytest.mark.parametrize(
    "policy",
    [
        "dots_with_no_batch_dims_saveable",
        pytest.param("dots_saveable", marks=pytest.mark.heavy),
        pytest.param("nothing_saveable", marks=pytest.mark.heavy),
    ],
)
def test_a_policy_that_saves_products_has_none_made_again(policy):
    """Each Linear of two layers is three products, one forward and two backward, and none is made again.

    Where nothing is saved, all Linears of a block except the last are made once more, which shows that such would be
    counted.
    """
    make = functools.partial(llama, policy=getattr(jax.checkpoint_policies, policy))
    model = functional(Model("nnx", make, MODELS["Llama"].size))
    again = 2 * 6 if policy == "nothing_saveable" else 0

    def made(fuse):
        compiled = program.compile_for(steps.step(fuse(model.function)), model.parameters, model.x)
        return sum(k.times for k in compiled.kernels if k.product and not k.kind.startswith("__cudnn$fmha"))

    assert [made(fuse) for fuse in steps.FUSED.values()] == [2 * 3 * 7 + again] * 3


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


def test_a_row_is_what_a_program_does():
    """A row has what `compile_for` counts."""
    model = functional(MODELS["AlphaFold"], layers=1)
    facts = steps.facts(model.function, model, "h200", "cuBLAS")
    compiled = program.compile_for(
        steps.step(model.function), model.parameters, model.x, compiler_options=steps.PRODUCTS["cuBLAS"]
    )
    assert facts.pop("held_bytes") > model.x.size * 2
    assert facts == {
        "kernels": compiled.launches,
        "bytes": compiled.bytes_total,
        "bytes_outside_products": compiled.bytes_total - compiled.product_bytes,
        "temporary_bytes": compiled.temp_bytes,
    }
    assert 0 < facts["bytes_outside_products"] < facts["bytes"]
    assert f"| {compiled.bytes_total / 1e9:.2f} / " in row_of(
        KEPT["AlphaFold"] | {"programs": {by: facts | {"held_bytes": 0} for by in "ab"}}
    )


def row_of(step):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        steps.print_row(steps.row({"norms": 1, "sums": 0, "linears": 1} | step))
    return printed.getvalue()

"""Each barrier, wait and fence of compiled kernels is dropped from the PTX, one at a time, and must be missed.

One that is not missed must be needless, for a reason that the function `needless` gives.

`JLN_CHIP=h200 python tests/executed/test_drops.py` prints a table: chip, case, kernel, instruction, how many were
dropped, how many of them were missed, the lines of the others.
"""

import collections
import dataclasses
import os
import re

if __name__ == "__main__":
    import conftest  # noqa: F401

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln
from jln._triton import target
from jln._triton.chip import CHIPS
from ptx import Program, Violation

ORDERING = re.compile(
    r"^\s*(?:@!?%\w+\s+)?((?:bar|barrier)\.(?:warp\.)?sync|cp\.async\.(?:wait|commit)_group|fence\.proxy\.async"
    r"|wgmma\.(?:fence|commit_group|wait_group)|tcgen05\.(?:wait::ld|wait::st|commit)|mbarrier\.try_wait)"
)


def step(f):
    def both(*arguments):
        y, pullback = jax.vjp(f, *arguments)
        return y, pullback(y)

    return both


# Shapes for which loops take several trips, the last one ragged, on a chip of 2 SMs, which has few programs.
CASES = {
    "layer_norm 300x128 float32": (jln.layer_norm, "float32", [(300, 128), (128,), (128,)]),
    "rms_norm 60x776 bfloat16": (jln.rms_norm, "bfloat16", [(60, 776), (776,)]),
    "layer_norm 2x20000 bfloat16": (jln.layer_norm, "bfloat16", [(2, 20000), (20000,), (20000,)]),
    "layer_norm_linear 300x256x64 bfloat16": (
        jln.layer_norm_linear,
        "bfloat16",
        [(300, 256), (256,), (256,), (256, 64), (64,)],
    ),
    "layer_norm_linear 300x128x32 float32": (
        jln.layer_norm_linear,
        "float32",
        [(300, 128), (128,), (128,), (128, 32), (32,)],
    ),
}


def prepared(name):
    f, dtype, shapes = CASES[name]
    random = np.random.default_rng(0)
    arrays = [random.standard_normal(shape, np.float32).astype(jnp.dtype(dtype)) for shape in shapes]
    chip = dataclasses.replace(CHIPS[os.environ["JLN_CHIP"]], cores=2)
    with target.using(target.Gpu(chip)):
        return Program(step(f), *[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]), arrays


def drops(ptx):
    """Return [(line, instruction)] of all barriers, waits and fences of a PTX text."""
    found = ((n, ORDERING.match(text)) for n, text in enumerate(ptx.splitlines()))
    return [(n, match[1]) for n, match in found if match]


def tried(name):
    """Return [(kernel, line, instruction, what noticed it or None)] of each instruction, dropped by itself."""
    program, arrays = prepared(name)
    options = {"allow_contended": True}
    whole = [np.asarray(a) for a in jax.tree.leaves(program.run(*arrays, **options))]
    outcomes = []
    for call in program.calls:
        ptx = call.ptx
        for n, instruction in drops(ptx):
            lines = ptx.splitlines()
            if instruction.startswith("mbarrier"):  # dropped with the branch of its loop, which is the next line
                lines[n + 1] = ""
            lines[n] = ""
            call.ptx = "\n".join(lines)
            outcomes.append((call.name, n + 1, instruction, noticed(program, arrays, whole, options)))
        call.ptx = ptx
    return outcomes


def noticed(program, arrays, whole, options):
    try:
        got = jax.tree.leaves(program.run(*arrays, **options))
    except Violation as violation:
        return str(violation)
    if all(np.array_equal(a, b, equal_nan=True) for a, b in zip(got, whole, strict=True)):
        return None
    return "another result"


def needless(ptx, line, instruction):
    """Return the reason why a kernel is right without an instruction, as far as its text says, or None."""
    after = [found for n, found in drops(ptx) if n >= line]
    waits = [k for k, found in enumerate(after) if found == "cp.async.wait_group"]
    if instruction == "cp.async.commit_group" and instruction in after[: waits[0] if waits else None]:
        return "the copies are committed with the next group, and nobody waits for the one without the other"
    covered = instruction.startswith(("wgmma.", "tcgen05.wait"))
    if covered and [found for _, found in drops(ptx)].count(instruction) > 1:
        return "another one comes before anything is touched that it is about"
    return None


# The number of barriers that other barriers cover, by case and kernel, as read from the PTX. A Linear's float32 kernel
# is copied into one part of shared memory and transposed into another, from which the product reads. An earlier barrier
# comes after all reads of the first part, and the next trip's barrier comes before any write to the second.
# The norm's own float32 kernel has one before its first store to shared memory, for a loop that is one trip.
COVERED = {
    ("layer_norm_linear 300x128x32 float32", "jln_forward_kernel"): 1,
    ("layer_norm 300x128 float32", "jln_forward_kernel"): 1,
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.heavy] if k else []) for k, name in enumerate(CASES)]
)
def test_what_orders_threads_is_missed_when_it_is_dropped(name):
    texts = {call.name: call.ptx for call in prepared(name)[0].calls}
    missed = [(kernel, line, what) for kernel, line, what, how in tried(name) if how is None]
    unexplained = [m for m in missed if needless(texts[m[0]], *m[1:]) is None]
    barriers = collections.Counter(kernel for kernel, _, what in unexplained if what == "bar.sync")
    assert [m for m in unexplained if m[2] != "bar.sync"] == []
    assert {k: n for k, n in barriers.items() if n > COVERED.get((name, k), 0)} == {}


def table():
    for name in CASES:
        kinds = {}
        for kernel, line, instruction, what in tried(name):
            kinds.setdefault((kernel, instruction), []).append((line, what))
        for (kernel, instruction), tries in kinds.items():
            missed = [line for line, what in tries if what is None]
            chip, caught = os.environ["JLN_CHIP"], len(tries) - len(missed)
            print(*(chip, name, kernel, instruction, len(tries), caught, missed), sep=" | ", flush=True)


if __name__ == "__main__":
    table()

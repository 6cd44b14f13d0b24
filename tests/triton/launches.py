"""The launches of public operators for any chip, none of them made, and what the compiler makes of them."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import compiler
from catalogue import FORMS
from jln._triton.chip import CHIPS as ALL_CHIPS
from jln._triton.launch import Launch
from jln._triton.target import Recorder, using

# One of each architecture: an H100 has the kernels of an H200, and an L40S, but for Linears, those of an L4.
CHIPS = ("a100", "l4", "h200", "b200")
# x's; the residual's, z's and the kernel's; the parameters'.
DTYPES = {
    "bfloat16": ("bfloat16", "bfloat16", "bfloat16"),
    "float16": ("float16", "float16", "float16"),
    "float32": ("float32", "float32", "float32"),
    "float64": ("float64", "float64", "float64"),
    "bfloat16, float32 parameters": ("bfloat16", "bfloat16", "float32"),
    "bfloat16, float32 stream": ("bfloat16", "float32", "float32"),
    "float16, bfloat16 stream": ("float16", "bfloat16", "float32"),
    "float32, bfloat16 stream": ("float32", "bfloat16", "float32"),
}
# Rows, H and features of fused Linears: each power of 2 that a product is padded to, with aligned rows of x and dy and
# without; one chunk and many; few rows, whose columns several programs share.
FUSED = [
    (100_000, 4096, 256),
    (100_000, 1000, 136),
    (100_000, 8192, 128),
    (100_000, 4096, 64),
    (100_000, 1023, 7),
    (64, 512, 128),
]
ZERO_CENTERED = (("zero_centered_scale", True),)


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of a form of an operator, and which gradients are taken.

    form: its title in the catalogue. dtypes: as in `DTYPES`. wanted: "all" or "none". of_groups: the parameters' shape
    where examples or heads have their own. features: of each Linear. absent: arguments that are None.
    """

    form: str
    shape: tuple[int, ...]
    dtypes: tuple[str, str, str]
    chip: str
    wanted: str = "all"
    of_groups: tuple[int, ...] = ()
    features: tuple[int, ...] = ()
    absent: tuple[str, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()


def launches(case: Case) -> list[Launch]:
    """The launches of the case's results and gradients, in order."""
    jax.config.update("jax_enable_x64", True)
    form = FORMS[case.form]
    if case.absent:
        form = form.including(*form.given_extras, absent=case.absent, options=form.options)
    of_x, of_rows, of_parameters = case.dtypes
    h = case.shape[-1]
    shapes = {
        "x": (case.shape, of_x),
        "residual": (case.shape, of_rows),
        "z": (case.shape, of_rows),
        "x_bias": ((h,), of_parameters),
    }
    arrays = [jax.ShapeDtypeStruct(*shapes.get(n, (case.of_groups or (h,), of_parameters))) for n in form.names]
    for name, own, dtype in (("kernel", (h,), of_rows), ("bias", (), of_parameters)):
        if name in form.names:
            several = tuple(jax.ShapeDtypeStruct((*own, n), dtype) for n in case.features)
            arrays[form.names.index(name)] = several if len(several) > 1 else several[0]
    call = form.in_order(form.function, implementation="triton", **dict(case.options))

    def loss(*given):
        return sum(jnp.sum(jnp.sin(a.astype(jnp.float32))) for a in jax.tree.leaves(call(*given)))

    step = loss if case.wanted == "none" else jax.value_and_grad(loss, argnums=[*range(len(form.names))])
    chip = ALL_CHIPS[case.chip]
    with using(recorder := Recorder(chip)):
        jax.jit(step).trace(*arrays).lower(lowering_platforms=(chip.platform,))
    return recorder.launches


class Compiled(NamedTuple):
    """A launch's kernel, as a word and in words, what it takes, and the shared memory that its chip has."""

    kernel: str
    what: str
    took: compiler.Resources
    limit: int


def compiled(cases: list[Case]) -> list[Compiled]:
    """Compile the cases' launches, in a process where Triton does not interpret."""
    made = []
    for case in cases:
        for launch in launches(case):
            took = dataclasses.replace(compiler.compile_launch(launch), binary=b"")
            name = launch.kernel.fn.__name__
            made.append(Compiled(name, f"{name} {launch.tile} of {case}", took, launch.chip.shared))
    return made

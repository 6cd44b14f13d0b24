"""Launches: a kernel, its operands and results by name, and a tile, for a target to run, compile or record."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jln._triton.chip import Chip
from jln._triton.tile import Tile

# The calls of jaxlib's plugins for CUDA and ROCm that launch a kernel in a compiled program, the typed one first.
TRITON_CALLS = ("triton_kernel_call_ffi", "triton_kernel_call")

# Triton's names of the dtypes that its kernels may be given.
TYPE_NAMES = {
    "float16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "float64": "fp64",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "uint8": "u8",
}


@dataclasses.dataclass(frozen=True, eq=False)  # a primitive's parameter: it must hash, and `constants` does not
class Launch:
    """One kernel launch on a grid of `programs`.

    arrays, results: shapes by name, in the kernel's order; the kernel's pointer to x is x_ptr.
    scalars: integers passed by value.
    constants: the kernel's constexprs; among them, as None, the pointer to an array that is absent.
    in_place: from the name of an operand to that of the result that takes its memory.
    """

    kernel: Any
    arrays: dict[str, jax.ShapeDtypeStruct]
    scalars: dict[str, int]
    results: dict[str, jax.ShapeDtypeStruct]
    programs: int
    tile: Tile
    chip: Chip
    constants: dict[str, Any]
    in_place: dict[str, str]

    @property
    def arguments(self) -> dict[str, jax.ShapeDtypeStruct | int]:
        """The kernel's arguments that are no constants, in order and by the kernel's own names."""
        pointers = {f"{name}_ptr": a for name, a in (self.arrays | self.results).items()}
        arguments = pointers | self.scalars
        return {name: arguments[name] for name in self.kernel.arg_names if name in arguments}


# The interpreter runs programs one after another; three cores make every program of the backward kernel loop over
# several tiles, and leave some loops one trip shorter than others.
INTERPRETED = Chip("interpreter", 90, 3)


@dataclasses.dataclass(frozen=True)
class Target:
    """A target of launches. chip: the one whose tiles are chosen."""

    chip: Chip = INTERPRETED

    def run(self, launch: Launch, arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """The results of a launch, for arrays in its order."""
        raise NotImplementedError

    def made_of(self) -> Any:
        """Return what kernels depend on beside the package's code, for `jln._core.identity`; by default on more."""
        return object()


def launch(
    target: Target,
    kernel: Any,
    operands: Mapping[str, jax.Array | int | None],
    results: Mapping[str, jax.ShapeDtypeStruct | None],
    *,
    programs: int,
    tile: Tile,
    compute: np.dtype,
    in_place: Mapping[str, str] | None = None,
    **constants: Any,
) -> dict[str, Any]:
    """Call a kernel on a grid of `programs`, and return the results it wrote, by name.

    An operand or a result that is None is None for the kernel, too. Integers are passed by value. `compute` is the
    dtype of the arithmetic, `constants` are the kernel's other constexprs, dtypes among them as NumPy's. `in_place`
    says which operand's memory a result may take, if nobody else needs it: every program must have read what it
    overwrites.
    """
    import triton.language as tl

    scalars = {name: a for name, a in operands.items() if isinstance(a, int)}
    names = [argument.removesuffix("_ptr") for argument in kernel.arg_names]
    unknown = ({*operands} | {*results}) - {*names} | {*constants} - {*kernel.arg_names}
    assert not unknown, f"{kernel.__name__} has no arguments {sorted(unknown)}"
    arrays: dict[str, Any] = {n: operands[n] for n in names if operands.get(n) is not None and n not in scalars}
    written = {name: a for name in names if (a := results.get(name)) is not None}
    in_place = dict(in_place or {})
    for operand, result in in_place.items():
        before, after = ((a.shape, a.dtype) for a in (arrays[operand], written[result]))
        assert before == after, f"{result}, {after}, cannot take the place of {operand}, {before}"
    known = {
        "BLOCK_ROWS": tile.rows,
        "BLOCK_H": tile.columns,
        "STAGES": tile.stages,
        "PRECISION": target.chip.precision,
        "COMPUTE": compute,
        **constants,
        **{f"{name}_ptr": None for name, a in (operands | results).items() if a is None},  # pyright: ignore
    }
    known = {name: getattr(tl, a.name) if isinstance(a, np.dtype) else a for name, a in known.items()}
    call = Launch(
        kernel,
        {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in arrays.items()},
        scalars,
        written,
        programs,
        tile,
        target.chip,
        {name: known[name] for name in kernel.arg_names if name in known},
        in_place,
    )
    outputs = dict(zip(written, target.run(call, list(arrays.values())), strict=True))
    return {name: outputs.get(name) for name in results}

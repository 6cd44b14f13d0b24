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

    arrays, results: shapes by name, in the kernel's order.
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
        """The kernel's arguments that are no constants, in order and by name."""
        arguments = self.arrays | self.results | self.scalars
        return {name: arguments[name] for name in places(self.kernel) if name in arguments}

    def by_parameter(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values by the kernel's arguments as values by its parameters, those of a record as one."""
        grouped: dict[str, list[Any]] = {parameter: [] for parameter in self.kernel.arg_names}
        for name, (i, *_) in places(self.kernel).items():
            grouped[self.kernel.arg_names[i]].append(values[name])
        records = _records(self.kernel)
        return {p: records[p](*of) if p in records else of[0] for p, of in grouped.items()}


def _records(kernel: Any) -> dict[str, Any]:
    """The types of the kernel's parameters that are records: annotated with a NamedTuple."""
    return {name: of for name, of in kernel.fn.__annotations__.items() if hasattr(of, "_fields")}


def places(kernel: Any) -> dict[str, tuple[int, ...]]:
    """The places of a kernel's arguments by name: a parameter's number, and that of a field in a record.

    The name is c1 for the pointer c1_ptr, and a.x for the field x of the record `a`.
    """
    records, found = _records(kernel), {}
    for i, parameter in enumerate(kernel.arg_names):
        if parameter in records:
            found |= {f"{parameter}.{field}": (i, j) for j, field in enumerate(records[parameter]._fields)}
        else:
            found[parameter.removesuffix("_ptr")] = (i,)
    return found


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


def _name(path: Any) -> str:
    """The name of a kernel's argument, as of `places`, by its path in what is given by the kernel's parameters."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def launch(
    target: Target,
    kernel: Any,
    operands: Mapping[str, Any],
    results: Mapping[str, Any],
    *,
    programs: int,
    tile: Tile,
    compute: np.dtype,
    in_place: Mapping[str, str] | None = None,
    **constants: Any,
) -> dict[str, Any]:
    """Call a kernel on a grid of `programs`, and return what it wrote as `results` has it.

    operands: by the kernel's parameters, a pointer's without its `_ptr`: arrays, integers, which are passed by value,
      and records (NamedTuples) of arrays. What is None is None for the kernel, too.
    results: likewise, of shapes. In the kernel's order they are behind all operands, as XLA hands them over.
    compute: the dtype of the arithmetic. constants: the kernel's other constexprs, dtypes among them as NumPy's.
    in_place: which operand's memory a result may take, if nobody else needs it: every program must have read what it
      overwrites.
    """
    import triton.language as tl

    names = places(kernel)
    read, wanted = ({_name(path): a for path, a in jax.tree.leaves_with_path(of)} for of in (operands, results))
    unknown = ({*read} | {*wanted} | {*constants}) - {*names}
    assert not unknown, f"{kernel.__name__} has no arguments {sorted(unknown)}"
    scalars = {name: a for name, a in read.items() if isinstance(a, int)}
    arrays = {name: read[name] for name in names if name in read and name not in scalars}
    written = {name: wanted[name] for name in names if name in wanted}
    absent = {name for name in names if "." in name} | {
        name for name, a in {**operands, **results}.items() if a is None
    }
    order = [name in written for name in names if name in arrays or name in written]
    assert order == sorted(order), f"{kernel.__name__} has results in front of operands"
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
        **dict.fromkeys(absent - {*arrays, *written}),
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
        {name: known[name] for name in names if name in known},
        in_place,
    )
    outputs = dict(zip(written, target.run(call, list(arrays.values())), strict=True))
    return jax.tree.map_with_path(lambda path, _: outputs[_name(path)], {**results})

"""The one place that knows jax-triton: a kernel, its operands and its tile become a GPU call or an interpreted one."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import importlib.util
import inspect
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jln._triton import config

INSTALL = 'pip install "jln[cuda13]" (or "jln[cuda12]")'


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel launch: what `launch` was asked for, with stand-ins for what was absent."""

    kernel: Any
    arguments: tuple[jax.ShapeDtypeStruct | int, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]
    programs: int
    tile: config.Tile
    chip: config.Chip
    constants: dict[str, Any]


_record: contextvars.ContextVar[list[Launch] | None] = contextvars.ContextVar("jln_record", default=None)


@contextlib.contextmanager
def recording() -> Iterator[list[Launch]]:
    """Collect the launches that would be made, and make none: their results are zeros."""
    launches: list[Launch] = []
    token = _record.set(launches)
    try:
        yield launches
    finally:
        _record.reset(token)


def interpreting() -> bool:
    """Whether Triton's interpreter was asked for, by TRITON_INTERPRET=1."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def missing() -> str | None:
    """Why a Triton kernel cannot be lowered for CUDA in this process; None where it can."""
    for package in ("triton", "jax_triton"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed: {INSTALL}"
    if interpreting():
        return "TRITON_INTERPRET=1 is set, which leaves nothing to compile: unset it"
    try:
        import jax_triton  # noqa: F401
    except Exception as error:  # 0.3.1 raises AttributeError without a CUDA plugin, others ImportError
        return f"import jax_triton failed ({error!r}): {INSTALL}"
    if config.target_chip() is None:
        return (
            "there is no GPU in this process and no chip was named: "
            f"set {config.CHIP_VARIABLE} to one of {', '.join(sorted(config.CHIPS))}"
        )
    return None


def launch(
    kernel: Any,
    operands: Sequence[jax.Array | int | None],
    results: Sequence[jax.ShapeDtypeStruct | None],
    *,
    programs: int,
    tile: config.Tile,
    chip: config.Chip,
    compute: jnp.dtype,
    in_place: dict[int, int] | None = None,
    **constants: Any,
) -> list[jax.Array | None]:
    """Call `kernel(*operands, *results)` on a grid of `programs`, and return the results it wrote.

    An operand or a result may be None where the constants tell the kernel not to touch its pointer. Integers are
    passed by value. `compute` is the dtype of the arithmetic, `constants` are the kernel's other constexprs. `in_place`
    says which operand's memory a result may take, if nobody else needs it: every program must have read what it
    overwrites. (The interpreter always lets it.)
    """
    stand_in = next(a for a in reversed(operands) if isinstance(a, jax.Array))  # one that is not worked on in place
    arguments = [stand_in if a is None else a for a in operands]
    shapes = [jax.ShapeDtypeStruct((0,), jnp.float32) if r is None else r for r in results]
    in_place = in_place or {}
    for operand, result in in_place.items():
        before, after = (None if a is None else (a.shape, a.dtype) for a in (operands[operand], results[result]))
        assert before == after, f"result {result}, {after}, cannot take the place of operand {operand}, {before}"
    import triton.language as tl

    constants |= {"BLOCK_ROWS": tile.rows, "BLOCK_H": tile.columns, "COMPUTE": getattr(tl, jnp.dtype(compute).name)}
    if "STAGES" in kernel.arg_names:
        constants["STAGES"] = tile.stages
    if _record.get() is not None:
        call = _note
    elif chip.name == config.INTERPRETER.name:
        call = functools.partial(_interpret, in_place=in_place)
    else:
        call = functools.partial(_compile, in_place=in_place)
    written = call(kernel, arguments, shapes, programs=programs, tile=tile, chip=chip, constants=constants)
    return [None if r is None else w for r, w in zip(results, written, strict=True)]


def _note(kernel, arguments, shapes, *, programs, tile, chip, constants):
    types = [a if isinstance(a, int) else jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arguments]
    launches = _record.get()
    assert launches is not None
    launches.append(Launch(kernel, tuple(types), tuple(shapes), programs, tile, chip, constants))
    return [jnp.zeros(r.shape, r.dtype) for r in shapes]


def _compile(kernel, arguments, shapes, *, programs, tile, chip, constants, in_place):
    import jax_triton

    # jax-triton 0.3 calls the result types out_shape, 0.4 out_type.
    results = "out_shape" if "out_shape" in inspect.signature(jax_triton.triton_call).parameters else "out_type"
    return jax_triton.triton_call(
        *arguments,
        kernel=kernel,
        name=f"jln_{kernel.fn.__name__}",
        grid=(programs, 1, 1),
        compute_capability=chip.capability,
        num_warps=tile.warps,
        num_stages=tile.stages,
        input_output_aliases=in_place,
        **{results: shapes},
        **constants,
    )


def _interpret(kernel, arguments, shapes, *, programs, tile, chip, constants, in_place):
    from jln._triton import interpreter

    scalars = {i: a for i, a in enumerate(arguments) if isinstance(a, int)}

    def run(*arrays):
        remaining = iter(arrays)
        complete = [scalars[i] if i in scalars else next(remaining) for i in range(len(arguments))]
        return interpreter.run(kernel, complete, shapes, programs=programs, constants=constants, in_place=in_place)

    arrays = [a for a in arguments if not isinstance(a, int)]
    return jax.pure_callback(run, shapes, *arrays, vmap_method="sequential")

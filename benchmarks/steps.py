"""Print what training steps of the zoo's models launch, move and hold on H200s that need not be there, with no times.

    python benchmarks/steps.py                                # all models: a quarter of an hour
    python benchmarks/steps.py GPT Llama --layers 12          # minutes for each
    python benchmarks/steps.py Llama --mesh data=2,fsdp=2,tensor=2 --sequence

The models are those of `examples/zoo`. A step is forward + backward. Each is compiled as it is, by `jln.fuse`, by
`jln.fuse(..., linears=True)`, and with its norms left out: a bound on what any norm could save, and no model. With
--mesh it is sharded as trainers do (`examples/zoo/sharding.py`), and what devices communicate is counted. It needs
`pip install -e ".[cuda13,cli,flax,haiku,equinox]"` and no GPU.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import pathlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any
from unittest import mock

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import typer
from flax import linen as nn
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from counted import found, held

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))
import jln
import program
from rows import known, save
from zoo import alphafold, gemma, sharding, t5
from zoo.models import MODELS, Functional, functional

# Whose kernels do the products. With no GPU XLA cannot try them, as it would where there is one.
PRODUCTS: dict[str, dict[str, Any]] = {"XLA": {}, "cuBLAS": {"xla_gpu_enable_triton_gemm": False}}
FUSED: dict[str, Callable[..., Any]] = {
    "as it is": lambda function: function,
    "fused": jln.fuse,
    "with Linears": functools.partial(jln.fuse, linears=True),
}
NORMS = (
    *(nnx.LayerNorm, nnx.RMSNorm, gemma.GemmaRMSNorm, nn.LayerNorm, t5.T5LayerNorm),
    *(hk.LayerNorm, alphafold.LayerNorm, eqx.nn.LayerNorm),
)
SHARDED = ("GPT", "Llama")  # what `sharding.py` places
LARGEST = 4096  # GPUs of a mesh
PARTS = {"tensor": 8, "fsdp": 2048}  # what an axis divides: heads of keys, features


@contextlib.contextmanager
def without_norms() -> Iterator[None]:
    """Trace models within this context, and their norms return what they read."""
    with contextlib.ExitStack() as stack:
        for norm in NORMS:
            stack.enter_context(mock.patch.object(norm, "__call__", lambda self, x: x))
        yield


def step(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make of a model's function its loss and the gradients of parameters and x, which in a model has a layer below."""

    def loss(parameters: Any, x: Any) -> jax.Array:
        return jnp.mean(jnp.square(function(parameters, x).astype(jnp.float32)))

    return jax.value_and_grad(loss, (0, 1))


def facts(function: Callable[..., Any], model: Functional, chip: str, products: str) -> dict[str, int]:
    """Count what the step of a model's function does, compiled for one GPU."""
    given, options = (model.parameters, model.x), PRODUCTS[products]
    flags = " ".join(f"--{name}={str(value).lower()}" for name, value in options.items())
    with mock.patch.dict(os.environ, XLA_FLAGS=flags):  # where our rules look for how XLA multiplies
        compiled = program.compile_for(step(function), *given, chip=chip, compiler_options=options)
    return {
        "kernels": compiled.launches,
        "bytes": compiled.bytes_total,
        "bytes_outside_products": compiled.bytes_total - compiled.product_bytes,
        "held_bytes": held(function, *given),
        "temporary_bytes": compiled.temp_bytes,
    }


def on_one_device(name: str, layers: int | None, chip: str, products: str) -> dict[str, Any]:
    size = MODELS[name].size
    layers = layers or size.layers
    model = functional(MODELS[name], layers=layers)
    programs = {by: facts(fuse(model.function), model, chip, products) for by, fuse in FUSED.items()}
    with without_norms():
        programs["no norm"] = facts(model.function, model, chip, products)
    counts = found(jln.fuse(model.function), model.parameters, model.x)
    behind = found(jln.fuse(model.function, linears=True), model.parameters, model.x)
    counts = {"norms": counts.norms, "sums": counts.sums, "linears": behind.linears}
    return {"name": name, "layers": layers, "shape": size.shape, "products": products} | counts | {"programs": programs}


def print_row(cells: Sequence[Any]) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def print_header(cells: Sequence[str]) -> None:
    print_row(cells)
    print("|" + "---|" * len(cells), flush=True)


def row(found: dict[str, Any]) -> list[Any]:
    def gigabytes(fact: str) -> str:
        return " / ".join(f"{facts[fact] / 1e9:.2f}" for facts in found["programs"].values())

    kernels = " / ".join(str(facts["kernels"]) for facts in found["programs"].values())
    sizes = map(gigabytes, ("bytes", "bytes_outside_products", "held_bytes", "temporary_bytes"))
    return [*(found[fact] for fact in ("name", "norms", "sums", "linears")), kernels, *sizes]


HEADER = ("model", "norms", "sums", "Linears", "kernels", "moved, GB", "elsewhere, GB", "held, GB", "temporary, GB")


def parsed(text: str, chip: str) -> Mesh:
    """Make the mesh in a text such as "data=2,tensor=4". Raises BadParameter."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in sharding.AXES or axis in sizes or not size.isdecimal() or not int(size):
            axes = ", ".join(sharding.AXES)
            raise typer.BadParameter(f"{text!r} is not as data=2,tensor=4, of the axes {axes}", param_hint="--mesh")
        sizes[axis] = int(size)
    if math.prod(sizes.values()) > LARGEST or any(whole % sizes.get(axis, 1) for axis, whole in PARTS.items()):
        limits = f"of at most {LARGEST} GPUs, whose tensor divides {PARTS['tensor']} and fsdp {PARTS['fsdp']}"
        raise typer.BadParameter(f"{text!r} is not {limits}", param_hint="--mesh")
    return program.mesh(chip, tuple(sizes.get(axis, 1) for axis in sharding.AXES), sharding.AXES)


def on_a_mesh(name: str, mesh: Mesh, by_tokens: bool, chip: str) -> dict[str, program.CompiledProgram]:
    """Compile a model's steps on a mesh: as it is, fused, and fused with its Linears.

    Each gradient is asked for where its argument is. The batch is the model's, or the least that the mesh splits.
    """
    model = MODELS[name]
    rows = mesh.shape["data"] * mesh.shape["fsdp"]
    model = functional(model, batch=math.ceil(model.size.batch / rows) * rows)
    where = NamedSharding(mesh, sharding.stream_spec(by_tokens))
    places = sharding.shardings(model.parameters, mesh), where
    given = jax.tree.map(lambda a, at: a.update(sharding=at), (model.parameters, model.x), places)

    def placed(function: Callable[..., Any]) -> Callable[..., Any]:
        def sharded(*arguments: Any) -> Any:
            value, gradients = step(function)(*arguments)
            return value, jax.lax.with_sharding_constraint(gradients, places)

        return sharded

    with sharding.on(mesh, by_tokens):
        return {
            by: program.compile_for(placed(fuse(model.function)), *given, chip=chip, devices=mesh.size)
            for by, fuse in FUSED.items()
        }


Key = tuple[str, tuple[str, ...]]  # a collective's kind, and the axes along which its devices differ


def totals(compiled: program.CompiledProgram, mesh: Mesh) -> dict[Key, tuple[int, int]]:
    """Count the collectives by kind and mesh axes: how many, and the bytes of all together on one device."""
    times, sizes = Counter[Key](), Counter[Key]()
    for each in compiled.collectives:
        group = range(mesh.size) if each.group is None else each.group
        at = np.unravel_index(group, tuple(mesh.shape.values()))
        key = each.kind, tuple(axis for axis, where in zip(mesh.axis_names, at, strict=True) if len({*where}) > 1)
        times[key] += each.times
        sizes[key] += each.times * each.bytes
    return {key: (times[key], sizes[key]) for key in sorted(times)}


def print_mesh(name: str, mesh: Mesh, by_tokens: bool, programs: dict[str, program.CompiledProgram]) -> None:
    sizes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1) or "one"
    print(f"\n{name}: {mesh.size} GPUs, {sizes}{'; sequences split' if by_tokens else ''}; times / MB on one\n")
    print_header(("collective", "among", *programs))
    of = [totals(compiled, mesh) for compiled in programs.values()]
    for key in sorted({key for each in of for key in each}):
        cells = [each.get(key, (0, 0)) for each in of]
        print_row([key[0], " x ".join(key[1]), *(f"{times} / {size / 1e6:.3f}" for times, size in cells)])
    sums = [[sum(column) for column in zip((0, 0), *each.values(), strict=True)] for each in of]
    print_row(["all of them", "", *(f"{times} / {size / 1e6:.3f}" for times, size in sums)])
    print_row(["kernels", "", *(compiled.launches for compiled in programs.values())])
    for what in ("argument", "temp"):
        sizes = (getattr(compiled, f"{what}_bytes") / 1e6 for compiled in programs.values())
        print_row([f"{what.replace('temp', 'temporary')}, MB", "", *(f"{size:.1f}" for size in sizes)])


def main(
    models: Annotated[list[str] | None, typer.Argument(help=f"Of {'; '.join(MODELS)}. [default: all]")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="[default: two, of the ViT and the Mixer four]")] = None,
    products: Annotated[list[str] | None, typer.Option(help="By XLA, which is the default, or by cuBLAS.")] = None,
    mesh: Annotated[list[str] | None, typer.Option(help="Of GPUs, as data=2,fsdp=2,tensor=2.")] = None,
    sequence: Annotated[bool, typer.Option("--sequence", help="Between Linears tokens are split over tensor.")] = False,
    chip: Annotated[str, typer.Option(help=f"To compile for: {', '.join(program.CHIPS)}.")] = "h200",
    output: Annotated[
        pathlib.Path | None, typer.Option(help="A file, for all of it as JSON.", dir_okay=False, writable=True)
    ] = None,
) -> None:
    """Print what steps of models launch, move and hold: as they are / fused / with Linears / without norms."""
    zoo = SHARDED if mesh else tuple(MODELS)
    chosen = known("model", models or zoo, zoo)
    by_whom = known("maker of products", products or ("XLA",), PRODUCTS)
    known("chip", [chip], program.CHIPS)
    if sequence and not mesh:
        raise typer.BadParameter("it is of a --mesh", param_hint="--sequence")
    if mesh and (layers or products or output):
        raise typer.BadParameter("it goes with neither --layers, --products nor --output", param_hint="--mesh")
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.touch()  # an error here is one before minutes, not behind
    for of in [parsed(text, chip) for text in mesh or ()]:
        for name in chosen:
            print_mesh(name, of, sequence, on_a_mesh(name, of, sequence, chip))
    if mesh:
        return
    steps = []
    for by in by_whom:
        print_header(HEADER)
        for name in chosen:
            steps.append(on_one_device(name, layers, chip, by))
            print_row(row(steps[-1]))
    if output is not None:
        document = {"chip": chip, "versions": {"jln": jln.__version__, "jax": jax.__version__}, "steps": steps}
        save(document, output)


if __name__ == "__main__":
    typer.run(main)

"""Print what whole training steps launch, move and keep on H200s that need not be there, with no times.

    python benchmarks/steps.py                          # needs jax[cuda13], Flax, no GPU; minutes
    python benchmarks/steps.py stack-llama stack-gpt --output benchmarks/results/h200
    python benchmarks/steps.py stack-llama-q-k-v --mesh data=2,fsdp=2,tensor=2 --sequence

Forward + backward of a 12-layer transformer, with products by XLA and by cuBLAS; with --mesh of two blocks, sharded as
trainers do, and what devices communicate.
"""

import json
import pathlib
from typing import Annotated

import jax
import typer

from jln import program
from jln._tools.console import UserError, megabytes, print_table
from jln._tools.machine import version
from layouts import AXES
from losses import losses, sharded_losses
from sharded import SHARDED, Step, facts, fitted, parsed, print_step
from stacks import PRODUCTS, STACKS, Stack

RESULT = "steps.json"


def counted(stack: Stack, products: str, chip: str) -> dict[str, dict[str, int]]:
    """Count what each variant of a stack's step does, compiled."""
    found = {}
    for name, loss in losses(stack).items():
        step, given = stack.step(loss), (stack.parameters(), stack.x())
        report = program.compile_for(step, *given, chip=chip, compiler_options=PRODUCTS[products])
        found[name] = {
            "kernels": report.launches,
            "bytes": report.bytes_total,
            "bytes_outside_products": report.bytes_total - report.product_bytes,
            "temporary_bytes": report.temp_bytes,
        }
    return found


def print_stack(stack: Stack, products: str, programs: dict[str, dict[str, int]]) -> None:
    facts = ("bytes_outside_products", "temporary_bytes")
    first = next(iter(programs.values()))

    def cells(found: dict[str, int]) -> list[str]:
        return [cell for f in facts for cell in (megabytes(found[f]), f"{100 * (found[f] / first[f] - 1):+.1f} %")]

    title = f"{stack.name}: {stack.layers} layers, x {'x'.join(map(str, stack.shape))}, hidden {stack.hidden}"
    print_table(
        f"{title}; {stack.why}; products by {products}",
        ("by", "kernels", "MB", "MB outside products", "than the first", "temporary MB", "than the first"),
        [(by, str(found["kernels"]), megabytes(found["bytes"]), *cells(found)) for by, found in programs.items()],
    )


def main(
    names: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(STACKS)}. [default: all]")] = None,
    mesh: Annotated[
        list[str] | None,
        typer.Option(help=f"Of GPUs, as data=2,fsdp=2,tensor=2; may be repeated. Axes: {', '.join(AXES)}."),
    ] = None,
    sequence: Annotated[
        bool, typer.Option("--sequence", help="With --mesh: between Linears tokens are split over tensor, too.")
    ] = False,
    chip: Annotated[str, typer.Option(help=f"To compile for: {', '.join(program.CHIPS)}.")] = "h200",
    output: Annotated[pathlib.Path | None, typer.Option(help=f"A folder, for {RESULT}.")] = None,
) -> None:
    """Print what whole steps launch, move and keep, beside the same steps with the norms of others."""
    known = SHARDED if mesh else tuple(STACKS)
    wrong = [name for name in names or () if name not in known]
    if wrong:
        raise typer.BadParameter(f"unknown step {wrong[0]!r}; known are {', '.join(known)}")
    if sequence and not mesh:
        raise typer.BadParameter("it is of a --mesh", param_hint="--sequence")
    steps = []
    print(f"Compiled for {chip} with jax {jax.__version__}, jln {version('jln')}; MB is 10^6 bytes.\n")
    for text in mesh or ():
        for name in names or known:
            try:
                layout = parsed(text, chip, sequence)
                stack = fitted(name, layout)
            except UserError as error:
                raise typer.BadParameter(str(error), param_hint="--mesh") from None
            step, given, devices = layout.step, layout.arguments(stack), layout.size(*AXES)
            of = sharded_losses(stack, layout).items()
            programs = {
                by: program.compile_for(step(stack, loss), *given, chip=chip, devices=devices) for by, loss in of
            }
            print_step(Step(stack, layout, programs), chip)
            steps.append(facts(Step(stack, layout, programs)))
    for name in () if mesh else names or known:
        stack = STACKS[name]
        for products in PRODUCTS:
            programs = counted(stack, products, chip)
            print_stack(stack, products, programs)
            size = {"name": name, "layers": stack.layers, "shape": stack.shape, "products": products}
            steps.append(size | {"programs": programs})
    if output is not None:
        packages = ("jln", "jax", "jaxlib", "jax-triton", "triton", "flax")
        document = {"chip": chip, "versions": {p: version(p) for p in packages}, "steps": steps}
        output.mkdir(parents=True, exist_ok=True)
        (output / RESULT).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)

"""Draw calls of the operators at real sizes, and list those that move much of what plain jnp does, on an H200.

    python tests/fuzz/moved.py --cases 300 --processes 2    # needs jax[cuda13], no GPU; a quarter of an hour
    python tests/fuzz/moved.py --seed 5100                  # the case of a seed, in words, and both programs

Each case is compiled with the operators and with `jln.reference`, which is plain jnp. Printed are the cases that move
more than `--share` of what plain jnp does, in MB. What is known to cost a copy is not drawn, so a line is a cliff that
nobody has explained. The calls name no implementation, as most of users' do. In these programs no cotangent waits for a
result, so plain jnp may take the sums of both passes in one read of x, which it cannot in a model. It exits with 1 if a
call could not be compiled.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import multiprocessing
import pathlib
import sys
from typing import Any

import jax

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks"))

import jln
from called import program
from case import Case, may_be_plain_jnp, refused, result_dtype, varying
from drawn import Draw
from program import compile_for


class Real(Draw):
    """Sizes of models: x has 2^22 to 2^24 elements, its rows the lengths that people train."""

    h = (768, 1024, 1024, 1536, 2048, 2048, 3072, *(4096,) * 3, 5120, 5376, 8192, 8192, 12288, 16384, 1000, 64, 128)
    rows = (1, 2, 4, 8, 16, 32, 128, 512, 1024, 2048, 2048, 4096, 8192)
    features = ((64,), (128,), (8,), (16, 128), (1024,), (4096,), (12288,))
    largest = largest_by_kernels = 2**24


def case_of(seed: int) -> Case | None:
    """The case of a seed; None of one that is small, in other dtypes than models are, or known not to be the kernels'.

    In loops by scan a program moves what it does without them, forward mode and second derivatives are XLA's.
    """
    case = dataclasses.replace(Real(seed).case(), implementation=None)
    dtypes = {a.dtype for a in case.operands.values()} | {case.static.get("dtype", "bfloat16")}
    elements = math.prod(case.shape) * math.prod(level.size for level in case.levels)
    if case.asks not in ("value", "gradient") or not dtypes <= {"bfloat16", "float32"} or elements < 2**22:
        return None
    if case.constant_rows or case.static["forward_mode"] or any(level.by == "scan" for level in case.levels):
        return None
    return None if is_known(case) else case


def is_known(case: Case) -> bool:
    """Return whether something costs a copy, or is XLA's, as is known.

    An array that is broadcast from less; parameters of which each varies along axes of its own, and is written out
    along the others'; what kernels refuse, or is plain jnp; examples of vmap that share an array of rows, or are behind
    rows in one.
    """
    arrays = case.operands | case.cotangents
    parameters = {(*axes, *(place is None for place in arrays[n].axes)) for n, axes in varying(case).items()}
    of_rows = [a.axes for n, a in arrays.items() if n in ("x", "residual", "z", *case.cotangents)]
    places = {place for axes in of_rows for place in axes} | {level.out for level in case.levels}
    by_name = dataclasses.replace(case, implementation="triton", quantize=None)
    is_written_out = any(a.small != a.shape for a in arrays.values()) or len(parameters) > 1
    return is_written_out or bool(refused(by_name)) or may_be_plain_jnp(case) or not places <= {0}


def compiled(case: Case) -> list[Any]:
    """The programs of a case for an H200: with the operators, and in plain jnp."""
    operands = {n: jax.ShapeDtypeStruct(a.small, a.dtype) for n, a in case.operands.items()}
    cotangents = {n: jax.ShapeDtypeStruct(a.small, result_dtype(case, n)) for n, a in case.cotangents.items()}
    given = (operands, cotangents), {}
    return [compile_for(program(case, module), *given, chip="h200") for module in (jln, jln.reference)]


def moved(seed: int) -> tuple[int, str, float, float]:
    """The MB that the case of a seed moves, with the operators and in plain jnp."""
    case = case_of(seed)
    try:
        ours, plain = compiled(case)
    except Exception as error:
        return seed, f"{case.form.title} raised {type(error).__name__}: {error}"[:300], math.inf, 1.0
    return seed, f"{case.form.title} {case.shape} {case.axes}", ours.bytes_total / 1e6, plain.bytes_total / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--share", type=float, default=0.8)
    parser.add_argument("--seed", type=int)
    arguments = parser.parse_args()
    if arguments.seed is not None:
        case = case_of(arguments.seed)
        if case is None:
            parser.error(f"seed {arguments.seed} draws no call of the kernels at a real size")
        print(case.in_words(), *compiled(case), sep="\n\n")
        return
    seeds = (seed for seed in itertools.count() if case_of(seed) is not None)
    chosen = list(itertools.islice(seeds, arguments.cases))
    # A process keeps what JAX compiled, so that it has to end at times.
    with multiprocessing.get_context("spawn").Pool(arguments.processes, maxtasksperchild=25) as pool:
        rows = list(pool.imap_unordered(moved, chosen))
    rows.sort(key=lambda row: row[2] / row[3], reverse=True)
    over = [row for row in rows if row[2] > arguments.share * row[3]]
    print(f"{'seed':>8} {'share':>6} {'MB':>8} {'plain':>8}  operator, x, axes")
    for seed, title, ours, plain in over:
        print(f"{seed:>8} {ours / plain:>6.2f} {ours:>8.0f} {plain:>8.0f}  {title}")
    print(f"{len(over)} of {len(rows)} move more than {arguments.share} of plain jnp")
    sys.exit("\n".join(row[1] for row in rows if math.isinf(row[2])) or 0)


if __name__ == "__main__":
    main()

"""The search for faster tiles: candidates near the heuristics' own, what the compiler says of each, and the clock.

The compiler goes first, on as many cores as there are, so that little time is needed on a GPU.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jln._tools import clocks, launchers
from jln._tools.catalogue import DIRECTIONS
from jln._tools.clocks import Run
from jln._tools.console import one_line
from jln._tools.workload import Workload
from jln._triton import compiler, tuning
from jln._triton.chip import Chip
from jln._triton.launch import Launch
from jln._triton.target import Gpu, Recorder
from jln._triton.tile import Tile, next_power_of_2
from jln._triton.tuning import Key, Tiles, Trial

# By how much of the heuristics' time a candidate must be faster to be kept, and may be slower in any call: medians
# of 30 runs of one program differ by about a percent.
NOISE = 0.02
# Seconds that may be lost in any call, however short: what the clock does not tell apart.
RESOLUTION = 1e-7
# How many of the fastest are timed again, in all calls: the first of fifty is also the luckiest.
FINALISTS = 4
# How many calls settle a choice, those that move the most bytes: time goes there.
LARGEST = 3

Clock = Callable[[Sequence[Run]], dict[str, float]]


@dataclasses.dataclass(frozen=True)
class LauncherCall:
    """A call of one launcher at the size of one workload."""

    workload: Workload
    direction: str

    name = property(lambda self: f"{self.workload.name} {self.direction}")
    bytes_once = property(lambda self: self.workload.bytes_once(self.direction))


@dataclasses.dataclass(frozen=True)
class Question:
    """A choice of tiles to be settled, the heuristics' answer, and calls that depend on it, the largest first."""

    key: Key
    heuristic: Tiles
    calls: tuple[LauncherCall, ...]

    sizes = property(lambda self: dict(self.key))
    choice = property(lambda self: tuning.CHOICES[self.sizes["choice"]])


def questions(workloads: Sequence[Workload], chip: Chip, others: Iterable[Workload] = ()) -> list[Question]:
    """The choices that `workloads` depend on, each with its largest calls among those of `workloads` and `others`."""
    by_key: dict[Key, tuple[Tiles, list[LauncherCall]]] = {}
    for workload in (*workloads, *(w for w in others if w not in workloads)):
        for direction in workload.directions:
            _, asked = _recorded(LauncherCall(workload, direction), {}, chip)
            for key, heuristic in asked.items():
                if workload in workloads or key in by_key:
                    by_key.setdefault(key, (heuristic, []))[1].append(LauncherCall(workload, direction))
    return [
        Question(key, heuristic, tuple(sorted(calls, key=lambda call: call.bytes_once, reverse=True)[:LARGEST]))
        for key, (heuristic, calls) in by_key.items()
    ]


def _recorded(call: LauncherCall, tiles: dict[Key, Tiles], chip: Chip) -> tuple[list[Launch], dict[Key, Tiles]]:
    recorder = Recorder(chip, trial := Trial(tiles))
    function, shapes = launchers.call(call.workload, call.direction, recorder)
    jax.eval_shape(function, shapes)
    return recorder.launches, trial.asked


def candidates(question: Question) -> list[Tiles]:
    """The tiles to try: those within two steps of the heuristics', without the heuristics' own.

    A step doubles or halves a number, adds or removes a stage, or does the row sums in a kernel of their own or not.
    Only tiles that a kernel can run are tried.
    """
    sizes, heuristic, choice = question.sizes, question.heuristic, question.choice
    width = next_power_of_2(sizes["h"])
    near: list[Tiles] = [
        heuristic | {name: other}
        for name, tile in heuristic.items()
        if tile is not None
        for other in _neighbours(tile, choice.free(name, tile, sizes))
        if other.columns <= max(width, tile.columns)
    ]
    near.extend(choice.others(heuristic, sizes))
    unique = {str(tiles): tiles for tiles in near if tiles != heuristic and tuning.unfit(question.key, tiles) is None}
    return list(unique.values())


def _neighbours(tile: Tile, names: Sequence[str]) -> Iterator[Tile]:
    for steps in itertools.product(range(-2, 3), repeat=len(names)):
        if 0 < sum(map(abs, steps)) <= 2:
            now = {name: getattr(tile, name) for name in names}
            new = {n: now[n] + s if n == "stages" else int(now[n] * 2.0**s) for n, s in zip(names, steps, strict=True)}
            if min(new.values()) >= 1:
                yield dataclasses.replace(tile, **new)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The compiler's verdict on tiles: the worst of the kernels that they launch. why: the reason not to time them."""

    registers: int = 0
    spilled: int = 0
    shared: int = 0
    why: str | None = None


def verdicts(
    pool: concurrent.futures.Executor, question: Question, choices: Sequence[Tiles], chip: Chip
) -> list[Verdict]:
    """The compiler's verdict on each choice; those with no reason against them are worth a GPU's time."""
    tried = (question.heuristic, *choices)
    jobs = [pool.submit(compiled, question.calls[0], question.key, tiles, chip) for tiles in tried]
    own, *others = (job.result() for job in jobs)
    limit = chip.shared
    verdicts = []
    for verdict, tiles in zip(others, choices, strict=True):
        why = verdict.why
        if why is None and verdict.spilled > own.spilled:
            why = f"spills {verdict.spilled} bytes"
        if why is None and verdict.shared > limit:
            why = f"needs {verdict.shared} bytes of shared memory, of which there are {limit}"
        tile = tiles.get("tile") or Tile(1, 1, 1)
        together = tile.programs_per_core
        if why is None and together > 1 and 32 * tile.warps * together * verdict.registers > chip.registers:
            why = f"{together} programs do not fit on a core"
        verdicts.append(dataclasses.replace(verdict, why=why))
    return verdicts


def compiled(call: LauncherCall, key: Key, tiles: Tiles, chip: Chip) -> Verdict:
    """Compile a call with these tiles, and the same call with every optional operand, which other users may give."""
    worst = Verdict()
    for each in (_fullest(call), call):
        launches, _ = _recorded(each, {key: tiles}, chip)
        for launch in launches:
            try:
                r = compiler.compile_launch(launch)
            except Exception as error:  # of whatever kind: the tile is not for this kernel
                return Verdict(why=f"does not compile: {type(error).__name__}")
            worst = Verdict(
                max(worst.registers, r.registers), max(worst.spilled, r.spilled), max(worst.shared, r.shared)
            )
    return worst


def _fullest(call: LauncherCall) -> LauncherCall:
    fields: dict[str, Any] = {"operator": "add_layer_norm_linear"}
    if not call.workload.is_linear:
        fields = {"operator": "add_layer_norm", "features": None, "directions": DIRECTIONS}
    return dataclasses.replace(call, workload=dataclasses.replace(call.workload, absent=(), **fields))


def identifier(tiles: Tiles) -> str:
    """The name by which a trace shows a program with these tiles."""
    return "tiles_" + "_".join(
        "no" if t is None else "_".join(map(str, dataclasses.astuple(t))) for t in tiles.values()
    )


def prepared(call: LauncherCall, key: Key, choices: Sequence[Tiles], chip: Chip) -> list[Run | str]:
    """A program on this device for each choice of tiles, or the reason why there is none.

    A program whose numbers are not those of the first has a reason.
    """
    _, shapes = launchers.call(call.workload, call.direction, Gpu(chip))
    leaves, tree = jax.tree.flatten(shapes)
    arrays = tree.unflatten(jax.random.normal(jax.random.key(i), a.shape, a.dtype) for i, a in enumerate(leaves))

    def lowered(tiles: Tiles) -> Any:
        function, _ = launchers.call(call.workload, call.direction, Gpu(chip, Trial({key: tiles})))

        def program(operands):
            return function(operands)

        program.__name__ = identifier(tiles)
        return jax.jit(program).lower(arrays)

    programs = [_tried(lowered, tiles) for tiles in choices]
    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        programs = list(pool.map(lambda p: p if isinstance(p, str) else _tried(p.compile), programs))
    first: list[Any] = []

    def checked(tiles: Tiles, program: Any) -> Run | str:
        if isinstance(program, str):
            return program
        run = functools.partial(program, arrays)
        got = jax.block_until_ready(run())
        first[:] = first or [got]
        return difference(got, first[0], call.workload) or Run(identifier(tiles), run)

    return [_tried(checked, t, p) for t, p in zip(choices, programs, strict=True)]


def _tried(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception as error:  # of the compiler's or the driver's, about one candidate
        return one_line(error)


class Wrong(str):
    """The reason not to time a program: its numbers are not those of the heuristics' tiles."""


def difference(got: Any, expected: Any, workload: Workload) -> Wrong | None:
    """The way in which `got` is wrong; None where the order of sums explains how it differs from `expected`.

    Sums of n terms may differ by about sqrt(n) roundings of the arithmetic, here of at most 8 factors each; results
    rounded to 16 bits, and products rounded to TF32, by two roundings.
    """
    terms = max(workload.rows, workload.width)
    eps = float(jnp.finfo(jnp.float32).eps)
    operand = 2.0**-10 if workload.is_linear and workload.dtype == "float32" else float(jnp.finfo(workload.dtype).eps)
    allowed = 2 * operand + 8 * math.sqrt(terms) * eps
    for i, (a, b) in enumerate(zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        error, largest = float(jnp.max(jnp.abs(a - b))), float(jnp.max(jnp.abs(b)))
        if not error <= allowed * largest:
            return Wrong(f"WRONG: result {i} is off by {error:.2e} of {largest:.2e}")
    return None


@dataclasses.dataclass(frozen=True)
class Answer:
    """The outcome of a search.

    tiles: the fastest; None where the heuristics' own are.
    seconds: for each call, its time with the heuristics' tiles and with `tiles`.
    failed: the candidates that were not timed, each with the reason.
    """

    tiles: Tiles | None
    seconds: dict[str, tuple[float, float]]
    timed: int
    failed: dict[str, str]

    ratio = property(lambda self: math.prod(new / old for old, new in self.seconds.values()) ** (1 / len(self.seconds)))


def fastest(question: Question, choices: Sequence[Tiles], chip: Chip, clock: Clock) -> Answer:
    """Time the choices and return the fastest. Raises RuntimeError where the heuristics' own tiles cannot be timed."""
    failed: dict[str, str] = {}

    def times(call: LauncherCall, tried: Sequence[Tiles]) -> tuple[float, dict[str, float]]:
        """Return the time of a call with the heuristics' tiles, and its times with each of `tried`."""
        own, *others = prepared(call, question.key, [question.heuristic, *tried], chip)
        if isinstance(own, str):
            raise RuntimeError(f"{call.name}: {own}")
        failed.update({identifier(t): run for t, run in zip(tried, others, strict=True) if isinstance(run, str)})
        taken = clock([own, *(run for run in others if isinstance(run, Run))])
        return taken.pop(own.name), taken

    first, *_ = question.calls
    old, taken = times(first, choices)
    by_name = {identifier(tiles): tiles for tiles in choices}
    left = [by_name[name] for name in sorted(taken, key=taken.__getitem__) if taken[name] < (1 - NOISE) * old]
    left = left[:FINALISTS]
    seconds: dict[str, dict[str, tuple[float, float]]] = {identifier(tiles): {} for tiles in left}
    own = {first.name: (old, old)}
    for call in question.calls:
        if not left:
            break
        old, taken = times(call, left)
        own[call.name] = (old, old)
        left = [t for t in left if taken.get(identifier(t), math.inf) <= (1 + NOISE) * old + RESOLUTION]
        for tiles in left:
            seconds[identifier(tiles)][call.name] = (old, taken[identifier(tiles)])
    answers = [Answer(t, seconds[identifier(t)], len(choices) - len(failed), failed) for t in left]
    best = min(answers, key=lambda f: f.ratio, default=None)
    if best is None or best.ratio >= 1 - NOISE:
        return Answer(None, own, len(choices) - len(failed), failed)
    return best


def by_the_device(repetitions: int) -> Clock:
    """A clock that gives medians of the profiler's times, with a cold L2."""
    return lambda runs: {name: t.median for name, t in clocks.traced(runs, repetitions).items()}

"""The check of this machine, `python -m jln check`: every operator's values and gradients beside float64.

An error may be twice that of plain jnp in the same dtype, plus one rounding of the result, plus what some roundings of
every operand would change, as of badly conditioned results no program can be better than its inputs are known. The rule
holds for the largest error, which finds an element that is off, and for the root mean square, which finds a result that
is off a little everywhere.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jln import _operators, reference
from jln._junction.arrays import OPERANDS, TABLE, Shape

DTYPES = ("bfloat16", "float32", "float16", "float64")
ALIASES = {"bf16": "bfloat16"} | {f"{f}{bits}": f"float{bits}" for f in ("f", "fp") for bits in (16, 32, 64)}
# Several rows a tile and a ragged last one; a row in chunks. Of Linears: few features, which are fused, and several
# that are not. On a GPU also common rows, which take the interpreter many seconds.
SIZES = (((37, 100), (64,)), ((2, 20000), (300, 40)))
ON_A_GPU = (((64, 1024), (64,)),)
# The roundings of every operand that an error may be worth. One is enough for random data; those of a sum of terms near
# each other all go one way: the most that was seen in dx is 9.2, for a mean of 1000 in float64.
ROUNDINGS = 16
# After so many checks the time of all is said. One of a Linear takes some three times as long as another, on a CPU.
FEW, LINEAR_PART = 4, 3


@dataclasses.dataclass(frozen=True)
class Form:
    """A public operator with some of its arrays, by name and in order, and with static options."""

    name: str
    arrays: tuple[str, ...]
    options: tuple[tuple[str, Any], ...] = ()

    is_linear = property(lambda self: "kernel" in self.arrays)

    def function(self, module: Any = _operators, **options: Any) -> Callable[..., dict[str, Any]]:
        """The operator of `jln` or of `jln.reference` as a function of its arrays in order, its results by name."""
        precise = {"precision": "highest"} if self.is_linear else {}  # a GPU's own multiplies float32 with ten bits
        call = functools.partial(getattr(module, self.name), **precise, **dict(self.options), **options)

        def by_name(*arrays: Any) -> dict[str, Any]:
            made = call(**dict(zip(self.arrays, arrays, strict=True)))
            return {"y": made[0], "total": made[1]} if "add_" in self.name else {"y": made}

        return by_name

    def draw(self, shape: tuple[int, ...], features: tuple[int, ...], dtype: str, seed: int = 0) -> list[Any]:
        """Draw arrays of NumPy, or tuples of them of several Linears: near 1 what multiplies, of spread 1 the rest."""
        random, drawn = np.random.default_rng(seed), []
        sizes = {
            Shape.ROW: [shape],
            Shape.COLUMN: [shape[-1:]],
            Shape.KERNEL: [(shape[-1], n) for n in features],
            Shape.BIAS: [(n,) for n in features],
        }
        for name in self.arrays:
            mean = 1.0 if "scale" in name or name == "gate" else 0.0
            spread = 1 / math.sqrt(shape[-1]) if name == "kernel" else 1.0
            normals = [random.standard_normal(s) for s in sizes[TABLE[name].shape]]
            made = tuple((spread * a + mean).astype(jnp.dtype(dtype)) for a in normals)
            drawn.append(made[0] if len(made) == 1 else made)
        return drawn


def _forms() -> dict[str, Form]:
    """The operators as most models have them, and then, where they take more arrays, with all of them."""
    usual, full = {}, {}
    for name in (name for name in vars(reference) if name in _operators.__all__):
        takes = [p for p in inspect.signature(getattr(_operators, name)).parameters.values() if p.name in OPERANDS]
        usual[name] = Form(name, tuple(p.name for p in takes if p.kind is not p.KEYWORD_ONLY))
        if more := [p.name for p in takes if p.kind is p.KEYWORD_ONLY]:
            full[", ".join([name, *more])] = Form(name, (*usual[name].arrays, *more))
    gate_last = Form("rms_norm_gated", ("x", "z", "scale"), (("norm_before_gate", False),))
    return {**usual, **full, "rms_norm_gated, norm_before_gate=False": gate_last}


FORMS = _forms()


class Error(NamedTuple):
    """The error of a result and what it may be: the largest, and the root mean square."""

    name: str
    error: float
    limit: float
    rms_error: float
    rms_limit: float

    ok = property(lambda self: self.error <= self.limit and self.rms_error <= self.rms_limit)  # a NaN is not

    @property
    def part(self) -> float:
        """The error as a part of its limit, of the two the one that is nearer to it or beyond."""
        return max(e / (limit or math.ulp(0.0)) for e, limit in (self[1:3], self[3:5]))

    def __str__(self) -> str:
        rms = f"rms {self.rms_error:.2e} of {self.rms_limit:.2e}"
        return f"{self.name}: error {self.error:.2e} of {self.limit:.2e}, {rms}"


Step = Callable[..., dict[str, jax.Array]]


def step(function: Callable[..., dict[str, Any]], names: Sequence[str]) -> Step:
    """Return a jitted function of arrays and of the results' cotangents that gives results and gradients by name."""

    @jax.jit
    def both(arrays: list[Any], cotangents: dict[str, Any]) -> dict[str, jax.Array]:
        results, pullback = jax.vjp(function, *arrays)
        found = results | {f"d{name}": g for name, g in zip(names, pullback(cotangents), strict=True)}
        return {n + jax.tree_util.keystr(path): a for n in found for path, a in jax.tree.leaves_with_path(found[n])}

    return both


class Judge:
    """The true results of a step, computed on the CPU in float64, and how far from them a program may be."""

    def __init__(self, truth: Step, plain: dict, operands: Any, dtype: Any, sums: dict[str, int] | None = None):
        """Compute what sets the limits.

        plain: plain jnp's results. operands: of the step `truth`, in their dtypes. dtype: of x. sums: of results that
        may be added up in any order how many terms they have.
        """
        eps = float(jnp.finfo(jnp.promote_types(dtype, jnp.float32)).eps)
        random = np.random.default_rng(1)
        with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
            wide = jax.tree.map(lambda a: np.asarray(a, "float64"), operands)
            nudged = jax.tree.map(lambda a: a * (1 + eps * random.uniform(-1, 1, a.shape)), wide)
            self.true, off = ({n: np.asarray(a) for n, a in truth(*given).items()} for given in (wide, nudged))
        self._allowed = {}
        for name, t in self.true.items():
            summed = eps * math.sqrt((sums or {}).get(name, 0))
            self._allowed[name] = [
                2 * error + ROUNDINGS * nudge + summed * size
                for error, nudge, size in zip(_sizes(plain[name], t), _sizes(off[name], t), _sizes(t, 0), strict=True)
            ]

    def errors(self, got: dict[str, Any]) -> list[Error]:
        """The error of every result that was got."""
        found = []
        for name, a in got.items():
            t, (limit, rms_limit) = self.true[name], self._allowed[name]
            (error, rms_error), (largest, rms) = _sizes(a, t), _sizes(t, 0)
            eps = float(jnp.finfo(np.asarray(a).dtype).eps)
            found.append(Error(name, error, limit + eps * largest, rms_error, rms_limit + eps * rms / math.sqrt(12)))
        return found


def _sizes(got: Any, true: Any) -> tuple[float, float]:
    """The largest difference and its root mean square. An infinity is none where the true value overflows to it."""
    got, true = np.asarray(got), np.broadcast_to(true, np.shape(got))
    with np.errstate(over="ignore", invalid="ignore"):
        same = np.isinf(got) & (got == true.astype(got.dtype))
        difference = np.where(same, 0, np.abs(got.astype("float64") - true))
        largest = float(np.max(difference, initial=0.0))
        unit = largest if 0 < largest < math.inf else 1.0  # the squares of 1e200 overflow
        return largest, unit * float(np.sqrt(np.mean((difference / unit) ** 2)))


def check_form(form: Form, dtype: str, implementation: str, device: Any, seed: int = 0) -> tuple[Error, str]:
    """The result of a form, of all sizes, that is nearest to its limit or beyond it, and the size.

    On a GPU the kernels' program runs twice, with memory of its results' sizes full of NaN between, and raises
    RuntimeError if the second run has other bits.
    """
    found = []
    for shape, features in SIZES + (ON_A_GPU if device.platform == "gpu" else ()):
        arrays = form.draw(shape, features, dtype, seed)
        ours, plain = form.function(implementation=implementation), step(form.function(reference), form.arrays)
        with jax.enable_x64(dtype == "float64"), jax.default_device(device):
            results = jax.eval_shape(ours, *arrays)
            random = np.random.default_rng(seed + 1)
            cotangents = jax.tree.map(lambda a, r=random: r.standard_normal(a.shape).astype(a.dtype), results)
            run = step(ours, form.arrays)
            got = jax.tree.map(np.asarray, run(arrays, cotangents))
            if device.platform == "gpu" and implementation == "triton":
                sizes = [a.size * a.itemsize for a in got.values() for _ in range(3)]
                jax.block_until_ready([jnp.full(size // 4 + 1, 2**32 - 1, jnp.uint32) for size in sizes])
                again = run(arrays, cotangents)
                if any(a.tobytes() != np.asarray(again[name]).tobytes() for name, a in got.items()):
                    raise RuntimeError(f"not the same bits twice, of {shape}")
            judge = Judge(plain, plain(arrays, cotangents), (arrays, cotangents), dtype)
        size = "x".join(map(str, shape)) + (f" to {'+'.join(map(str, features))}" if form.is_linear else "")
        found += [(error, size) for error in judge.errors(got)]
    return max(found, key=lambda pair: (not pair[0].ok, pair[0].part))


def run(names: Iterable[str], dtypes: Iterable[str], implementations: Iterable[str], seconds: float = math.inf) -> int:
    """Check forms on this process' first device, a line each; begin none after `seconds`; return 1 if one is wrong."""
    device, done, wrong, x64 = jax.devices()[0], 0, 0, jax.config.values["jax_enable_x64"]
    checks, started = [*itertools.product(names, dtypes, implementations)], time.monotonic()
    parts = [LINEAR_PART if FORMS[name].is_linear else 1 for name, *_ in checks]
    print(f"{len(checks)} checks", file=sys.stderr)
    for done, (name, dtype, implementation) in enumerate(checks, 1):
        try:
            jax.config.update("jax_enable_x64", dtype == "float64")  # in all threads: the interpreter runs in others
            error, size = check_form(FORMS[name], dtype, implementation, device)
            said = f"{error.part:.2g}" if error.ok else f"WRONG: {error}, of {size}"
        except Exception as raised:  # one that raises is wrong, and leaves the others to run
            said = f"WRONG: {type(raised).__name__}: {' '.join(str(raised).split())[:500]}"
        wrong += "WRONG" in said
        print(f"{name}, {dtype}, {implementation}: {said}", flush=True)
        taken = time.monotonic() - started
        if done == FEW < len(checks):
            print(f"some {taken * sum(parts) / sum(parts[:done]):.0f} s for all", file=sys.stderr)
        if taken > seconds:
            break
    jax.config.update("jax_enable_x64", x64)
    verdict = f"{f'{wrong} WRONG' if wrong else 'all is right'} on {device.device_kind}"
    print(f"{done} of {len(checks)} checks: {verdict}, in {time.monotonic() - started:.0f} s")
    print("The numbers are the largest error as a part of what is allowed, of values and all gradients beside float64.")
    return int(wrong > 0)

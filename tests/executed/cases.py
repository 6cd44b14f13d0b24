"""A case: an operator lowered for a chip, the PTX of its Triton calls executed, every result judged against float64."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import jln
import traffic
import workbench
from jln._triton import target
from jln._triton.chip import CHIPS
from ptx import Program

# With three SMs persistent programs take many tiles each, in a number that the tiles are no multiple of.
SMALL = {f"small-{c.name}": dataclasses.replace(c, name=f"small-{c.name}", cores=3) for c in CHIPS.values()}


@contextlib.contextmanager
def lowering_for(chip: str):
    with target.using(target.Gpu((CHIPS | SMALL)[chip])):
        yield


@dataclasses.dataclass(frozen=True)
class Case:
    """An operator, its operands, and the chip it runs on.

    Letters stand for operands by their initials; e is x_bias, p x_scale; d and t are the cotangents of y and of the
    sum.

    shape: x's.
    features: the Linear's, 0 where there is none.
    without: letters of the optional operands that are None, of "sobegp".
    over: letters of the operands that have an axis of EXAMPLES of their own, for vmap.
    wanted: letters of the operands whose gradients are taken; all if empty.
    of_examples: whether x's first axis is that of examples, each of which has a scale, an offset and a gate of its own;
      there is no x_bias then. of_heads: the same of the axis before the normalised one.
    """

    operator: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    chip: str = "h200"
    features: int = 0
    parameters: str = ""
    residual: str = ""
    without: str = ""
    over: str = ""
    wanted: str = ""
    of_examples: bool = False
    of_heads: bool = False
    zero_centered_scale: bool = False
    epsilon: float = workbench.EPSILON
    forward_mode: bool = False
    remat: bool = False

    def __str__(self):
        """The fields that are not at their defaults."""
        rest = dataclasses.fields(self)[4:]
        special = [f"{f.name}={getattr(self, f.name)}" for f in rest if getattr(self, f.name) != f.default]
        shape = "x".join(map(str, self.shape))
        return " ".join([self.operator, shape, self.dtype, self.chip, *special]).replace(" ", "-").replace(",-", ",")

    @property
    def kind(self):
        return (workbench.LINEAR_OPERATORS | workbench.OPERATORS | workbench.FORMS | workbench.GATED)[self.operator]

    @property
    def aligned(self) -> bool:
        """True where rows start on 16 bytes, and products have operands in one dtype.

        A fused kernel reads a wider residual with gaps between a warp's threads.
        """
        one_dtype = not self.features or (not self.mixed and self.parameters in ("", self.dtype))
        itemsize = min(jnp.dtype(d).itemsize for d in (self.dtype, self.residual or self.dtype))
        return one_dtype and all(run * itemsize % 16 == 0 for run in (self.shape[-1], self.features))

    @property
    def mixed(self) -> bool:
        """True where the residual has another dtype than x."""
        return self.residual not in ("", self.dtype)

    @property
    def letters(self) -> str:
        return "".join({"x_bias": "e", "x_scale": "p"}.get(name, name[0]) for name in self.kind.kind.names)

    @property
    def adds(self) -> bool:
        """True where the operator returns a sum too, or a None in its place."""
        return "r" in self.letters

    @property
    def own_axes(self) -> list[int]:
        """The axes of examples and of heads."""
        return [0] * self.of_examples + [len(self.shape) - 2] * self.of_heads

    @property
    def large(self) -> frozenset[int]:
        """The numbers of elements of large arrays: of rows, of one example's or of all, and of the Linears' matrix."""
        elements, h = math.prod(self.shape), self.shape[-1]
        copies = (1, EXAMPLES) if self.over else (1,)
        of_rows = {n * copy for n in (elements, elements // h * self.features) for copy in copies}
        return frozenset({*of_rows, h * self.features} - {0})


EXAMPLES = 3


def _one(case: Case) -> dict[str, np.ndarray | None]:
    """The operands and cotangents of one example, by letter."""
    features = (case.features,) if case.features else ()
    options = {"features": features, "parameter_dtype": case.parameters or None}
    operands = workbench.arguments(case.kind, case.shape, case.dtype, **options)
    given = dict(zip(case.letters, operands, strict=True))
    if case.residual:
        given["r"] = given["r"].astype(case.residual)
    own = {*case.own_axes, len(case.shape) - 1}
    for i, letter in enumerate("sogp"):
        if given.get(letter) is not None and case.own_axes:
            shape = tuple(n if axis in own else 1 for axis, n in enumerate(case.shape))
            given[letter] = workbench.normal(30 + i, shape, case.parameters or case.dtype)
    given |= {letter: None for letter in case.without}
    outputs = jax.eval_shape(functools.partial(_call, case, jln.reference), given)
    cotangents = workbench.cotangents(outputs)
    given |= dict(zip("dt", cotangents, strict=True)) if case.adds else {"d": cotangents}
    return {letter: None if a is None else np.asarray(a) for letter, a in given.items()}


def arrays(case: Case) -> dict[str, np.ndarray | None]:
    """The operands and cotangents by letter; those in `over` have EXAMPLES in front, no two of them alike."""
    factors = 1 + np.arange(EXAMPLES) / 7
    return {
        letter: a if a is None or letter not in case.over else np.stack([(a * f).astype(a.dtype) for f in factors])
        for letter, a in _one(case).items()
    }


def _call(case: Case, module, given):
    options = {"epsilon": case.epsilon, "zero_centered_scale": case.zero_centered_scale}
    if module is not jln.reference:
        options |= {"implementation": "triton", "forward_mode": case.forward_mode}
        options |= {"remat": True} if case.remat else {}
    return case.kind(*(given[letter] for letter in case.letters), module=module, **options)


def step(case: Case, module=jln) -> Callable[..., dict[str, jax.Array]]:
    """The operator's results and the wanted operands' gradients, a function of `arrays(case)`: from name to array."""

    def run(given):
        wanted = [letter for letter in case.letters if letter in (case.wanted or case.letters)]

        def function(operands):
            return _call(case, module, given | operands)

        outputs, pullback = jax.vjp(function, {letter: given[letter] for letter in wanted})
        (gradients,) = pullback((given["d"], given["t"]) if case.adds else given["d"])
        results = [*(outputs if case.adds else (outputs,)), *(gradients.get(letter) for letter in case.letters)]
        return {name: a for name, a in zip(case.kind.results, results, strict=True) if a is not None}

    if not case.over:
        return run
    return lambda given: jax.vmap(run, ({letter: 0 if letter in case.over else None for letter in given},))(given)


# What rows share, or those of an example or of a head.
OF_EXAMPLES = ("g", "dgate", "s", "o", "p", "dscale", "doffset", "dx_scale")


def judged(case: Case, given, got, plain) -> dict[str, float]:
    """Each result's largest error as a part of what is allowed: 1 is all of it."""
    worst: dict[str, float] = {}
    for i, *own in np.ndindex(EXAMPLES if case.over else 1, *(case.shape[axis] for axis in case.own_axes)):

        def example(arrays, batched, i=i, own=own):
            found = {}
            for name, a in arrays.items():
                if a is not None:
                    a = a[i] if name in batched else a
                    for axis, place in zip(case.own_axes, own, strict=True):
                        a = np.take(a, [place], axis)
                    # As workbench's `truth` takes it: a parameter, or rows.
                    a = a.reshape(-1) if a.ndim < 2 or name in OF_EXAMPLES else a.reshape(-1, a.shape[-1])
                found[name] = a
            return found

        rows = example(given, case.over)
        ours, theirs = (example(results, got if case.over else ()) for results in (got, plain))
        operands = [rows[letter] for letter in case.letters]
        cotangent = (rows["d"], rows["t"]) if case.adds else rows["d"]
        options = {"zero_centered_scale": case.zero_centered_scale and rows["s"] is not None, "epsilon": case.epsilon}
        true = workbench.truth(case.kind, operands, cotangent, ours.get("total"), **options)
        for name, share in workbench.shares(ours, theirs, true).items():
            worst[name] = max(worst.get(name, 0.0), share)
    return worst


@dataclasses.dataclass
class Ran:
    """The outcome of executing a case: the program, and each result's largest error as a part of what is allowed."""

    program: Program
    shares: dict[str, float]


def _cut(a):
    """The 10 bits behind the point that the tensor cores read of a float32: TF32."""
    bits = jax.lax.bitcast_convert_type(a, np.uint32) & np.uint32(2**32 - 2**13)
    return jax.lax.bitcast_convert_type(bits, np.float32)


@jax.custom_vjp
def _product(z, kernel):
    return jnp.tensordot(_cut(z), _cut(kernel), 1)


def _pullback(saved, dy):
    (z, kernel), dy, rows = saved, _cut(dy), tuple(range(dy.ndim - 1))
    return jnp.tensordot(dy, kernel.T, 1), jnp.tensordot(z, dy, (rows, rows))


_product.defvjp(lambda z, kernel: (_product(z, kernel), (_cut(z), _cut(kernel))), _pullback)


def _linear_as_on_a_gpu(z, dtype, kernel, bias, precision):
    """A stand-in for the reference's Linear, which on the CPU multiplies float32 in full, and not in TF32."""
    if dtype != np.float32:
        return _linear(z, dtype, kernel, bias, precision)
    y = _product(z.astype(dtype), kernel.astype(dtype))
    return y if bias is None else y + jnp.expand_dims(bias.astype(dtype), range(y.ndim - bias.ndim))


_linear = jln.reference._linear


@functools.lru_cache  # a broken launch of a case is judged by the same
def _plain(case: Case):
    given = arrays(case)
    with mock.patch.object(jln.reference, "_linear", _linear_as_on_a_gpu):
        return given, {name: np.asarray(a) for name, a in jax.jit(step(case, jln.reference))(given).items()}


def execute(case: Case, program: Program | None = None) -> Ran:
    """Execute a case, or its program as a test has changed it.

    Raises ptx.Violation where a GPU would do what nobody can count on.
    """
    given, plain = _plain(case)
    if program is None:
        with lowering_for(case.chip):
            program = Program(step(case), given)
    got = {k: np.asarray(a) for k, a in program.run(given).items()}
    return Ran(program, judged(case, given, got, plain))


@functools.lru_cache
def check(case: Case) -> Ran:
    """Execute a case and hold it to all that is promised: errors, and how memory was reached."""
    ran = execute(case)
    assert max(ran.shares.values()) <= 1, ran.shares
    assert ran.program.calls, "no kernel of ours in it"
    if case.aligned:
        # The fused kernels take 64 columns at a time, behind a sum the forward 32. Where rows do not start on sectors,
        # these lie across one more in every other row.
        ragged = case.features and case.shape[-1] % 64
        sectors = 1.1 if not ragged else 1.26 if case.adds else 1.13
        # The fused kernels' tiles, and those of rows in chunks beside a gate, an x_bias or z, may have fewer elements
        # than their threads could load. A parameter is as large as the one row beside it, and may be in another dtype.
        # The narrower of two dtypes comes by as many elements as a load takes of the wider, or as a thread has.
        in_parts = case.features or case.kind.entry.given_extras or case.kind.entry.is_gated
        narrowest = 2 if case.mixed else 8 if in_parts else 16
        has_one_row = math.prod(case.shape) == case.shape[-1]
        for found in traffic.of(ran.program, case.large):
            if found.kernel in traffic.OF_SHARES:
                assert found.sectors <= 1.35, found  # tiles of a few rows of dkernel
                continue
            assert found.sectors <= sectors, found
            assert found.widths, found
            assert min(found.widths) >= narrowest or (has_one_row and 16 in found.widths), found
    return ran

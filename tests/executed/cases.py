"""A case: an operator lowered for a chip, the PTX of its Triton calls executed, every result judged against float64."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
    features: the Linear's; or of several a tuple each, with `unbiased`, the places of those that have no bias.
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
    features: tuple[int, ...] | tuple[tuple[int, ...], ...] = ()
    unbiased: tuple[int, ...] = ()
    axis: int | tuple[int, ...] = -1
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
    mean: float = 0.0
    magnitude: float = 1.0

    def __str__(self):
        """The fields that are not at their defaults."""
        rest = dataclasses.fields(self)[4:]
        special = [f"{f.name}={getattr(self, f.name)}" for f in rest if getattr(self, f.name) != f.default]
        shape = "x".join(map(str, self.shape))
        return " ".join([self.operator, shape, self.dtype, self.chip, *special]).replace(" ", "-").replace(",-", ",")

    @property
    def linear(self) -> bool:
        return bool(self.features)

    @property
    def kind(self):
        return (workbench.LINEAR_OPERATORS | workbench.OPERATORS | workbench.FORMS | workbench.GATED)[self.operator]

    @property
    def axes(self) -> tuple[int, ...]:
        return (self.axis,) if isinstance(self.axis, int) else self.axis

    @property
    def products(self) -> tuple[tuple[int, ...], ...]:
        """The features of each Linear."""
        several = tuple(f for f in self.features if isinstance(f, tuple))
        return several or (tuple(f for f in self.features if isinstance(f, int)),)

    @property
    def columns(self) -> list[slice]:
        """The columns of each Linear, where the products of all are side by side."""
        ends = np.cumsum([0, *(math.prod(f) for f in self.products)]).tolist()
        return [slice(a, b) for a, b in itertools.pairwise(ends)]

    @property
    def aligned(self) -> bool:
        """True where rows start on 16 bytes, and products have operands in one dtype.

        A fused kernel reads a wider residual with gaps between a warp's threads.
        """
        runs = [math.prod(self.shape[a] for a in self.axes), *([self.columns[-1].stop] if self.linear else [])]
        one_dtype = not self.linear or (not self.mixed and self.parameters in ("", self.dtype))
        itemsize = min(jnp.dtype(d).itemsize for d in (self.dtype, self.residual or self.dtype))
        return one_dtype and all(run * itemsize % 16 == 0 for run in runs)

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
        features = self.columns[-1].stop if self.linear else 0
        copies = (1, EXAMPLES) if self.over else (1,)
        of_rows = {n * copy for n in (elements, elements // h * features) for copy in copies}
        return frozenset({*of_rows, h * features} - {0})

    def parameter_shape(self) -> tuple[int, ...]:
        """The shape of a scale, an offset or a gate of x's rank."""
        own = {*self.own_axes, *(a % len(self.shape) for a in self.axes)}
        return tuple(n if i in own else 1 for i, n in enumerate(self.shape))


EXAMPLES = 3


def _one(case: Case) -> dict[str, np.ndarray | None]:
    """The operands and cotangents of one example, by letter."""
    parameters = {"parameter_dtype": case.parameters or None}
    parameters |= {"features": (case.columns[-1].stop,)} if case.linear else {"axis": case.axis}
    operands = workbench.arguments(case.kind, case.shape, case.dtype, **parameters)
    given = dict(zip(case.letters, operands, strict=True))
    given["x"] = ((given["x"] + case.mean) * case.magnitude).astype(case.dtype)
    if case.residual:
        given["r"] = given["r"].astype(case.residual)
    for i, letter in enumerate("sogp"):
        if given.get(letter) is not None and case.own_axes:
            given[letter] = workbench.normal(30 + i, case.parameter_shape(), case.parameters or case.dtype)
    given |= {letter: None for letter in case.without}
    for i in case.unbiased:
        given["b"] = given["b"].at[case.columns[i]].set(0)
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
    """Call the operator.

    Kernels, biases and y of several Linears are one array each here, side by side as for a single Linear.
    """
    ours = {} if module is jln.reference else {"implementation": "triton", "forward_mode": case.forward_mode}
    ours |= {"remat": True} if ours and case.remat else {}
    options = {"epsilon": case.epsilon, "zero_centered_scale": case.zero_centered_scale}
    axis = {} if case.linear else {"axis": case.axis}
    if case.linear:
        given = given | {"k": _each(case, given["k"]), "b": None if given["b"] is None else _each(case, given["b"])}
        if len(case.products) == 1:
            given |= {letter: a and a[0] for letter, a in given.items() if letter in "kb"}
        elif given["b"] is not None:
            given["b"] = tuple(None if i in case.unbiased else b for i, b in enumerate(given["b"]))
    results = case.kind(*(given[letter] for letter in case.letters), module=module, **options, **axis, **ours)
    if not case.linear:
        return results
    y, total = results if case.adds else (results, None)
    lead = case.shape[:-1]
    y = jnp.concatenate([a.reshape(*lead, -1) for a in jax.tree.leaves(y)], -1)
    return (y, total) if case.adds else y


def _each(case: Case, a):
    """The part that each Linear has of an array in which all are side by side."""
    parts = (a[..., columns] for columns in case.columns)
    return tuple(p.reshape(*a.shape[:-1], *features) for p, features in zip(parts, case.products, strict=True))


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


# What examples may have of their own.
OF_EXAMPLES = ("g", "dgate", "s", "o", "p", "dscale", "doffset", "dx_scale")


def as_rows(case: Case, name: str, a: np.ndarray | None) -> np.ndarray | None:
    """An operand or a result of one example as workbench's `truth` takes it: normalised axes last, the others one."""
    if a is None:
        return None
    if case.own_axes and name in OF_EXAMPLES:
        return a.reshape(-1)
    if case.linear:
        return a if a.ndim < 2 else a.reshape(-1, a.shape[-1])
    if a.ndim < len(case.shape) or name in OF_EXAMPLES:
        return a.reshape(-1)
    axes = tuple(range(-len(case.axes), 0))
    return np.moveaxis(a, case.axes, axes).reshape(-1, int(np.prod([case.shape[i] for i in case.axes])))


# What all examples share of a Linear, and its gradients, which are sums over all of them.
OF_LINEAR = frozenset({"k", "b", "dkernel", "dbias"})


def judged(case: Case, given, got, plain) -> dict[str, float]:
    """Each result's largest error as a part of what is allowed: 1 is all of it."""
    worst: dict[str, float] = {}
    sums: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for i, *own in np.ndindex(EXAMPLES if case.over else 1, *(case.shape[axis] for axis in case.own_axes)):

        def example(name, a, batched, i=i, own=own):
            if a is None:
                return None
            a = a[i] if batched else a
            for axis, place in zip(case.own_axes, own, strict=True):
                a = a if name in OF_LINEAR else np.take(a, [place], axis)
            return a

        rows = {k: as_rows(case, k, example(k, a, k in case.over)) for k, a in given.items()}
        ours, theirs = (
            {k: as_rows(case, k, example(k, a, bool(case.over))) for k, a in r.items()} for r in (got, plain)
        )
        operands = [rows[letter] for letter in case.letters]
        cotangent = (rows["d"], rows["t"]) if case.adds else rows["d"]
        options = {"zero_centered_scale": case.zero_centered_scale and rows["s"] is not None, "epsilon": case.epsilon}
        true = workbench.truth(case.kind, operands, cotangent, ours.get("total"), **options)
        for place in case.unbiased:  # what is not there has no gradient
            true[0]["dbias"][case.columns[place]] = 0
        if case.own_axes:
            for name in OF_LINEAR & ours.keys():
                value, rounding = sums.get(name, (0, 0))
                sums[name] = value + true[0][name], np.hypot(rounding, true[1][name])
            ours, theirs = ({n: a for n, a in r.items() if n not in OF_LINEAR} for r in (ours, theirs))
        for name, share in workbench.shares(ours, theirs, true).items():
            worst[name] = max(worst.get(name, 0.0), share)
    ours, theirs = ({n: r[n] for n in sums} for r in (got, plain))
    true = tuple({n: of[i] for n, of in sums.items()} for i in range(2))
    return worst | workbench.shares(ours, theirs, true)


@dataclasses.dataclass
class Ran:
    """The outcome of executing a case."""

    got: dict[str, np.ndarray]
    shares: dict[str, float]
    program: Program
    seconds: float

    @property
    def worst(self) -> float:
        return max(self.shares.values())


def _cut(a):
    """The 10 bits behind the point that the tensor cores read of a float32: TF32."""
    return jax.lax.bitcast_convert_type(
        jax.lax.bitcast_convert_type(a, np.uint32) & np.uint32(2**32 - 2**13), np.float32
    )


@jax.custom_vjp
def _tf32_product(z, kernel):
    return jnp.tensordot(_cut(z), _cut(kernel), 1)


def _tf32_pullback(saved, dy):
    (z, kernel), lead = saved, tuple(range(saved[0].ndim - 1))
    features = tuple(range(1, kernel.ndim))
    dz = jnp.tensordot(_cut(dy), _cut(kernel), (tuple(range(len(lead), dy.ndim)), features))
    return dz, jnp.tensordot(_cut(z), _cut(dy), (lead, lead))


_tf32_product.defvjp(lambda z, kernel: (_tf32_product(z, kernel), (z, kernel)), _tf32_pullback)


def _linear_as_on_a_gpu(z, dtype, kernel, bias, precision):
    """A stand-in for the reference's Linear, which on the CPU multiplies float32 in full, and not in TF32."""
    if dtype != np.float32:
        return _linear(z, dtype, kernel, bias, precision)
    y = _tf32_product(z.astype(dtype), kernel.astype(dtype))
    return y if bias is None else y + jnp.expand_dims(bias.astype(dtype), range(y.ndim - bias.ndim))


_linear = jln.reference._linear


@functools.lru_cache(1)  # a broken copy of a case is judged by the same
def _plain(case: Case):
    given = arrays(case)
    with mock.patch.object(jln.reference, "_linear", _linear_as_on_a_gpu):
        return given, {name: np.asarray(a) for name, a in jax.jit(step(case, jln.reference))(given).items()}


def execute(case: Case, *, edit=None) -> Ran:
    """Execute a case. `edit` may change a call before it runs.

    Raises ptx.Violation where a GPU would do what nobody can count on.
    """
    start = time.perf_counter()
    given, plain = _plain(case)
    with lowering_for(case.chip):
        program = Program(step(case), given, edit=edit)
    got = {k: np.asarray(a) for k, a in program.run(given).items()}
    return Ran(got, judged(case, given, got, plain), program, time.perf_counter() - start)


def check(case: Case) -> Ran:
    """Execute a case and hold it to all that is promised: errors, what was written, and how memory was reached."""
    ran = execute(case)
    assert ran.worst <= 1, ran.shares
    assert ran.program.calls, "no kernel of ours in it"
    for stats in ran.program.stats:
        assert not stats.unwritten and not stats.unwaited and not stats.contended, stats
    if case.aligned:
        # The fused kernels take 64 columns at a time, behind a sum the forward 32. Where rows do not start on sectors,
        # these lie across one more in every other row.
        ragged = case.linear and case.shape[-1] % 64
        sectors = 1.1 if not ragged else 1.26 if case.adds else 1.13
        # The fused kernels' tiles, and those of rows in chunks beside a gate, an x_bias or z, may have fewer elements
        # than their threads could load. A parameter is as large as the one row beside it, and may be in another dtype.
        # The narrower of two dtypes comes by as many elements as a load takes of the wider, or as a thread has.
        in_parts = case.linear or case.kind.entry.given_extras or case.kind.entry.is_gated
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


def cases(listed: list[Case], *, quick: tuple[int, ...]):
    """Parametrize a test by `case`: those whose place in the list is in `quick` run by default, others are heavy."""
    marks = [() if i in quick else pytest.mark.heavy for i in range(len(listed))]
    return pytest.mark.parametrize(
        "case", [pytest.param(c, id=str(c), marks=m) for c, m in zip(listed, marks, strict=True)]
    )

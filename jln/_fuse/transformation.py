"""The transformation `jln.fuse`."""

from __future__ import annotations

import enum
import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.config import trace_context
from jax._src.core import trace_state_clean
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jln import _checks
from jln._fuse.bodies import evaluate
from jln._fuse.calls import Options
from jln._fuse.rewriting import Finding
from jln._routes import inner_programs

F = TypeVar("F", bound=Callable[..., Any])
# Of what one function keeps: programs, each of which holds its static arguments, and equations in all of them. An
# equation takes 0.5 to 0.8 kB, so they take less than 100 MB.
MOST_PROGRAMS, MOST_EQUATIONS = 128, 100_000
# Results that are no numbers and hold none: they are handed on as they are.
_WORDS = (str, bytes, enum.Enum, type)


@overload
def fuse(function: F, *, linears: bool = False, implementation: str | None = None, forward_mode: bool = False) -> F: ...
@overload
def fuse(
    function: None = None, *, linears: bool = False, implementation: str | None = None, forward_mode: bool = False
) -> Callable[[F], F]: ...
def fuse(
    function: Callable[..., Any] | None = None,
    *,
    linears: bool = False,
    implementation: str | None = None,
    forward_mode: bool = False,
) -> Callable[..., Any]:
    """Return a function that computes what `function` does, with jln's operators in the place of its norms.

    A transformation as `jax.checkpoint` is one: `loss = jln.fuse(loss)`, then `jax.jit(jax.value_and_grad(loss))`. At a
    call the function is traced (outside of any trace once for arguments alike, as by `jax.jit`, but each time with
    objects of Flax NNX), and its LayerNorms and RMSNorms are found by what they compute, in whatever framework they are
    written; with them the sums, biases and gates in front of them and the sums behind. A norm is taken if it equals the
    operator in float64 on random rows and has no step of which that would prove nothing, such as a maximum. All else
    stays as it is: loops, checkpoints with their policies, shardings, effects, random numbers.

    It belongs below `grad`: of a function that differentiates inside, as a training step does, backward reads what
    forward has made, and nothing is saved. What an operator rounds it rounds once, so 16-bit results differ from the
    function's own by what its casts rounded.

    `jln.explain(fused, *args)` lists the operators and the norms that were left, with the model's lines.

    Args:
      function: a function of arrays and of anything else, such as a loss. Leaves of its arguments that are no arrays
        are static, in a trace NumPy's scalars too, and compared by `==`: what is changed in one between calls must
        change that. Strings and enums among its results are handed on. Of a Module, Rngs, Metric or Optimizer of Flax
        NNX what a call changes is changed in the caller's; one among the results is a copy. None: the result is a
        decorator.
      linears: have the Linears behind a norm keep what the norm read, not its result. Less memory is held between
        forward and backward, and up to 3 % more bytes are moved. They do in any case in a scan, and where a
        `jax.checkpoint` keeps products and no more.
      implementation, forward_mode: of the operators, as of `layer_norm`.

    Returns:
      A function with `function`'s arguments and results.

    Raises:
      TypeError: `function` is not callable.
      ValueError: the implementation is unknown.
    """
    options = Options(
        _checks.flag("linears", linears),
        _checks.implementation(implementation),
        _checks.flag("forward_mode", forward_mode),
    )
    if function is None:
        return functools.partial(fuse, linears=linears, implementation=implementation, forward_mode=forward_mode)
    if not callable(function):
        raise TypeError(f"fuse takes a function; got {type(function).__name__}")
    return _wrap(function, options)


def _wrap(function: Callable[..., Any], options: Options) -> Callable[..., Any]:
    name = getattr(function, "__name__", type(function).__name__)
    is_known = False  # whether its user was warned
    programs: dict[Hashable, _Program] = {}  # of calls outside of any trace, by what they depend on

    @functools.cache
    def on_objects() -> Callable[..., Any]:
        return importlib.import_module("jln.nnx").on_objects(function, lambda pure: _wrap(pure, options))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_known
        if nnx := sys.modules.get("flax.nnx"):
            objects = jax.tree.leaves((args, kwargs), is_leaf=lambda a: isinstance(a, nnx.Pytree))
            if any(isinstance(a, nnx.Pytree) for a in objects):
                return on_objects()(*args, **kwargs)
        leaves, tree = jax.tree.flatten((args, kwargs))
        is_traced = not trace_state_clean() or any(isinstance(a, Tracer) for a in leaves)
        # A NumPy scalar that an outer jit holds static stays a number.
        is_array = tuple(_is_array(a) and not (is_traced and isinstance(a, np.generic)) for a in leaves)
        arrays, static = part(leaves, is_array)
        key = None if is_traced else _key(arrays, static, tree, is_array)
        if (program := programs.get(key)) is not None:
            return program.join_results(_as_arrays(program.call(*arrays)))
        joins: list[Callable[[Sequence[Any]], Any]] = []

        def flat(*arrays: Any) -> list[Any]:
            args, kwargs = tree.unflatten(join(arrays, static, is_array))
            leaves, structure = jax.tree.flatten(function(*args, **kwargs))
            is_number = [not isinstance(leaf, _WORDS) for leaf in leaves]
            results, others = part(leaves, is_number)
            joins.append(lambda results: structure.unflatten(join(results, others, is_number)))
            return results

        flat.__name__ = name  # which JAX's errors tell
        traced = jax.make_jaxpr(flat)(*arrays)
        findings: list[Finding] = []
        # Arrays of the program's own, in a body too, may be others at another call.
        if key is None or any(getattr(body, "consts", ()) for body in _bodies(traced)):
            results = evaluate(traced, arrays, options, findings)
        else:
            jaxpr = jax.make_jaxpr(lambda *a: evaluate(traced, a, options, findings))(*arrays)
            program = _Program(jaxpr_as_fun(jaxpr), joins[-1], sum(1 + len(body.eqns) for body in _bodies(jaxpr)))
            size = program.size + sum(p.size for p in [*programs.values()])
            if size > MOST_EQUATIONS or len(programs) >= MOST_PROGRAMS:
                programs.clear()
            programs[key] = program
            results = program.call(*arrays)
        if not is_known:
            is_known = True
            _remark(name, traced, findings)
        return joins[-1](_as_arrays(results))

    return call


class _Program(NamedTuple):
    """A program that is kept: a function of arrays, one that gives its results their structure, and a size.

    size: the number of equations, and one more for each body.
    """

    call: Callable[..., Sequence[Any]]
    join_results: Callable[[Sequence[Any]], Any]
    size: int


def part(leaves: Sequence[Any], is_first: Sequence[bool]) -> tuple[list[Any], list[Any]]:
    """Return the leaves that are of the first kind, and the others."""
    first, others = [], []
    for leaf, is_one in zip(leaves, is_first, strict=True):
        (first if is_one else others).append(leaf)
    return first, others


def join(first: Sequence[Any], others: Sequence[Any], is_first: Sequence[bool]) -> list[Any]:
    """Return the leaves that `part` has parted."""
    left, right = iter(first), iter(others)
    return [next(left if is_one else right) for is_one in is_first]


def _as_arrays(results: Sequence[Any]) -> list[jax.Array]:
    """The results of a program; JAX hands on those that are constants as it keeps them in a jaxpr."""
    return [a if isinstance(a, jax.Array) else jnp.asarray(a) for a in results]


def _is_array(leaf: Any) -> bool:
    """True for what JAX takes as an array: not for NumPy's strings, objects and dates."""
    is_of_numpy = isinstance(leaf, (np.ndarray, np.generic))
    return leaf.dtype.kind not in "OSUMm" if is_of_numpy else isinstance(leaf, jax.Array)


def _bodies(program: Any) -> Iterator[Any]:
    """The program and all inside of its equations, closed or not: from JAX 0.11 on these are of one class."""
    yield program
    for inner in (inner for equation in program.eqns for inner in inner_programs(equation)):
        yield from _bodies(inner)


def _key(arrays: Sequence[Any], static: Sequence[Any], tree: Any, is_array: tuple[bool, ...]) -> Hashable:
    """A key of what the program of a call depends on; None where there is none."""
    key = (
        tuple(map(jax.typeof, arrays)),
        tuple((type(a), str(a) if isinstance(a, (float, complex)) else a) for a in static),
        tree,
        is_array,
        trace_context(),
        jax.sharding.get_mesh(),  # whose devices JAX's own context leaves out
    )
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _remark(name: str, program: ClosedJaxpr, findings: list[Finding]) -> None:
    """Warn of a function that has no norm, or that differentiates inside.

    A function that calls the operators itself has norms enough.
    """
    if differentiates(program):
        warnings.warn(
            f"jln.fuse: {name} differentiates inside, and fuse saves nothing there, as its backward pass "
            "reads what the norms have made: wrap the loss inside, jax.value_and_grad(jln.fuse(loss))",
            stacklevel=3,
        )
    elif not any(f.is_chosen for f in findings) and " jln_" not in str(program):  # as primitives are named
        left = "".join(f"; {f.why}" for f in findings[:1])
        warnings.warn(
            f"jln.fuse found no norm in {name} that it could take{left}. jln.explain(fused, *args) lists what it saw",
            stacklevel=3,
        )


def differentiates(program: ClosedJaxpr) -> bool:
    """True for a program with a backward pass in it or in a body, which JAX names so in its equations."""
    return any(
        e.primitive.name in _HEAVY and "transpose(" in str(e.source_info.name_stack)
        for body in _bodies(program)
        for e in body.eqns
    )


_HEAVY = ("dot_general", "reduce_sum", "mul")

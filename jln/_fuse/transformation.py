"""The transformation `jln.fuse`."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.core import trace_state_clean
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from jln import _checks
from jln._fuse.bodies import evaluated
from jln._fuse.calls import Options
from jln._fuse.rewriting import Finding

F = TypeVar("F", bound=Callable[..., Any])


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
    call the function is traced (outside of any trace once for arguments alike, as by `jax.jit`), and its LayerNorms and
    RMSNorms are found by what they compute, in whatever framework they are written; with them the sums, biases and
    gates in front of them and the sums behind. A norm is taken if it equals the operator in float64 on random rows and
    has no step of which that would prove nothing, such as a maximum. All else stays as it is: loops, checkpoints with
    their policies, shardings, effects, random numbers.

    Where what reads a norm quantises it, by itself or as `jax.nn.scaled_dot_general` and Flax's products in eight bits
    do, the norm's kernel makes the eight bits: of products with scales of their own up to three, and where others read
    the norm itself two and that. A product's derivative stays its own, and nothing of the norm's size is kept for it:
    backward makes the norm again, in its own dtype. Such gradients have no derivatives.

    It belongs below `grad`: of a function that differentiates inside, as a training step does, backward reads what
    forward has made, and nothing is saved. What an operator rounds it rounds once, so 16-bit results differ from the
    function's own by what its casts rounded.

    `jln.explain(fused, *args)` lists the operators and the norms that were left, with the author's lines.

    Args:
      function: a function of arrays and of anything else, such as a loss. Leaves of its arguments that are no arrays
        are static, and compared by `==`: what is changed in one between calls must change that. Its results may be
        anything that JAX can return. None: the result is a decorator.
      linears: have the Linears behind a norm keep what the norm read, not its result. Less memory is held between
        forward and backward, and a few percent more bytes are moved. In a `jax.checkpoint` that keeps products and no
        more they do in any case, and backward makes again what is normalised.
      implementation, forward_mode: of the operators, as of `layer_norm`.

    Returns:
      A function with `function`'s arguments and results.

    Raises:
      TypeError: `function` is not callable, or an argument of the call is an object of Flax NNX, such as a Module or
        Rngs, whose changes would be lost: `jln.nnx.fuse` is for these.
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
    return _fused(function, options)


def _fused(function: Callable[..., Any], options: Options) -> Callable[..., Any]:
    remarks = _Remarks(function)
    known: dict[Any, tuple[Callable[..., Any], Any]] = {}  # of calls outside of any trace, by what they depend on

    @functools.wraps(function)
    def fused(*args: Any, **kwargs: Any) -> Any:
        _refuse_modules(args, kwargs)
        leaves, tree = jax.tree.flatten((args, kwargs))
        is_array = [*map(_is_array, leaves)]
        arrays = [a for a, of in zip(leaves, is_array, strict=True) if of]
        static = tuple(a for a, of in zip(leaves, is_array, strict=True) if not of)
        is_traced = not trace_state_clean() or any(isinstance(a, Tracer) for a in arrays)
        key = None if is_traced else _key(arrays, static, tree, is_array)
        if key in known:
            program, structure = known[key]
            return jax.tree.unflatten(structure, _as_arrays(program(*arrays)))
        structures: list[Any] = []

        def flat(*arrays: Any) -> list[Any]:
            dynamic, others = iter(arrays), iter(static)
            args, kwargs = tree.unflatten([next(dynamic if of else others) for of in is_array])
            results, structure = jax.tree.flatten(function(*args, **kwargs))
            structures.append(structure)
            return results

        traced = jax.make_jaxpr(flat)(*arrays)
        findings: list[Finding] = []
        if key is None or _has_arrays(traced):
            results = evaluated(traced, arrays, options, findings)
        else:
            program = jaxpr_as_fun(jax.make_jaxpr(lambda *a: evaluated(traced, a, options, findings))(*arrays))
            if len(known) >= 1024:  # as of a function that is given another number each time
                known.clear()
            known[key] = program, structures[-1]
            results = program(*arrays)
        remarks.make(traced, findings)
        return jax.tree.unflatten(structures[-1], _as_arrays(results))

    return fused


def _as_arrays(results: Sequence[Any]) -> list[jax.Array]:
    """The results of a program; JAX hands on those that are constants as it keeps them in a jaxpr."""
    return [a if isinstance(a, jax.Array) else jnp.asarray(a) for a in results]


def _is_array(leaf: Any) -> bool:
    """True for what JAX takes as an array: not for NumPy's strings, objects and dates."""
    is_of_numpy = isinstance(leaf, (np.ndarray, np.generic))
    return leaf.dtype.kind not in "OSUMm" if is_of_numpy else isinstance(leaf, jax.Array)


def _has_arrays(program: Any) -> bool:
    """True for a program that has arrays of its own, in a body too: at another call these may be others."""
    if isinstance(program, (tuple, list)):
        return any(map(_has_arrays, program))
    if isinstance(program, ClosedJaxpr):
        return bool(program.consts) or _has_arrays(program.jaxpr)
    return isinstance(program, Jaxpr) and any(_has_arrays([*e.params.values()]) for e in program.eqns)


def _key(arrays: Sequence[Any], static: tuple[Any, ...], tree: Any, is_array: Sequence[bool]) -> Hashable:
    """A key of what the program of a call depends on; None where there is none."""
    config: Any = jax.config
    settings = (config.jax_enable_x64, config.jax_default_matmul_precision, config.jax_numpy_dtype_promotion)
    avals = tuple(jax.typeof(a) for a in arrays)
    key = (
        avals,
        static,
        tuple((type(a), str(a) if isinstance(a, float) else None) for a in static),
        tree,
        tuple(is_array),
        settings,
        jax.sharding.get_abstract_mesh(),
    )
    try:
        hash(key)
    except TypeError:
        return None
    return key


class _Remarks:
    """Warnings that a user gets once of a function: that it has no norm, or that it differentiates inside.

    A function that calls the operators itself has norms enough.
    """

    def __init__(self, function: Callable[..., Any]):
        self._name = getattr(function, "__name__", type(function).__name__)
        self._made = False

    def make(self, program: ClosedJaxpr, findings: list[Finding]) -> None:
        if self._made:
            return
        self._made = True
        if _differentiates(program):
            warnings.warn(
                f"jln.fuse: {self._name} differentiates inside, and fuse saves nothing there, as its backward pass "
                "reads what the norms have made: wrap the loss inside, jax.value_and_grad(jln.fuse(loss))",
                stacklevel=3,
            )
        elif not any(f.is_chosen for f in findings) and " jln_" not in str(program):  # as primitives are named
            left = "".join(f"; {f.why}" for f in findings[:1])
            warnings.warn(
                f"jln.fuse found no norm in {self._name} that it could take{left}. jln.explain(fused, *args) lists "
                "what it saw",
                stacklevel=3,
            )


def _differentiates(program: Any) -> bool:
    """True for a program with a backward pass in it or in a body, which JAX names so in its equations."""
    if isinstance(program, (tuple, list)):
        return any(map(_differentiates, program))
    jaxpr = program.jaxpr if isinstance(program, ClosedJaxpr) else program
    return isinstance(jaxpr, Jaxpr) and any(
        "transpose(" in str(e.source_info.name_stack)
        if e.primitive.name in _HEAVY
        else _differentiates([*e.params.values()])
        for e in jaxpr.eqns
    )


_HEAVY = ("dot_general", "reduce_sum", "mul")


def _refuse_modules(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise where an argument is or has an object of Flax NNX, as a Module or Rngs: what the call changes is lost."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return
    is_object = lambda a: isinstance(a, nnx.Pytree)  # noqa: E731
    objects = [a for a in jax.tree.leaves((args, kwargs), is_leaf=is_object) if is_object(a)]
    if objects:
        raise TypeError(
            "jln.fuse would lose what a call changes in an object of Flax NNX, as its argument "
            f"{type(objects[0]).__name__} is: use jln.nnx.fuse, or give the object's state and merge it inside"
        )

"""Readers of a norm's result in eight bits: they read those of the norm's kernel, and the result is made no more.

Who multiplies in eight bits quantises inside of a `jax.custom_vjp` function, for the derivative is that of a product.
Such a function stays what it is. Its own equations run, but for those that quantise; in backward its own rule runs, and
where that reads the norm's result it is made again.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero

from jln._fuse.certificate import Constants
from jln._fuse.graph import Graph, Node, Value, bound, is_plain_jit
from jln._fuse.norms import Norm
from jln._fuse.quantisations import EIGHT_BITS, Quantisation, keeps_order, quantisation_of
from jln._fuse.readers import Reader, Scale, is_float0
from jln._junction.arrays import BLOCK, SCALE_OF, Switches
from jln._junction.arrays import Norm as PlainNorm
from jln._junction.formulas import Product, scaled, wide
from jln._operators.eight_bits import Made, Quantized, Ways


class EightBits(NamedTuple):
    """Readers of a norm's result in eight bits.

    scales: of the ways in which the kernel makes it, in their order. is_read: whether the result is read in other bits,
      too, and so is the last of the ways.
    """

    readers: tuple[Reader, ...]
    scales: tuple[Scale, ...]
    is_read: bool

    @property
    def inputs(self) -> list[Value]:
        return [v for scale in self.scales for v in scale.inputs]

    def quantize(self, *arrays: Array) -> Ways:
        """The operator's argument, of the inputs' arrays."""
        rest = iter(arrays)
        kinds = [scale.quantize(*itertools.islice(rest, len(scale.inputs))) for scale in self.scales]
        return Ways((*kinds, *[None] * self.is_read))

    def put_into(self, graph: Graph, made: Value, again: Callable[..., Array], arguments: Sequence[Value]) -> None:
        """Have the readers read what the operator makes. again: makes the result of its `Made` and of `arguments`."""
        keys = [scale.key for scale in self.scales]
        for group in _independent(graph, self.readers):
            ways = [0 if r.quantisation is None else keys.index(r.scale().key) for r in group]
            others = [v for reader in group for v in reader.others]
            results = [v for reader in group for v in reader.outputs]
            graph.replace(results, [made, *others, *arguments], functools.partial(_read, group, ways, again))


def eight_bits_of(graph: Graph, norm: Norm, constants: Constants, may_be_read: bool) -> EightBits | str | None:
    """Return what reads a norm's result in eight bits, if one kernel can make these; else why not, in a few words.

    None where nothing here is in eight bits. may_be_read: whether the kernel may make the result in other bits, too.
    """
    y = norm.y
    own = quantisation_of(graph, y, constants)
    functions = list(_readers_of(y, constants))
    readers = [r for r in functions if not r.reads_more and not isinstance(r.quantisation, str)]
    made: list[Value] = []
    if isinstance(own, Quantisation):
        made += own.made
        readers += _own_readers(graph, own, constants)
    found = [r for r in readers if r.quantisation is not None]
    why = [q for q in (own, *(r.quantisation for r in functions)) if isinstance(q, str)]
    why += [_IS_READ] * any(r.reads_more for r in functions)
    if not found:
        return why[0] if why else None
    is_read = _is_read_otherwise(graph, y, made, readers)
    if is_read and not may_be_read:
        return why[0] if why else _IS_READ
    by_key = {scale.key: scale for scale in (r.scale() for r in found)}
    scales = sorted(by_key.values(), key=lambda scale: scale.is_given)
    if len(scales) + is_read > len(SCALE_OF) or sum(not scale.is_given for scale in scales) > 1:
        return "it is quantised in more ways than one kernel has"
    made += [v for r in readers for v in r.outputs]
    result = EightBits(tuple(readers), tuple(scales), is_read)
    if any(graph.depends(v, [norm.x, y, *made]) for v in result.inputs):
        return "its scale is made of what is normalised"
    if _is_split(y):
        return "its type says how it is sharded"
    in_blocks = any(isinstance(r.quantisation, Quantisation) and r.quantisation.scale is None for r in found)
    if norm.features != (y.ndim - 1,) or (in_blocks and y.shape[-1] % BLOCK):
        return "a kernel makes them of a last, normalised axis alone, in whole blocks"
    return result


_IS_READ = "it is read in other bits, too"


def made_again(
    made: Made, x: Array, scale: Any = None, offset: Any = None, z: Any = None, *, dtype: Any, **options: Any
) -> Array:
    """A norm's result of the statistics that were kept, by XLA: in what reads it, where it can."""

    def of_rank(a: Any) -> Any:
        return a if a is None else a.reshape((1,) * (x.ndim - a.ndim) + a.shape)

    mean = None if made.mean is None else made.mean.reshape(*x.shape[:-1], 1)
    switches = Switches(mean is not None, options.get("zero_centered_scale", False))
    norm = PlainNorm(-1, options["epsilon"], switches)
    y = scaled(x, of_rank(scale), of_rank(offset), mean, made.rstd.reshape(*x.shape[:-1], 1), norm)
    return (y if z is None else wide(Product(y, z))).astype(dtype)


def _is_split(value: Value) -> bool:
    sharding = getattr(value.aval, "sharding", None)
    return sharding is not None and any(axes is not None for axes in sharding.spec)


def _is_read_otherwise(graph: Graph, y: Value, made: Sequence[Value], readers: Sequence[Reader]) -> bool:
    """True where a result or an effect of the program reads y but by these values and these readers."""
    stack, seen = [y], set[Value]()
    while stack:
        value = stack.pop()
        if graph.is_result(value):
            return True
        for node in value.readers:
            reader = next((r for r in readers if r.node is node), None)
            if reader is not None and reader.copy is value and value not in reader.others:
                continue
            if reader is not None or node.equation.effects:
                return True
            new = [v for v in node.outputs if v not in made and v not in seen]
            seen.update(new)
            stack += new
    return False


def _readers_of(y: Value, constants: Constants) -> Iterator[Reader]:
    """The `jax.custom_vjp` functions of y, or of a copy of it, that have something in eight bits."""
    stack: list[tuple[Value, tuple[Node, ...]]] = [(y, ())]
    while stack:
        copy, chain = stack.pop()
        for node in copy.readers:
            is_function = node.operation == "custom_vjp_call" and not node.equation.effects
            if is_function and not node.params["symbolic_zeros"]:  # which may tell what nobody differentiates
                program, n = node.params["call_jaxpr"], node.params["num_consts"]
                place = node.inputs.index(copy)
                if place >= n and _has_eight_bits(getattr(program, "jaxpr", program)):
                    function = functools.partial(_called, node.equation)
                    yield Reader(function, program, node.inputs, node.outputs, constants, place, chain, n, node)
            elif len(node.inputs) == 1 and len(node.outputs) == 1 and keeps_order(node):
                stack.append((node.output, (*chain, node)))


def _called(equation: Any, *operands: Array) -> Sequence[Array]:
    return bound(equation, operands)


def _has_eight_bits(jaxpr: Any) -> bool:
    values = (*jaxpr.invars, *(v for e in jaxpr.eqns for v in e.outvars))
    inner = (e.params["jaxpr"] for e in jaxpr.eqns if is_plain_jit(e))
    return any(getattr(v.aval, "dtype", None) in EIGHT_BITS for v in values) or any(
        _has_eight_bits(of.jaxpr) for of in inner
    )


def _own_readers(graph: Graph, own: Quantisation, constants: Constants) -> list[Reader]:
    """The equations of the program that quantise y, as a function of each result, with its own derivative."""
    part = own.part
    read = {part.z: False}  # what is read by other equations, but through what is made

    for v in [n.output for n in reversed(part.nodes)]:
        inner = [n.output for n in v.readers if n in part.nodes]
        is_outer = graph.is_result(v) or len(inner) < len(v.readers)
        read[v] = is_outer or any(read[i] for i in inner if i not in own.made)
    inputs = [part.z, *part.sources]

    def function(output: Value, y: Array, *sources: Array) -> list[Array]:
        return [part.computed({part.z: y} | dict(zip(part.sources, sources, strict=True)), part.nodes)[output]]

    readers = []
    for output in (v for v in own.made if read[v]):
        of_output = functools.partial(function, output)
        program = jax.make_jaxpr(of_output)(*(v.aval for v in inputs))
        readers.append(Reader(of_output, program, inputs, [output], constants))
    return readers


def _independent(graph: Graph, readers: Sequence[Reader]) -> list[list[Reader]]:
    """The readers in groups in which none reads another's results."""
    groups: list[list[Reader]] = []
    for reader in sorted(readers, key=lambda r: r.position):
        before = [v for r in groups[-1] for v in r.outputs] if groups else []
        if before and not any(graph.depends(v, before) for v in reader.others):
            groups[-1].append(reader)
        else:
            groups.append([reader])
    return groups


def _read(
    readers: Sequence[Reader], ways: Sequence[int], again: Callable[..., Array], made: Made, *arrays: Array
) -> list[Array]:
    """The readers' results.

    ways: the place of each reader's among those that were made. arrays: what each reads beside the norm's result, then
      the arguments of `again`.
    """
    counts = [len(r.others) for r in readers]
    ends = list(itertools.accumulate(counts, initial=0))
    others = [arrays[a:b] for a, b in itertools.pairwise(ends)]
    carrier = jax.typeof(made.ways[0].carrier)
    eight = tuple(made.ways[way] for way in ways)
    arguments = (made._replace(ways=()), *arrays[ends[-1] :])

    @jax.custom_vjp
    def read(eight: Sequence[Quantized], others: Sequence[Sequence[Array]], arguments: Sequence[Any]) -> list[Any]:
        del arguments
        return [r.results(q, of) for r, q, of in zip(readers, eight, others, strict=True)]

    def forward(*operands: Any) -> Any:
        eight, others, arguments = jax.tree.map(lambda a: a.value, operands, is_leaf=lambda a: hasattr(a, "value"))
        y = again(*arguments) if any(r.reads_copy_at_once for r in readers) else None
        of_each = [r.saving(q, y, of) for r, q, of in zip(readers, eight, others, strict=True)]
        needed = arguments if any(r.reads_copy for r in readers) else None
        return [of for of, _ in of_each], ([saved for _, saved in of_each], needed)

    def backward(kept: Any, cotangents: list[Any]) -> Any:
        saved, arguments = kept
        cotangents = [[None if isinstance(d, SymbolicZero) or is_float0(d) else d for d in of] for of in cotangents]
        y: Array | None = None

        def of_y() -> Array:
            of_copies = (r.of_copy(s, y if r.reads_copy_first(d) else None, d) for r, s, d in each())
            given = [d.reshape(carrier.shape).astype(carrier.dtype) for d in of_copies if d is not None]
            return functools.reduce(jnp.add, given, *([] if given else [jnp.zeros(carrier.shape, carrier.dtype)]))

        def each() -> Iterator[tuple[Reader, Any, Any]]:
            return zip(readers, saved, cotangents, strict=True)

        # Fences: without them XLA might make y again at once, and hold it. In front of the cotangents one would keep
        # XLA from making them in one kernel with what quantises them.
        if any(r.reads_copy_first(d) for r, _, d in each()):
            arguments, cotangents = lax.optimization_barrier((arguments, cotangents))
            y = again(*arguments)
            dy = of_y()
        else:
            dy = of_y()
            if any(r.reads_copy for r in readers):
                arguments, dy = lax.optimization_barrier((arguments, dy))
                y = again(*arguments)
        of_others = [r.of_others(s, y if r.reads_copy else None, d) for r, s, d in each()]
        no: Any = None
        of_carriers = (dy, *[no] * (len(readers) - 1))  # all of which are one
        return tuple(Quantized(no, no, no, d) for d in of_carriers), of_others, None

    read.defvjp(forward, backward, symbolic_zeros=True)
    return [a for of in read(eight, others, arguments) for a in of]

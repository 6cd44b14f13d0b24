"""The operators as functions of their arguments, and the transformations that a test can put them under."""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

import catalogue
import jln
import workbench
from catalogue import FORMS

# The optional arguments of each operator, by their initials.
OPTIONAL = {name: "".join(a.name[0] for a in o.arguments if a.optional) for name, o in FORMS.items()}


# With all optional arguments, and with none but those of the form.
CASES = list(OPTIONAL.items())
CASES += [(name, "") for name, o in FORMS.items() if OPTIONAL[name] and not o.given_extras]
ROWS, H = (4, 2), 8  # What a mesh of 4x2 divides.


@functools.cache
def operands(name):
    """The arrays that an operator needs, then its optional ones, by name."""
    sizes = catalogue.sizes((*ROWS, H), -1, (2, H // 2))
    ordered = sorted(FORMS[name].arguments, key=lambda a: a.optional)
    arrays = [a.of(sizes, "float64", "float64") for a in ordered]
    return {a.name: workbench.normal(i, s.shape, s.dtype) for i, (a, s) in enumerate(zip(ordered, arrays, strict=True))}


def bind(name, given, module=jln, **options):
    """The operator as a function of x, what it needs beside, and the given optional arguments; and those arrays."""
    operator, complete = FORMS[name], operands(name)
    absent = [a.name for a in operator.arguments if a.optional and a.name[0] not in given]
    chosen = {n: a for n, a in complete.items() if n not in absent}
    return operator.in_order(getattr(module, operator.name), tuple(chosen), **options), tuple(chosen.values())


CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def loss(f):
    """A loss that uses every result, with a gradient that is nowhere zero."""
    return lambda *a: sum(jnp.sum(jnp.sin(r)) for r in jax.tree.leaves(f(*a)))


def loss_by_name(f):
    """A loss of a function of arguments by name, each result with a weight of its own."""
    return lambda a: sum(jnp.sum(jnp.sin((1 + i) * r)) for i, r in enumerate(jax.tree.leaves(f(**a))))


def of_some(function, operands, names, some):
    """A function of operands in the order of `names` as one of some of them alone, and these."""
    some = [n for n in names if n in some]

    def call(*given):
        return function(*(dict(zip(some, given, strict=True)).get(n, a) for n, a in zip(names, operands, strict=True)))

    return call, tuple(a for n, a in zip(names, operands, strict=True) if n in some)


def mesh(kind=AxisType.Auto):
    """A mesh of eight devices, which a test asks for first."""
    return Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "tensor"), axis_types=(kind,) * 2)


def communication(compiled):
    """The number of collectives of each kind in a compiled program, and the bytes of each kind's results."""
    count, size = Counter(), Counter()
    pattern = r" = (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
    for shapes, kind in re.findall(pattern, compiled.as_text()):
        count[kind] += 1
        arrays = re.findall(r"(f64|f32|bf16|s32)\[([\d,]*)\]", shapes)
        size[kind] += sum(
            {"f64": 8, "f32": 4, "bf16": 2, "s32": 4}[t] * int(np.prod(eval(f"[{n}]"))) for t, n in arrays
        )
    return count, size


def first(f):
    """The function with its first result alone, y, of the shape of x."""
    return lambda *a: jax.tree.leaves(f(*a))[0].reshape(a[0].shape)


def every(a):
    return tuple(range(len(a)))


def directions(a):
    return tuple(workbench.normal(20 + i, v.shape, "float64") for i, v in enumerate(a))


def examples(a, n=3):
    return tuple(jnp.stack([v * (1 + i / 7) for i in range(n)]) for v in a)


def gradient(f, a):
    return jax.grad(loss(f), every(a))


def along(f, a):
    """The gradient's component along a direction."""
    return lambda *v: sum(jnp.vdot(g, d) for g, d in zip(gradient(f, a)(*v), directions(a), strict=True))


save_statistics = jax.checkpoint_policies.save_only_these_names(jln.STATISTICS)


def layers(f, a):
    """Gradients of three layers with stacked parameters under `scan(checkpoint)`; x is carried."""

    def network(x, *rest):
        @functools.partial(jax.checkpoint, policy=save_statistics)
        def layer(x, parameters):
            return x + first(f)(jnp.sin(x), *parameters), None

        return jnp.sum(jnp.sin(jax.lax.scan(layer, x, tuple(rest), length=3)[0]))

    stacked = [a[0], *examples(a[1:])]
    return jax.grad(network, every(stacked))(*stacked)


# From the arguments to the places of those of which each example of a vmap has its own, each with that of its axis.
OF_EXAMPLES = {
    "x": lambda a: {0: 0},
    "parameters": lambda a: dict.fromkeys(every(a)[1:] or (0,), 0),
    "all": lambda a: {0: 0} | dict.fromkeys(every(a)[1:], 1),
}


def over(which, transform):
    """The transformation `transform(f, a, axes)` of a function under a vmap over some of its arguments."""

    def transformed(f, a):
        axes = [OF_EXAMPLES[which](a).get(i) for i in every(a)]
        grown = zip(a, examples(a), axes, strict=True)
        return transform(f, a, axes)(*[v if axis is None else jnp.moveaxis(e, 0, axis) for v, e, axis in grown])

    return transformed


def nested_vmap(f, a):
    """The inner one over all but x, the outer over x."""
    grown = examples(a)
    inner = jax.vmap(gradient(f, a), [None, *[0] * (len(a) - 1)]) if len(a) > 1 else gradient(f, a)
    return jax.vmap(inner, [0, *[None] * (len(a) - 1)])(*grown)


def one_row(a):
    """One row of x, and of what has x's shape: enough for a Hessian."""
    return tuple(v[:1, :1] if v.shape == a[0].shape else v for v in a)


REVERSE = {
    "value_and_grad": lambda f, a: jax.value_and_grad(loss(f), every(a))(*a),
    "vmap": lambda f, a: jax.vmap(f)(*examples(a)),
    "vmap(vmap(grad))": nested_vmap,
    **{f"vmap(grad), over {n}": over(n, lambda f, a, axes: jax.vmap(gradient(f, a), axes)) for n in OF_EXAMPLES},
    **{f"grad(vmap), over {n}": over(n, lambda f, a, axes: gradient(jax.vmap(f, axes), a)) for n in OF_EXAMPLES},
    "scan(checkpoint)": layers,
    "grad(grad)": lambda f, a: jax.grad(along(f, a), every(a))(*a),
    "hessian": lambda f, a: jax.hessian(loss(f), every(a))(*one_row(a)),
}

FORWARD = {
    "jvp": lambda f, a: jax.jvp(f, a, directions(a)),
    "jvp, of x alone": lambda f, a: jax.jvp(lambda x: f(x, *a[1:]), a[:1], directions(a)[:1]),
    "jvp, of the last alone": lambda f, a: jax.jvp(lambda v: f(*a[:-1], v), a[-1:], directions(a)[-1:]),
    "jacfwd": lambda f, a: jax.jacfwd(f, every(a))(*one_row(a)),
    "linearize": lambda f, a: jax.linearize(f, *a)[1](*directions(a)),
    "jvp(vmap)": lambda f, a: jax.jvp(jax.vmap(f), examples(a), examples(directions(a))),
    "jvp(jvp)": lambda f, a: jax.jvp(lambda *v: jax.jvp(f, v, directions(a))[1], a, directions(a)),
    "grad(jvp)": lambda f, a: jax.grad(lambda *v: loss(lambda *w: jax.jvp(f, w, directions(a))[1])(*v), every(a))(*a),
}

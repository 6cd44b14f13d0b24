"""Norms written in random ways, which fuse must find, and near-norms with one thing off, which it must leave.

    python tests/fuse/fuzz.py --cases 2000 --seed 0

A plan names each choice, so that a case can be written down and run again: `check(plan)`.
"""

import argparse
import collections
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jln
from proof import difference, normal

Plan = dict[str, Any]
Array = Any

# The shape of x, and the axes that are normalised: 512 features or more, in rows of one or two axes.
LAYOUTS = {
    "last": ((2, 3, 512), (2,)),
    "rank 2": ((5, 512), (1,)),
    "768": ((3, 768), (1,)),
    "first": ((512, 4), (0,)),
    "channels first": ((2, 512, 3), (1,)),
    "two": ((3, 8, 64), (1, 2)),
    "two apart": ((16, 3, 32), (0, 2)),
    "groups": ((2, 3, 4, 512), (3,)),
}
WAYS: dict[str, tuple[Any, ...]] = {
    "kind": ("layer_norm", "rms_norm"),
    "layout": tuple(LAYOUTS),
    "epsilon": (1e-3, 1e-5, 1e-6, 1e-8, 1e-12, 0.1, 2.0),
    "upcast": (False, False, True),
    "mean": ("mean", "sum/H", "sum*1/H", "asarray", "keep by hand", "average"),
    "variance": (
        *("mean of d*d", "mean of square", "mean of **2", "var", "standard deviation squared", "sum/H", "einsum"),
        *("vecdot", "norm", "E[x2]-E[x]2", "max(0, E[x2]-E[x]2)", "dot_general", "power", "power by an array"),
    ),
    "root": ("rsqrt", "1/sqrt", "**-0.5", "power", "exp log", "/sqrt", "/ **0.5", "sqrt of 1/"),
    "applied": ("d*r", "r*d", "x*r-m*r", "written twice"),
    "scale": (None, "s", "1+w", "w+1", "broadcast", "by example", "s+0", "twice negative", "einsum"),
    "offset": (None, "b", "by example", "minus"),
    "sum": (
        *(None, None, "r+x", "x+r", "r+(x+b)", "(r+x)+b", "r+g*x", "r+x*(b,1)", "r-x", "0.5*x+r", "r+g*(x+b)", "r+u@k"),
        *("rows reshaped", "both sides"),
    ),
    "behind": (
        *(None, "linear", "linear with bias", "einsum", "silu gate", "silu gate first", "sum", "twice", "clip"),
        *("factor", "linear of a multiple", "linear of a copy", "linears", "linears and a sum"),
    ),
    "wrapped": (None, "jit", "jit of the norm", "scope", "checkpoint"),
}
OFF = (
    *("epsilon outside", "ddof 1", "stop_gradient", "stop_gradient of x", "of another", "power", "factor", "maximum"),
    *("absolute", "half", "clipped", "rounded", "relative epsilon", "weights", "masked", "rolled", "mean scaled"),
    *("epsilon an argument", "added to the root", "not centred alike", "float8", "fourth powers", "mean of roots"),
    *("softplus", "positive mean"),
)


def drawn(rng: np.random.Generator, off: bool) -> Plan:
    """Return a random plan; with `off`, of a near-norm."""
    plan = {name: ways[rng.integers(len(ways))] for name, ways in WAYS.items()}
    plan["off"] = OFF[rng.integers(len(OFF))] if off else None
    if LAYOUTS[plan["layout"]][1] != (len(LAYOUTS[plan["layout"]][0]) - 1,):
        plan["behind"] = plan["behind"] if plan["behind"] in (None, "twice", "clip", "sum", "factor") else None
        plan["scale"] = "s" if plan["scale"] == "einsum" else plan["scale"]
        plan["sum"] = None if plan["sum"] in ("rows reshaped", "r+u@k") else plan["sum"]
    if plan["sum"] == "rows reshaped":
        plan["scale"] = "s" if plan["scale"] == "by example" else plan["scale"]
        plan["offset"] = "b" if plan["offset"] == "by example" else plan["offset"]
    if off:
        plan["sum"] = None if plan["sum"] == "both sides" else plan["sum"]
        plan["layout"] = "last" if plan["off"] in ("half", "mean of roots") else plan["layout"]
        if plan["off"] in ("mean scaled", "positive mean", "not centred alike"):
            plan["kind"] = "layer_norm"
    return plan


def written(plan: Plan) -> tuple[Callable[..., Any], dict[str, np.ndarray]]:
    """Return the function that a plan describes, and its arguments by name."""
    shape, axes = LAYOUTS[plan["layout"]]
    reshaped = (*shape[1::-1], *shape[2:]) if axes == (len(shape) - 1,) and len(shape) > 2 else shape
    of_features = [n if a in axes else 1 for a, n in enumerate(shape)]
    rows = next(a for a in range(len(shape)) if a not in axes)
    by_example = [n if a in axes or a == rows else 1 for a, n in enumerate(shape)]
    h, last = int(np.prod([shape[a] for a in axes])), shape[-1]
    dtype = np.float32 if plan["upcast"] else np.float64
    shapes = {"x": shape, "r": shape, "z": shape, "o": shape, "s": of_features, "w": of_features, "b": of_features}
    shapes |= {"scale": by_example, "shift": by_example, "bias": of_features, "k": (last, 4), "c": (4,)}
    shapes |= {"u": (*shape[:-1], 8), "gate": [1] * len(shape), "k8": (8, last), "g": of_features, "inner": of_features}
    args = {name: (normal(*of) * (0.3 + 0.1 * i)).astype(dtype) for i, (name, of) in enumerate(shapes.items())}
    args["epsilon"] = np.asarray(plan["epsilon"], dtype)
    off, epsilon = plan["off"], plan["epsilon"]
    centres = plan["kind"] == "layer_norm"

    def mean(x: Array) -> Array:
        return {
            "mean": lambda: jnp.mean(x, axes, keepdims=True),
            "sum/H": lambda: jnp.sum(x, axes, keepdims=True) / h,
            "sum*1/H": lambda: jnp.sum(x, axes, keepdims=True) * (1 / h),
            "asarray": lambda: jnp.sum(x, axes, keepdims=True) / jnp.asarray(h, x.dtype),
            "keep by hand": lambda: jnp.expand_dims(jnp.mean(x, axes), axes),
            "average": lambda: jnp.average(x, axes, keepdims=True),
        }[plan["mean"]]()

    def product(x: Array) -> Array:
        letters = "abcdef"[: x.ndim]
        return jnp.einsum(f"{letters},{letters}->{''.join(n for a, n in enumerate(letters) if a not in axes)}", x, x)

    def variance(x: Array, d: Array, m: Array) -> Array:
        def moments() -> Array:
            return mean(x * x) - jnp.square(m) if centres else mean(x * x)

        way = plan["variance"]
        if (len(axes) > 1 and way == "norm") or (axes != (x.ndim - 1,) and way == "vecdot"):
            way = "einsum"
        return {
            "mean of d*d": lambda: mean(d * d),
            "mean of square": lambda: mean(jnp.square(d)),
            "mean of **2": lambda: mean(d**2),
            "var": lambda: jnp.var(x, axes, keepdims=True) if centres else mean(d * d),
            "standard deviation squared": lambda: (
                jnp.std(x, axes, keepdims=True) ** 2 if centres else jnp.sqrt(mean(d * d)) ** 2
            ),
            "sum/H": lambda: jnp.sum(d * d, axes, keepdims=True) / h,
            "einsum": lambda: jnp.expand_dims(product(d), axes) / h,
            "vecdot": lambda: jnp.expand_dims(jnp.vecdot(d, d, axis=axes[0]), axes) / h,
            "norm": lambda: jnp.square(jnp.linalg.norm(d, axis=axes[0], keepdims=True)) / h,
            "E[x2]-E[x]2": moments,
            "max(0, E[x2]-E[x]2)": lambda: jnp.maximum(moments(), 0.0),
            "dot_general": lambda: jnp.expand_dims(_dot(d, axes), axes) / h,
            "power": lambda: mean(jnp.power(d, 2.0)),
            "power by an array": lambda: mean(jnp.float_power(d, jnp.asarray(2.0, d.dtype))),
        }[way]()

    def norm(a: dict[str, Array], x: Array) -> Array:
        m = mean(x)
        if off == "mean scaled":
            m = m * 0.999
        if off == "positive mean":
            m = jnp.maximum(m, 0)
        d = x - m if centres else x
        v = variance(x, d, m)
        if off in ("mean scaled", "positive mean"):
            v = jnp.var(x, axes, keepdims=True)
        v = _off(off, v, x, d, a, axes, h, epsilon)
        if off == "not centred alike":
            d = x
        e = a["epsilon"] if off == "epsilon an argument" else epsilon
        s = v if off in ("epsilon outside", "maximum") else v + e
        r = {
            "rsqrt": lambda: lax.rsqrt(s),
            "1/sqrt": lambda: 1 / jnp.sqrt(s),
            "**-0.5": lambda: s**-0.5,
            "power": lambda: jnp.power(s, -0.5),
            "exp log": lambda: jnp.exp(-0.5 * jnp.log(s)),
            "/sqrt": lambda: jnp.sqrt(s),
            "/ **0.5": lambda: s**0.5,
            "sqrt of 1/": lambda: jnp.sqrt(1 / s),
        }[plan["root"]]()
        if off == "epsilon outside":
            r, divided = 1 / (jnp.sqrt(s) + e), False
        elif off == "power":
            r, divided = s**-0.4999, False
        else:
            divided = plan["root"].startswith("/")
        if off == "added to the root":
            r = r + 1e-7
        if off == "mean of roots":
            r = jnp.mean(r, 0, keepdims=True)
        if divided:
            y = d / r
        else:
            y = {
                "d*r": lambda: d * r,
                "r*d": lambda: r * d,
                "x*r-m*r": lambda: x * r - m * r if centres and off != "not centred alike" else x * r,
                "written twice": lambda: (x - mean(x)) * r if centres and off is None else d * r,
            }[plan["applied"]]()
        y = {
            None: lambda: y,
            "s": lambda: y * a["s"],
            "1+w": lambda: y * (1 + a["w"]),
            "w+1": lambda: (a["w"] + 1) * y,
            "broadcast": lambda: jnp.broadcast_to(a["s"], x.shape) * y,
            "by example": lambda: y * (1 + a["scale"]),
            "s+0": lambda: y * (a["s"] + 0.0),
            "twice negative": lambda: -(y * -a["s"]),
            "einsum": lambda: jnp.einsum("...k,k->...k", y, a["s"].reshape(-1)),
        }[plan["scale"]]()
        return {
            None: lambda: y,
            "b": lambda: y + a["b"],
            "by example": lambda: a["shift"] + y,
            "minus": lambda: y - (-a["b"]),
        }[plan["offset"]]()

    def function(a: dict[str, Array]) -> Any:
        wide = jax.tree.map(lambda p: p.astype(np.float64), a) if plan["upcast"] else a
        x, r, bias, g = (wide[name] for name in ("x", "r", "bias", "g"))
        total = {
            None: lambda: x,
            "r+x": lambda: r + x,
            "x+r": lambda: x + r,
            "r+(x+b)": lambda: r + (x + bias),
            "(r+x)+b": lambda: (r + x) + bias,
            "r+g*x": lambda: r + g * x,
            "r+x*(b,1)": lambda: r + x * wide["gate"],
            "r-x": lambda: r - x,
            "0.5*x+r": lambda: 0.5 * x + r,
            "r+g*(x+b)": lambda: r + (x + bias) * g,
            "r+u@k": lambda: r + jnp.tanh(wide["u"]) @ wide["k8"],
            "rows reshaped": lambda: (r + x).reshape(reshaped),
            "both sides": lambda: r + x * lax.rsqrt(jnp.mean(x * x, axes, keepdims=True) + epsilon) * wide["inner"],
        }[plan["sum"]]()
        here = wide
        if plan["sum"] == "rows reshaped":
            here = {n: p.reshape(reshaped) if p.shape == shape else p for n, p in wide.items()}
        call = jax.jit(norm) if plan["wrapped"] == "jit of the norm" else norm
        y = call(here, total)
        silu = {"silu gate": lambda z: jax.nn.silu(z), "silu gate first": lambda z: z / (1 + jnp.exp(-z))}
        z = here["z"].reshape(y.shape)
        made = {
            None: lambda: y,
            "linear": lambda: y @ wide["k"],
            "linear with bias": lambda: y @ wide["k"] + wide["c"],
            "einsum": lambda: jnp.einsum("...h,hn->n...", y, wide["k"]),
            "silu gate": lambda: y * silu["silu gate"](z),
            "silu gate first": lambda: silu["silu gate first"](z) * y,
            "sum": lambda: y + here["o"].reshape(y.shape),
            "twice": lambda: (jnp.sin(y), y * y),
            "clip": lambda: jnp.clip(y, -1, 1),
            "factor": lambda: y * -0.3,
            "linear of a multiple": lambda: (y * 7) @ wide["k"],
            "linear of a copy": lambda: jnp.copy(y) @ wide["k"],
            "linears": lambda: [y @ (i * wide["k"]) for i in range(1, 5)],
            "linears and a sum": lambda: (y @ wide["k"], y @ (2 * wide["k"]), y + here["o"].reshape(y.shape)),
        }[plan["behind"]]()
        return made, total if plan["sum"] else None

    wrapped = {"jit": jax.jit, "checkpoint": jax.checkpoint, "scope": jax.named_scope("block")}
    return wrapped.get(plan["wrapped"], lambda f: f)(function), args


def _dot(d: Array, axes: tuple[int, ...]) -> Array:
    rest = tuple(a for a in range(d.ndim) if a not in axes)
    return lax.dot_general(d, d, ((axes, axes), (rest, rest)))


def _off(
    off: str | None, v: Array, x: Array, d: Array, a: dict[str, Array], axes: tuple[int, ...], h: int, epsilon: float
) -> Array:
    """The variance, with one thing off."""
    mean = lambda b: jnp.mean(b, axes, keepdims=True)  # noqa: E731
    row = next(i for i in range(x.ndim) if i not in axes)
    other = a["o"].reshape(x.shape)
    return {
        "ddof 1": lambda: v * (h / (h - 1)),
        "stop_gradient": lambda: lax.stop_gradient(v),
        "stop_gradient of x": lambda: mean(jnp.square(lax.stop_gradient(d))),
        "of another": lambda: mean(other * other),
        "factor": lambda: v * (1 + 1e-6),
        "maximum": lambda: jnp.maximum(v, epsilon),
        "absolute": lambda: mean(jnp.abs(d)) ** 2,
        "half": lambda: mean(d[..., : x.shape[-1] // 2] ** 2),
        "clipped": lambda: jnp.clip(v, 0, 1e3),
        "rounded": lambda: jnp.round(v * 1e3) / 1e3,
        "relative epsilon": lambda: v * (1 + epsilon),
        "weights": lambda: mean(d * d * a["s"] ** 2),
        "masked": lambda: mean(jnp.where(other > -1.5, d * d, 0)),
        "rolled": lambda: jnp.roll(v, 1, row),
        "float8": lambda: v.astype(jnp.float8_e4m3fn).astype(v.dtype),
        "fourth powers": lambda: jnp.sqrt(mean(d**4)),
        "softplus": lambda: jnp.log(1 + jnp.exp(v)),
    }.get(off or "", lambda: v)()


# What cannot be seen as far from a norm: with these an epsilon of this size is lost in float64, or they are norms.
def is_a_norm(plan: Plan) -> bool:
    """Return whether what is off with the plan leaves a norm all the same."""
    return plan["off"] is None or (plan["off"] == "relative epsilon" and plan["epsilon"] < 1e-8)


def is_of_rows(plan: Plan) -> bool:
    """Return whether fuse takes a norm over these axes: others than the last must have a parameter."""
    shape, axes = LAYOUTS[plan["layout"]]
    is_last = axes == tuple(range(len(shape) - len(axes), len(shape)))
    # Where there is one axis of rows, what varies by example is of x's size: no parameter.
    none = (None, "minus") + ("by example",) * (len(shape) - len(axes) == 1)
    offset = plan["offset"] if plan["kind"] == "layer_norm" else None  # an RMSNorm has a scale, too
    if plan["scale"] == "by example" and "by example" in none:  # what is behind that is not the norm's any more
        return is_last
    return is_last or offset not in none or plan["scale"] not in none


def norms(function: Callable[..., Any], *args: Any) -> list[str]:
    """Return the operators that fuse puts into the function, and for each norm left to XLA what was left."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "jln.fuse found no norm")
        routes = jln.explain(jln.fuse(function), *args)
    found = [r.layer.removeprefix("jln.") for r in routes if r.path != "plain"]
    left = [r.why for r in routes if r.path == "plain" and ("XLA makes" in r.why or "no kernel reads" in r.why)]
    return found + ["over other axes, left" if "axes" in why else "rms_norm, left" for why in left]


def check(plan: Plan) -> list[str]:
    """Return what is wrong with fuse on the plan's function: at best nothing."""
    function, args = written(plan)
    wrong = []
    try:
        found = norms(function, args)
        count = len(found) + found.count("rms_norm_add_rms_norm")
        expected = (plan["off"] is None and is_of_rows(plan)) + (plan["sum"] == "both sides")
        if count != expected and not (plan["off"] and is_a_norm(plan)):
            wrong.append(f"found {found} for {expected}")
        if plan["off"] is None and is_of_rows(plan) and not any(plan["kind"] in n or "axes" in n for n in found):
            wrong.append(f"found {found} for a {plan['kind']}")
        parts = difference(function, args)
        if not parts <= (2e-7 if plan["upcast"] else 1e-10):
            wrong.append(f"differs by {parts:.1e}")
    except Exception as error:  # whatever fuse raises is wrong
        wrong.append(f"raised {type(error).__name__}: {str(error)[:200]}")
    return wrong


def main() -> int:
    """Run as many norms and as many near-norms, print each that is wrong, and a summary."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--cases", type=int, default=100, help="how many norms, and how many near-norms")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    wrong: collections.Counter[str] = collections.Counter()
    for i in range(arguments.cases):
        for off in (False, True):
            plan = drawn(np.random.default_rng([arguments.seed, i, off]), off)
            for what in check(plan):
                wrong["near-norms" if off else "norms"] += 1
                print(f"{what}: {plan}", flush=True)
        if i % 20 == 19:
            jax.clear_caches()
    print(f"{arguments.cases} norms, {wrong['norms']} wrong; {arguments.cases} near-norms, {wrong['near-norms']} wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())

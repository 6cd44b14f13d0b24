"""A drawn case as a program of JAX."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

import jln
from case import LARGEST, OF_VMAP, SCALE, Case, made, refused

WITHOUT_YNNPACK = {"xla_cpu_experimental_ynn_fusion_type": ""}
POLICIES = {
    "everything_again": None,
    "statistics": jax.checkpoint_policies.save_only_these_names(jln.STATISTICS),
    "dots": jax.checkpoint_policies.dots_saveable,
    "jln.dots_saveable": jln.checkpoint_policies.dots_saveable,
    "jln.dots_and_statistics_saveable": jln.checkpoint_policies.dots_and_statistics_saveable,
}


def results(case: Case, module=jln) -> dict[str, np.ndarray]:
    """Return what JAX gives: results by name, gradients as `dx`, tangents as `y'`, second derivatives as `dx'`."""
    operands, cotangents, directions = made(case)
    wide = any(a.dtype == np.float64 for a in (*operands.values(), *cotangents.values()))
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", wide)  # not by a context: callbacks have threads of their own
    try:
        given = jax.tree.map(jnp.asarray, ((operands, cotangents), directions))
        whole = program(case, module)
        if beyond_reach(case):  # eager scans are compiled, too
            whole = jax.jit(whole, compiler_options=WITHOUT_YNNPACK)
        elif case.jitted:
            whole = jax.jit(whole)
        return jax.tree.map(np.asarray, whole(*given))
    finally:
        jax.config.update("jax_enable_x64", before)


def answered(case: Case) -> tuple[Case, dict[str, np.ndarray]]:
    """Return a case and its results; of one that kernels or eight bits have to refuse, of the same without these.

    Raises AssertionError where it was not refused.
    """
    words = refused(case)
    try:
        got = results(case)
    except ValueError as error:
        axes = [*(a.axes for a in (*case.operands.values(), *case.cotangents.values())), [v.out for v in case.levels]]
        kernels = [
            a.axes for n, a in case.operands.items() if n.startswith("kernel")
        ]  # alone they put dz's behind rows
        alone = any(
            k is not None and x is None for of in kernels for k, x in zip(of, case.operands["x"].axes, strict=True)
        )
        moves = not words and case.implementation == "triton" and (alone or any(axis for of in axes for axis in of))
        if (OF_VMAP if moves else words or "no error") not in str(error):
            raise
        case = dataclasses.replace(case, implementation=None, quantize=case.quantize if moves else None)
        return case, results(case)
    assert not words, f"nobody said that it {words}"
    return case, got


def program(case: Case, module=jln):
    """The function of a case: of a pair of operands and cotangents by name, and of directions."""
    of_levels = functools.partial(_asked, case, module)
    for level in reversed(range(case.outer)):
        of_levels = _looped(case, level, of_levels)
    return functools.partial(_written_out, case, of_levels)


def beyond_reach(case: Case) -> bool:
    """Return whether JAX may make sums around the operator that XLA's CPU backend hands to YNNPACK and gets wrong.

    They are wrong without this library, too. On all jaxlibs from 0.10.2 on, 0.12.0.1 too, sums of products of which a
    factor is a broadcast: of a kernel, of the cotangent of a Linear's result, of an x that examples share, or of the
    cotangent of the sum in front, if that is all that is used, as
    `jnp.sum(jnp.broadcast_to(c, (4, 32, 64)) * jnp.broadcast_to(g, (4, 1, 64)), 0)`, c [4, 32, 1] and g [4, 1, 1].
    From 0.12 on a product of bfloat16 that is transposed, as a kernel's gradient, as in
    `jnp.einsum("mn,mh->nh", dy, z).T`: where YNNPACK multiplies others XLA adds it up in bfloat16.
    """
    kernels = [a for n, a in case.operands.items() if n.startswith("kernel")]
    is_spread = any(a.small != a.shape for a in case.cotangents.values())
    if any(a.small != a.shape or (is_spread and None in a.axes) for a in kernels):
        return True
    rows = [a for n, a in case.operands.items() if n in ("x", "residual", "z")]
    if is_spread and (case.cotangents.keys() == {"total"} or any(None in a.axes[case.outer :] for a in rows)):
        return True
    return jaxlib.version.__version_info__ >= (0, 12) and any(a.dtype == "bfloat16" for a in kernels)


def _written_out(case: Case, program, given, directions):
    """Call a program with arrays broadcast to what they are drawn as, but for those that it broadcasts itself."""
    operands, cotangents = given
    if case.outer:
        operands, directions = (_broadcast(arrays, case.operands) for arrays in (operands, directions))
    return program(operands, _broadcast(cotangents, case.cotangents), directions)


def _broadcast(arrays, described):
    shapes = {n: described[n].shape for n in arrays}
    return {n: a if a.shape == shapes[n] else jnp.broadcast_to(a, shapes[n]) for n, a in arrays.items()}


def _looped(case: Case, level: int, function):
    """A function of trees of arrays by name in a loop over the examples of a level."""
    how = case.levels[level]

    def call(*trees):
        described = (case.operands, case.cotangents, case.operands)
        in_axes = tuple({n: d[n].axes[level] for n in t} for t, d in zip(trees, described, strict=True))
        if how.by == "vmap":
            return jax.vmap(function, in_axes, how.out)(*trees)
        pairs = list(zip(trees, in_axes, strict=True))
        moved = [{n: a for n, a in t.items() if axes[n] is not None} for t, axes in pairs]
        kept = [{n: a for n, a in t.items() if axes[n] is None} for t, axes in pairs]
        _, stacked = jax.lax.scan(lambda c, x: (c, function(*(k | v for k, v in zip(kept, x, strict=True)))), (), moved)
        return stacked

    return call


def _asked(case: Case, module, operands, cotangents, directions):
    """Compute what is asked of the operator in its inner levels."""

    def one(operands, cotangents, directions):
        function = functools.partial(_operator, case, module)
        return jax.checkpoint(function, policy=POLICIES[case.policy])(operands) if case.policy else function(operands)

    of_all = one
    for level in reversed(range(case.outer, len(case.levels))):
        of_all = _looped(case, level, of_all)

    def values(wanted):
        every = operands | wanted
        return of_all(every if case.outer else _broadcast(every, case.operands), {}, {})

    wanted = {n: operands[n] for n in case.wanted}
    if case.asks == "value":
        return values({})
    if case.asks == "tangent":
        y, dy = jax.jvp(values, (wanted,), (directions,))
        return y | {f"{n}'": a for n, a in dy.items()}

    def gradient(wanted):
        if case.by_loss:

            def loss(wanted):
                y = values(wanted)
                return sum(jnp.sum(y[n] * c) for n, c in cotangents.items()).astype("float32"), y

            d, y = jax.grad(loss, has_aux=True)(wanted)
        else:

            def used(wanted):
                y = values(wanted)
                return {n: y[n] for n in cotangents}, y

            _, pullback, y = jax.vjp(used, wanted, has_aux=True)
            (d,) = pullback(cotangents)
        return {f"d{n}": a for n, a in d.items()}, y

    if case.asks == "gradient":
        d, y = gradient(wanted)
        return d | (y if case.values_too else {})
    if case.twice_reverse:

        def along(wanted):
            d, _ = gradient(wanted)
            wide = {n: jnp.promote_types(v.dtype, "float32") for n, v in directions.items()}
            return sum(jnp.sum(d[f"d{n}"].astype(wide[n]) * v.astype(wide[n])) for n, v in directions.items())

        return {f"d{n}'": a for n, a in jax.grad(along)(wanted).items()}
    d, second = jax.jvp(lambda w: gradient(w)[0], (wanted,), (directions,))
    return d | {f"{n}'": a for n, a in second.items()}


def _operator(case: Case, module, operands):
    """The operator's results by name."""
    named = {a.name: None for a in case.form.arguments} | operands
    for name in ("kernel", "bias") if case.several else ():
        named[name] = tuple(named.pop(f"{name}[{i}]", None) for i in range(case.several))
    if case.number is not None:
        named["gate"] = case.number
    static = dict(case.form.options) | case.static | ({} if case.quantize is None else {"quantize": case.quantize})
    if module is jln:
        static["implementation"] = case.implementation
    else:
        for name in ("forward_mode", "remat"):
            static.pop(name, None)
    made = getattr(module, case.form.name)(**named, **static)
    y, *total = made if case.form.adds else (made,)
    y, of_numbers = _in_numbers(y, operands["x"].shape)
    of_y = {f"y[{i}]": a for i, a in enumerate(y)} if case.several else {"y": y}
    return of_y | ({"total": total[0]} if total else {}) | of_numbers


def _in_numbers(y, shape):
    """The numbers of a result that may be in eight bits; its scale and its largest one, those that it tells."""
    if not isinstance(y, jln.Quantized | jln.Scaled):
        return y, {}
    told = {LARGEST: y.amax, SCALE: getattr(y, "scale", None)}
    if y.amax is None:
        told[SCALE] = jnp.repeat(y.scale.astype("float32"), 32, -1)
    numbers = y.dequantized() if isinstance(y, jln.Quantized) else y.y
    return numbers, {n: jnp.broadcast_to(a, shape) for n, a in told.items() if a is not None}

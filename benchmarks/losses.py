"""The losses of the stacks: with this library's operators, with Flax's layers, in plain jnp, and without any norm.

All variants but the last compute the same function of the same parameters, named as Flax names them.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jln
from jln._tools.catalogue import EPSILON
from layouts import Layout
from stacks import Loss, Stack

ON_ONE_DEVICE = Layout()


def square_sum(y: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(y.astype(jnp.promote_types(y.dtype, jnp.float32))))


class Branch(NamedTuple):
    """The branch that the layer before would have added to x: `gate * (x + bias)`, or a norm of x.

    bias, gate: None where there is none.
    norm: the parameters of the norm of x; None where the branch has no norm.
    """

    x: jax.Array
    bias: Any = None
    gate: Any = None
    norm: Any = None

    def added_to(self, stream: jax.Array) -> jax.Array:
        if self.norm is not None:
            return jln.rms_norm_add(self.x, stream, *_norm_parameters(self.norm), epsilon=EPSILON)
        return self.added_in_jnp(stream)

    def added_in_jnp(self, stream: jax.Array) -> jax.Array:
        x = self.x if self.bias is None else self.x + self.bias.astype(self.x.dtype)
        x = x if self.norm is None else jln.reference.rms_norm(x, self.norm["scale"], epsilon=EPSILON)
        return stream + (x if self.gate is None else x * self.gate)


# The variants of this library. A projection is the norm and the Linears behind it: (norm's parameters, the Linears', x,
# branch) -> (features of each, x + branch); the branch is None at the beginning.
Linears = Sequence[Any]
Projected = tuple[tuple[jax.Array, ...], jax.Array]
Projection = Callable[[Any, Linears, jax.Array, Branch | None], Projected]


def linear(parameters: Any, x: jax.Array) -> jax.Array:
    y = x @ parameters["kernel"].astype(x.dtype)
    return y + parameters["bias"].astype(x.dtype) if "bias" in parameters else y


def branch_of(parameters: Any, x: jax.Array, gate: jax.Array | None, norm: Any, layout: Layout) -> Branch:
    """The branch that a Linear ends: its product, with bias, gate and norm left to whoever adds the branch."""
    return Branch(layout.stream(x @ parameters["kernel"].astype(x.dtype)), parameters.get("bias"), gate, norm)


def add_and_norm(norm: Any, x: jax.Array, branch: Branch | None) -> tuple[jax.Array, jax.Array]:
    """Return (the norm of x + branch, x + branch), by the one operator that makes both."""
    parameters = _norm_parameters(norm)
    if branch is None:
        operator: Any = jln.layer_norm if "bias" in norm else jln.rms_norm
        return operator(x, *parameters, epsilon=EPSILON), x
    if branch.norm is not None:
        return jln.rms_norm_add_rms_norm(branch.x, x, *_norm_parameters(branch.norm), *parameters, epsilon=EPSILON)
    operator = jln.add_layer_norm if "bias" in norm else jln.add_rms_norm
    return operator(branch.x, x, *parameters, x_bias=branch.bias, gate=branch.gate, epsilon=EPSILON)


def _norm_parameters(norm: Any) -> tuple[Any, ...]:
    """A norm's scale and offset, or its scale alone."""
    return tuple(norm[name] for name in ("scale", "bias") if name in norm)


def add_norm(norm: Any, linears: Linears, x: jax.Array, branch: Branch | None) -> Projected:
    """A projection by `add_layer_norm` or `add_rms_norm`, which keep z for the Linears' backward pass."""
    z, x = add_and_norm(norm, x, branch)
    return tuple(linear(p, z) for p in linears), x


def norm_linear(norm: Any, linears: Linears, x: jax.Array, branch: Branch | None) -> Projected:
    """A projection by `layer_norm_linear` or `rms_norm_linear`, which do not keep z.

    The sum in front is XLA's, or `rms_norm_add`'s where the branch has a norm.
    """
    x = x if branch is None else branch.added_to(x)
    operator: Any = jln.layer_norm_linear if "bias" in norm else jln.rms_norm_linear
    return operator(x, *_norm_parameters(norm), *_kernels_and_biases(linears, x.dtype), epsilon=EPSILON), x


def add_norm_linear(norm: Any, linears: Linears, x: jax.Array, branch: Branch | None) -> Projected:
    """A projection by `add_layer_norm_linear` or `add_rms_norm_linear`, or by `norm_linear` without a branch."""
    if branch is None or branch.norm is not None:
        return norm_linear(norm, linears, x, branch)
    operator: Any = jln.add_layer_norm_linear if "bias" in norm else jln.add_rms_norm_linear
    of_sum = {"x_bias": branch.bias, "gate": branch.gate}
    return operator(
        branch.x, x, *_norm_parameters(norm), *_kernels_and_biases(linears, x.dtype), **of_sum, epsilon=EPSILON
    )


def _kernels_and_biases(linears: Linears, dtype: Any) -> list[Any]:
    """The Linears' kernels and biases, cast to `dtype`."""
    return [
        tuple(p[name].astype(dtype) for p in linears) if name in linears[0] else None for name in ("kernel", "bias")
    ]


def no_norm(_: Any, linears: Linears, x: jax.Array, branch: Branch | None) -> Projected:
    """A projection without its norm: a lower bound of the cost, as if norms were free and hid nothing from XLA."""
    x = x if branch is None else branch._replace(norm=None).added_to(x)
    return tuple(linear(p, x) for p in linears), x


def plain_jnp(norm: Any, linears: Linears, x: jax.Array, branch: Branch | None) -> Projected:
    """A projection in plain jnp, as users write it."""
    z, x = _plainly_normed(norm, x, branch)
    return tuple(linear(p, z) for p in linears), x


def _plainly_normed(norm: Any, x: jax.Array, branch: Branch | None) -> tuple[jax.Array, jax.Array]:
    operator: Any = jln.reference.layer_norm if "bias" in norm else jln.reference.rms_norm
    x = x if branch is None else branch.added_in_jnp(x)
    return operator(x, *_norm_parameters(norm), epsilon=EPSILON), x


def jln_loss(
    stack: Stack, before_attention: Projection, before_mlp: Projection, layout: Layout = ON_ONE_DEVICE
) -> Loss:
    def block(p, x, branch, c):
        attention, mlp = ([p[name] for name in linears] for linears in stack.projections)
        norm_1, norm_2, gate_1, gate_2 = p.get("norm_1"), p.get("norm_2"), None, None
        if stack.ada:
            scale_1, offset_1, gate_1, scale_2, offset_2, gate_2 = jnp.split(linear(p["ada"], c), 6, axis=-1)
            norm_1, norm_2 = {"scale": 1 + scale_1, "bias": offset_1}, {"scale": 1 + scale_2, "bias": offset_2}
        qkv, x = before_attention(norm_1, attention, x, branch)
        branch = branch_of(p["out"], layout.attend(stack, qkv), gate_1, p.get("post_1"), layout)
        up, x = before_mlp(norm_2, mlp, x, branch)
        active = layout.features(stack.activate([layout.features(y) for y in up]))
        branch = branch_of(p["down"], active, gate_2, p.get("post_2"), layout)
        # A checkpointed block's arguments are kept: better the sum than its addends.
        return (x, branch) if stack.policy is None else (branch.added_to(x), None)

    def blocks(parameters, x):
        branch, c = None, stack.condition(x)
        for i in range(stack.layers // layout.stages):
            x, branch = stack.checkpointed(jax.checkpoint, block)(parameters[f"block_{i}"], x, branch, c)
        return x, branch

    def end(norm, x, branch=None):
        if before_mlp is no_norm:
            return square_sum(x if branch is None else branch._replace(norm=None).added_to(x))
        last = _plainly_normed if before_mlp is plain_jnp else add_and_norm
        return square_sum(last(norm, x, branch)[0])

    def added_up(parameters, x):
        x, branch = blocks(parameters, x)
        if branch is None:
            return x
        return branch.added_in_jnp(x) if before_mlp is plain_jnp else branch.added_to(x)

    if layout.stages > 1:
        return layout.pipelined(added_up, end)
    return lambda parameters, x: end(parameters["norm"], *blocks(parameters, x))


def flax_loss(stack: Stack) -> Loss:
    """The loss made of Flax Linen's own layers, which hide nothing from XLA."""
    import flax.linen as nn

    dtypes: dict[str, Any] = {"dtype": jnp.dtype(stack.dtype), "param_dtype": jnp.dtype(stack.parameter_dtype)}

    def norm(name):
        return (nn.RMSNorm if stack.gated else nn.LayerNorm)(epsilon=EPSILON, name=name, **dtypes)

    def behind(name):
        return norm(name) if stack.both_sides else lambda x: x

    def modulated(x, scale, offset):
        plain = nn.LayerNorm(epsilon=EPSILON, use_scale=False, use_bias=False, **dtypes)
        return plain(x) * (1 + scale) + offset

    def dense(features, name):
        return nn.Dense(features, use_bias=not stack.gated, name=name, **dtypes)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, c):
            attention, mlp = stack.projections
            norm_1, norm_2, gate_1, gate_2 = None, None, 1, 1
            if stack.ada:
                modulation = jnp.split(dense(6 * stack.width, "ada")(c), 6, axis=-1)
                scale_1, offset_1, gate_1, scale_2, offset_2, gate_2 = modulation
                norm_1 = functools.partial(modulated, scale=scale_1, offset=offset_1)
                norm_2 = functools.partial(modulated, scale=scale_2, offset=offset_2)
            z = (norm_1 or norm("norm_1"))(x)
            attended = stack.attend([dense(n, name)(z) for name, n in attention.items()])
            x = x + gate_1 * behind("post_1")(dense(stack.width, "out")(attended))
            z = (norm_2 or norm("norm_2"))(x)
            active = stack.activate([dense(n, name)(z) for name, n in mlp.items()])
            return x + gate_2 * behind("post_2")(dense(stack.width, "down")(active))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            c = stack.condition(x)
            for i in range(stack.layers):
                x = stack.checkpointed(nn.remat, Block)(name=f"block_{i}")(x, c)
            return norm("norm")(x)

    model = Model()
    apply: Any = model.apply
    return lambda parameters, x: square_sum(apply({"params": parameters}, x))


OURS: dict[str, tuple[Projection, Projection]] = {
    "jln, add_norm": (add_norm, add_norm),
    "jln, norm_linear and add_norm": (norm_linear, add_norm),
    "jln, norm_linear": (norm_linear, norm_linear),
    "jln, add_norm_linear": (add_norm_linear, add_norm_linear),
}


def losses(stack: Stack) -> dict[str, Loss]:
    """The losses of a stack by variant.

    The others are compared with the first: Flax's or, where Flax is not installed, plain jnp's.
    """
    first = {"flax": flax_loss(stack)} if importlib.util.find_spec("flax") else {}
    return first | sharded_losses(stack, ON_ONE_DEVICE) | {"no norm at all": jln_loss(stack, no_norm, no_norm)}


def sharded_losses(stack: Stack, layout: Layout) -> dict[str, Loss]:
    """The losses of a stack on a mesh by variant.

    The others are compared with the first, plain jnp's.
    """
    variants = {"jnp": (plain_jnp, plain_jnp), **OURS}
    return {name: jln_loss(stack, *projections, layout=layout) for name, projections in variants.items()}

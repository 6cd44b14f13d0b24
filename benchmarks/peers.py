"""The peers: what users would have instead, the same operators of other libraries."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

import jln
from catalogue import EPSILON
from composition import Unsupported, composed, linears, multiplied
from jln._triton import target
from workloads import Workload


def kernels_asked_for() -> dict[str, str]:
    """The arguments with which an operator runs its kernels on the chip in use; none where it does so unasked."""
    chip = target.target_chip()
    return {} if chip is None or chip.platform in target.UNASKED else {"implementation": "triton"}


@dataclass(frozen=True)
class Peer:
    """Another library's implementation of the workloads.

    function: from a workload to a function of its arguments that returns its results; raises Unsupported.
    framework: the framework whose arrays the function takes.
    package, distribution: the name to import, and the name under which the version is known.
    on_cpu: whether it runs on the CPU.
    options: XLA's, to compile its programs with.
    evidence: text of its compiled programs. One without it is another peer's, and not timed.
    """

    name: str
    what: str
    package: str
    distribution: str
    function: Callable[[Workload], Callable[..., Any]]
    framework: str = "jax"
    on_cpu: bool = True
    options: dict[str, Any] | None = None
    evidence: str = ""

    is_ours = property(lambda self: self.package == "jln")

    def missing(self, platform: str) -> str | None:
        """The reason why this peer cannot be measured here; None where it can."""
        if importlib.util.find_spec(self.package) is None:
            return f"{self.distribution} is not installed"
        if platform == "cpu" and not self.on_cpu:
            return f"{self.distribution} needs a GPU"
        return None


def _jln(workload: Workload) -> Callable[..., Any]:
    return workload.function(**(kernels_asked_for() if workload.is_over_last else {}))


def _norm_and_products(workload: Workload) -> Callable[..., Any]:
    entry = workload.entry
    if not entry.is_linear:
        raise Unsupported("a norm by itself is jln's own")
    norm = functools.partial(entry.norm.function, **kernels_asked_for())

    def function(*arguments):
        operands = dict(zip(workload.entry.names, arguments, strict=True))
        kernel, bias = operands.pop("kernel"), operands.pop("bias", None)
        results = norm(**({"offset": None} if entry.centres else {}) | operands)
        z, total = results if entry.adds else (results, None)
        y = linears(z, kernel, bias, multiplied)
        return (y, total) if entry.adds else y

    return function


def _jnp(workload: Workload) -> Callable[..., Any]:
    options = workload.axis_option
    if workload.entry.is_gated:
        return workload.function(jln.reference)

    # `jln.reference`'s fused operators sum and keep more than who writes this does, and its `add_*` round the sum.
    def norm(x, scale, offset):
        if not workload.entry.centres:
            return jln.reference.rms_norm(x, scale, **options)
        return jln.reference.layer_norm(x, scale, offset, **options)

    return composed(workload, norm, multiplied, jax.nn.silu, of_examples=True)


def _cudnn(workload: Workload) -> Callable[..., Any]:
    """Plain jnp, of whose LayerNorms XLA makes cuDNN's on an A100, H100 or H200 (jax 0.10.2 and 0.11.2).

    It does so forward, over any axis, in float32 and bfloat16. Backward it does in float32 alone, in one program with
    the forward pass, and where the mean is subtracted once for the variance and once more for the result, as here it
    is not. Flax's norm, whose variance is max(0, E[x^2] - E[x]^2), stays XLA's.
    """
    if not workload.entry.centres or workload.of_examples:
        raise Unsupported("XLA makes cuDNN's norm of a LayerNorm with one scale and one offset for all examples")
    return _jnp(workload)


def _flax(workload: Workload) -> Callable[..., Any]:
    from flax import linen

    kind = linen.LayerNorm if workload.entry.centres else linen.RMSNorm
    axis = workload.axis
    layer = kind(epsilon=EPSILON, dtype=workload.dtype, reduction_axes=axis, feature_axes=axis)

    def norm(x, scale, offset):
        return layer.apply({"params": {"scale": scale} | ({} if offset is None else {"bias": offset})}, x)

    def linear(z, kernel, bias):
        dense = linen.Dense(kernel.shape[1], use_bias=bias is not None, dtype=workload.dtype)
        return dense.apply({"params": {"kernel": kernel} | ({} if bias is None else {"bias": bias})}, z)

    return composed(workload, norm, linear, jax.nn.silu)


def _haiku(workload: Workload) -> Callable[..., Any]:
    import haiku

    axis = workload.axis
    # Along another axis than the last, parameters must have x's rank.
    shape = [-1 if i == axis % len(workload.shape) else 1 for i, _ in enumerate(workload.shape)]
    shape = (-1,) if workload.is_over_last else shape

    def norm(x, scale, offset):
        def layer(x):
            if not workload.entry.centres:
                return haiku.RMSNorm(axis, EPSILON, create_scale=True, name="norm", param_axis=axis)(x)
            return haiku.LayerNorm(axis, True, True, EPSILON, name="norm", param_axis=axis)(x)

        # Norms in float32, as Haiku's mixed-precision policies have them: in 16 bits they would sum in 16 bits.
        arrays = {"scale": scale, "offset": offset}
        parameters = {"norm": {name: a.reshape(shape) for name, a in arrays.items() if a is not None}}
        transformed = haiku.without_apply_rng(haiku.transform(layer))
        return transformed.apply(parameters, x.astype(scale.dtype)).astype(workload.dtype)

    def linear(z, kernel, bias):
        parameters = {"linear": {"w": kernel} | ({} if bias is None else {"b": bias})}
        layer = haiku.transform(lambda z: haiku.Linear(kernel.shape[1], with_bias=bias is not None, name="linear")(z))
        return haiku.without_apply_rng(layer).apply(parameters, z)

    return composed(workload, norm, linear, jax.nn.silu)


def _tokamax(workload: Workload) -> Callable[..., Any]:
    import tokamax  # pyright: ignore[reportMissingImports]
    from absl import flags  # pyright: ignore[reportMissingImports]

    if not flags.FLAGS.is_parsed():  # it would take our command line for its own
        flags.FLAGS.mark_as_parsed()

    def norm(x, scale, offset):
        return tokamax.layer_norm(
            x, scale, offset, axis=workload.axis, epsilon=EPSILON, subtract_mean=workload.entry.centres
        )

    return composed(workload, norm, multiplied, jax.nn.silu)


def _torch(kind: str) -> Callable[[Workload], Callable[..., Any]]:
    def function(workload: Workload) -> Callable[..., Any]:
        import torch_peers

        return torch_peers.FUNCTIONS[kind](workload)

    return function


PEERS = {
    p.name: p
    for p in (
        Peer("jln", "this library", "jln", "jln", _jln),
        Peer("jln-norm", "jln's norm, then jnp's products", "jln", "jln", _norm_and_products),
        Peer("jnp", "jax.numpy as users write it, by XLA", "jax", "jax", _jnp),
        Peer(
            "cudnn",
            "plain jnp with XLA's --xla_gpu_enable_cudnn_layer_norm=true",
            "jax",
            "nvidia-cudnn-cu13",
            _cudnn,
            on_cpu=False,
            options={"xla_gpu_enable_cudnn_layer_norm": True},
            evidence="__cudnn$norm",
        ),
        Peer("flax", "flax.linen's LayerNorm, RMSNorm, Dense", "flax", "flax", _flax),
        Peer("haiku", "Haiku's LayerNorm, RMSNorm, Linear", "haiku", "dm-haiku", _haiku),
        Peer("tokamax", "tokamax.layer_norm", "tokamax", "tokamax", _tokamax),
        Peer("torch", "PyTorch, eager", "torch", "torch", _torch("eager"), "torch"),
        Peer("torch.compile", "the same by torch.compile", "torch", "torch", _torch("compiled"), "torch"),
        Peer("liger", "Liger-Kernel", "liger_kernel", "liger-kernel", _torch("liger"), "torch", on_cpu=False),
    )
}

"""Helpers of these tests. Modules that import it are skipped if nothing compiles for an absent GPU."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jaxlib.mlir import ir

import program
from jln._triton import lowering

if not program._folders("jax_plugins.xla_cuda13") or importlib.util.find_spec("jax_triton") is None:
    pytest.skip('compiling for an absent GPU needs pip install -e ".[cuda13]"', allow_module_level=True)

lowering._jax_triton()  # before a test imports it, which empties TRITON_CACHE_DIR: nothing compiles with an empty one

MB = 10**6
M, H, N = 2048, 1024, 3072


def struct(*shape, dtype="bfloat16", sharding=None):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def triton_kernels(report):
    return [k for k in report.kernels if k.is_triton]


def launches(report):
    """Return how often each Triton kernel of the program runs, in the order in which they first run."""
    return [k.times for k in triton_kernels(report)]


def counted(report, *what):
    """Count our kernels and XLA's, and MB moved and temporary; with -s they are printed, and what they are of."""
    ours = sum(launches(report))
    found = ours, report.launches - ours, round(report.bytes_total / MB), round(report.temp_bytes / MB)
    print("\n", *what, found)
    return found


def assert_no_more(report, expected, *what):
    """Assert that there are so many of our kernels, and no more of XLA's, MB moved and, where it is told, temporary."""
    ours, *found = counted(report, *what)
    assert ours == expected[0] and all(a <= b for a, b in zip(found, expected[1:], strict=False)), (what, ours, found)


def custom_calls(function, *shapes, platform="cuda"):
    """Return the calls in the program that XLA is given: attributes as texts, types, and the kernel's own as bytes."""
    traced = jax.jit(lambda *arrays: function(*arrays)).trace(*shapes)
    module, found = traced.lower(lowering_platforms=(platform,)).compiler_ir("stablehlo"), []

    def visit(op):
        if op.name == "stablehlo.custom_call":
            call = {name: str(op.attributes[name]) for name in op.attributes}
            typed = call.pop("mhlo.backend_config", None) is not None
            config = op.attributes["mhlo.backend_config"]["opaque"] if typed else op.attributes["backend_config"]
            types = [str(value.type) for value in (*op.operands, *op.results)]
            found.append(call | {"types": types, "opaque": config.value_bytes})
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


def with_gradients(f):
    """Return a step of the result of `f`, and all gradients under a cotangent that is given."""

    def step(dy, *operands):
        y, pullback = jax.vjp(f, *operands)
        return y, pullback(dy)

    return step


def both_ways(f, *operands, **how):
    return program.compile_for(with_gradients(f), jax.eval_shape(f, *operands), *operands, **how)


def gradient(f, n=3):
    """Return a step of the gradients of n operands and nothing else."""

    def loss(*a):
        return sum(jnp.sum(jnp.sin(y.astype("float32"))) for y in jax.tree.leaves(f(*a)))

    return jax.grad(loss, range(n))


def some_gradients(function, operands, some, *, used=False, result=False):
    """Compile a step of the gradients of `some` operands, asked for alone or used out of all, and of the result."""

    def step(dy, *operands):
        wanted = range(len(operands)) if used else some

        def of_wanted(*given):
            return function(*(dict(enumerate(operands)) | dict(zip(wanted, given, strict=True))).values())

        y, pullback = jax.vjp(of_wanted, *[operands[i] for i in wanted])
        return [y] * result, [g for i, g in zip(wanted, pullback(dy), strict=True) if i in some]

    return program.compile_for(step, jax.eval_shape(function, *operands), *operands)

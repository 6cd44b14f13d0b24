"""Named sizes at which real models run the operators: one list for tests, benchmarks and the report of programs.

`WORKLOADS` are for a GPU, `CPU_WORKLOADS` for the other. Names are unique over both.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jln

# What each operator takes, x first, and returns.
ARGUMENTS = {
    "layer_norm": ("x", "scale", "offset"),
    "rms_norm": ("x", "scale"),
    "add_layer_norm": ("x", "residual", "scale", "offset"),
    "add_rms_norm": ("x", "residual", "scale"),
    "layer_norm_linear": ("x", "scale", "offset", "kernel", "bias"),
    "rms_norm_linear": ("x", "scale", "kernel"),
}
BOTH = ("forward", "backward")
FORWARD = ("forward",)


@dataclasses.dataclass(frozen=True)
class Workload:
    """One operator at one size.

    shape: x's, and the residual's. features: N of a Linear, else None. axis: the normalised one. dtype: of x, residual,
    kernel, bias and the results. parameter_dtype: of scale and offset. directions: both in training, "forward" alone in
    inference. why: what it stands for.
    """

    name: str
    operator: str
    shape: tuple[int, ...]
    why: str
    features: int | None = None
    axis: int = -1
    dtype: str = "bfloat16"
    parameter_dtype: str = "float32"
    directions: tuple[str, ...] = BOTH

    adds = property(lambda self: "residual" in ARGUMENTS[self.operator])
    is_linear = property(lambda self: self.features is not None)
    results = property(lambda self: ("y", "total") if self.adds else ("y",))
    width = property(lambda self: self.shape[self.axis])
    rows = property(lambda self: math.prod(self.shape) // self.width)

    def arrays(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the arguments, in order, then of the results, which are the cotangents' too."""
        h, n = self.width, self.features or 0
        parameter = jax.ShapeDtypeStruct((h,), jnp.dtype(self.parameter_dtype))
        known = {
            name: jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype))
            for name, shape in {
                "x": self.shape,
                "residual": self.shape,
                "kernel": (h, n),
                "bias": (n,),
                "y": (*self.shape[:-1], n) if self.is_linear else self.shape,
                "total": self.shape,
            }.items()
        } | {"scale": parameter, "offset": parameter}
        return {name: known[name] for name in (*ARGUMENTS[self.operator], *self.results)}

    def arguments(self) -> list[jax.ShapeDtypeStruct]:
        return list(self.arrays().values())[: len(ARGUMENTS[self.operator])]

    def cotangents(self) -> list[jax.ShapeDtypeStruct]:
        return list(self.arrays().values())[len(ARGUMENTS[self.operator]) :]

    def function(self, module: Any = jln) -> Callable[..., Any]:
        """The operator of `jln` or of `jln.reference`, told the axis."""
        options = {} if self.is_linear else {"axis": self.axis}
        return functools.partial(getattr(module, self.operator), **options)

    def step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """(*arguments, *cotangents) -> results, and the gradients where both directions are asked for.

        dresidual is left out: it is dx, and a program that returned both would copy it.
        """
        count, adds = len(ARGUMENTS[self.operator]), self.adds

        def forward(*arrays):
            return function(*arrays[:count])

        def both(*arrays):
            results, pullback = jax.vjp(function, *arrays[:count])
            dx, *others = pullback(tuple(arrays[count:]) if adds else arrays[count])
            return results, dx, others[1:] if adds else others

        return both if "backward" in self.directions else forward

    def step_arguments(self) -> list[jax.ShapeDtypeStruct]:
        """What `step`'s function takes."""
        return self.arguments() + (self.cotangents() if "backward" in self.directions else [])

    def bytes_once(self, direction: str | None = None) -> int:
        """If every array is moved once: in a direction, or in all of this workload's.

        Forward reads the arguments and writes the results. Backward reads the cotangents, what was normalised (x, or
        the total), scale and kernel, and writes dx, which is dresidual too, and the parameters' gradients.
        """
        if direction is None:
            return sum(self.bytes_once(d) for d in self.directions)
        sizes = {name: a.size * a.dtype.itemsize for name, a in self.arrays().items()}
        results = sum(sizes[name] for name in self.results)
        parameters = sum(sizes[name] for name in ARGUMENTS[self.operator] if name not in ("x", "residual"))
        if direction == "forward":
            return sizes["x"] + sizes.get("residual", 0) + parameters + results
        reread = sizes.get("scale", 0) + sizes.get("kernel", 0)
        return results + sizes["x"] + reread + sizes["x"] + parameters

    def product_flops(self, direction: str | None = None) -> int:
        """Of the Linear, an addition and a multiplication counted apart: one product forward, two backward."""
        if direction is None:
            return sum(self.product_flops(d) for d in self.directions)
        products = {"forward": 1, "backward": 2}[direction]
        return 2 * products * self.rows * self.width * self.features if self.features else 0


def _named(*workloads: Workload) -> dict[str, Workload]:
    return {w.name: w for w in workloads}


# Widths of "Language Models are Unsupervised Multitask Learners" (2019), 1024 tokens a sequence.
_GPT2 = {"small": (16, 768), "medium": (16, 1024), "large": (8, 1280), "xl": (8, 1600)}
# Rows of 2^25 elements: what DESIGN's byte table counts.
_TABLE = (1024, 4096, 8192, 16384, 32768)

WORKLOADS = _named(
    *(
        Workload(f"layer-norm-{h}", "layer_norm", (2**25 // h, h), "2^25 elements: one norm's bytes by its width")
        for h in _TABLE
    ),
    *(
        Workload(f"add-layer-norm-{h}", "add_layer_norm", (2**25 // h, h), "the same, a residual added first")
        for h in _TABLE
    ),
    *(
        Workload(f"gpt2-{size}", "layer_norm", (batch, 1024, h), f"GPT-2 {size}: a batch of sequences")
        for size, (batch, h) in _GPT2.items()
    ),
    *(
        Workload(f"gpt2-{size}-add", "add_layer_norm", (batch, 1024, h), f"GPT-2 {size}: the norm before its MLP")
        for size, (batch, h) in _GPT2.items()
    ),
    *(
        Workload(
            f"gpt2-{size}-qkv", "layer_norm_linear", (batch, 1024, h), f"GPT-2 {size}: norm and QKV projection", 3 * h
        )
        for size, (batch, h) in _GPT2.items()
    ),
    Workload("gpt2-small-float32", "layer_norm", (16, 1024, 768), "GPT-2 small, all in float32", dtype="float32"),
    Workload("vit-b16", "layer_norm", (256, 197, 768), "ViT-B/16 on 224x224 images: 14x14 patches and a class token"),
    Workload("vit-b16-mlp", "layer_norm_linear", (256, 197, 768), "ViT-B/16: norm and the MLP's first layer", 3072),
    *(
        Workload(f"llama-{h}", "rms_norm", (2**25 // h, h), "Llama-like: RMSNorm, no offset, wide rows")
        for h in (4096, 8192, 16384)
    ),
    *(
        Workload(f"llama-{h}-add", "add_rms_norm", (2**25 // h, h), "Llama-like: the residual stream and its norm")
        for h in (4096, 8192, 16384)
    ),
    Workload("llama-4096-qkv", "rms_norm_linear", (8192, 4096), "Llama 8B: 32 query and 2x8 key and value heads", 6144),
    Workload("llama-4096-mlp", "rms_norm_linear", (8192, 4096), "Llama 8B: gate and up projections in one", 28672),
    Workload("alphafold-pair", "layer_norm", (384, 384, 128), "AlphaFold's pair representation: many short rows"),
    Workload(
        "alphafold-pair-axis-0",
        "layer_norm",
        (128, 384, 384),
        "channels first, as in its triangle multiplication: rows side by side in memory",
        axis=0,
    ),
    Workload("linear-4096-12288", "layer_norm_linear", (8192, 4096), "QKV of a wide model: the products rule", 12288),
    Workload("linear-4096-256", "layer_norm_linear", (8192, 4096), "few features: memory rules, fused kernels", 256),
    Workload("linear-1024-3072", "layer_norm_linear", (16384, 1024), "QKV of a narrow model", 3072),
    Workload("router", "rms_norm_linear", (8192, 4096), "a mixture of 64 experts chooses", 64),
    Workload("adapter", "rms_norm_linear", (8192, 4096), "a low-rank adapter's first product", 16),
    *(
        Workload(f"decode-{m}", "rms_norm", (m, 4096), f"decoding {m} sequences: launch time rules", directions=FORWARD)
        for m in (1, 4, 16, 64)
    ),
    *(
        Workload(
            f"decode-{m}-qkv",
            "rms_norm_linear",
            (m, 4096),
            f"decoding {m} sequences: the kernel's bytes rule",
            6144,
            directions=FORWARD,
        )
        for m in (1, 4, 16, 64)
    ),
)

CPU_WORKLOADS = _named(
    *(
        Workload(
            f"cpu-{m}x{h}-{dtype}",
            "layer_norm",
            (m, h),
            "where most people try a library first: beyond the caches, wide, square and narrow",
            dtype=dtype,
            parameter_dtype=dtype,
        )
        for m, h in ((4096, 1024), (1024, 4096), (16384, 256))
        for dtype in ("float32", "bfloat16")
    )
)

"""Workloads, operators at the sizes at which real models run them: one list for tests, benchmarks and reports.

`WORKLOADS` are for a GPU, `CPU_WORKLOADS` for the CPU. Names are unique over `ALL` of them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import catalogue
import jln
from catalogue import DIRECTIONS, GATE_FIRST, OPERATORS, Operator, Several

FORWARD = ("forward",)


@dataclasses.dataclass(frozen=True)
class Workload:
    """One operator at one size.

    shape: x's, and the residual's.
    features: N of a Linear, or a tuple of those of several Linears behind one norm; None for a norm.
    axis: the normalised one.
    dtype: that of x, residual, kernel, bias and the results.
    parameter_dtype: that of scale and offset.
    directions: both in training, "forward" alone in inference.
    why: the model and the place that this size is from.
    absent: the optional arguments that are left out.
    extras: the rare optional arguments that are given.
    of_examples: the parameters of which every example has its own.
    options: the operator's form, as in the catalogue.
    """

    name: str
    operator: str
    shape: tuple[int, ...]
    why: str
    features: int | tuple[int, ...] | None = None
    axis: int = -1
    dtype: str = "bfloat16"
    parameter_dtype: str = "float32"
    directions: tuple[str, ...] = DIRECTIONS
    absent: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    of_examples: tuple[str, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def entry(self) -> Operator:
        form = {"absent": self.absent, "of_examples": self.of_examples, "options": self.options}
        return OPERATORS[self.operator].including(*self.extras, **form)

    is_linear = property(lambda self: self.entry.is_linear)
    is_over_last = property(lambda self: self.axis in (-1, len(self.shape) - 1))
    width = property(lambda self: self.shape[self.axis])
    rows = property(lambda self: math.prod(self.shape) // self.width)

    @property
    def all_features(self) -> tuple[int, ...]:
        """The features of all Linears together."""
        return self.features if isinstance(self.features, tuple) else () if self.features is None else (self.features,)

    axis_option = property(lambda self: {} if self.is_linear else {"axis": self.axis})
    shape_text = property(lambda self: "x".join(map(str, self.shape)))
    features_text = property(lambda self: "+".join(map(str, self.all_features)))
    title = property(lambda self: self.entry.title)

    def __str__(self) -> str:
        features = f" -> {self.features_text} features" if self.is_linear else ""
        return f"{self.title} of {self.shape_text}{features} in {self.dtype}"

    @classmethod
    def sized(cls, form: Operator, shape: tuple[int, ...], features: int | tuple[int, ...], dtype: str) -> Workload:
        """The workload of a form of an operator at one size, with all arrays in one dtype.

        features: of a Linear; those of a norm are left out.
        """
        how: dict[str, Any] = {"dtype": dtype, "parameter_dtype": dtype, "extras": form.given_extras}
        n = features if form.is_linear else None
        return cls(form.name, form.name, shape, "", n, options=form.options, **how)

    def sizes(self) -> dict[str, Any]:
        several = isinstance(self.features, tuple)
        features = Several((n,) for n in self.all_features) if several else self.all_features
        return catalogue.sizes(self.shape, self.axis, features)

    def arrays(self) -> dict[str, Any]:
        """Shapes and dtypes of the arguments in order, then those of the results, which are their cotangents' too.

        The kernels, biases and products of several Linears are a tuple each.
        """
        sizes = self.sizes()
        return {a.name: a.of(sizes, self.dtype, self.parameter_dtype) for a in self.entry.arrays}

    def arguments(self) -> list[Any]:
        return list(self.arrays().values())[: len(self.entry.arguments)]

    def cotangents(self) -> list[Any]:
        return list(self.arrays().values())[len(self.entry.arguments) :]

    def function(self, module: Any = jln, **options: Any) -> Callable[..., Any]:
        """The operator of `module`, `jln` or `jln.reference`, as a function of this workload's arguments in order."""
        return self.entry.in_order(getattr(module, self.operator), **self.axis_option, **options)

    def names(self, direction: str = "both", *, every: bool = False) -> list[str]:
        """The names of what a program returns, by default of a whole step. "gradient" is "both" without the results.

        every: as of `step`.
        """
        shapes, signature = self.arrays(), self.entry
        results = [(a.name, shapes[a.name]) for a in signature.results if direction in ("forward", "both")]
        own = signature.arguments if every else signature.gradients
        wanted = direction != "forward" and "backward" in self.directions
        return catalogue.flat_names(results + [(f"d{a.name}", shapes[a.name]) for a in own if wanted])

    def step(self, function: Callable[..., Any], *, every: bool = False) -> Callable[..., Any]:
        """Return a function (*arguments, *cotangents) -> results, and gradients where both directions are asked for.

        The cotangents wait for the results, as they do in a model: otherwise XLA could leave a result to a backward
        kernel.

        every: return dresidual where it is dx, too. A program that returned both would copy it.
        """
        signature = self.entry
        count = len(signature.arguments)

        def forward(*arrays):
            return function(*arrays[:count])

        def both(*arrays):
            results, pullback = jax.vjp(function, *arrays[:count])
            results, cotangents = jax.lax.optimization_barrier((results, arrays[count:]))
            gradients = pullback(signature.packed(cotangents))
            return results, list(gradients) if every else signature.own_gradients(gradients)

        return both if "backward" in self.directions else forward

    def step_arguments(self) -> list[Any]:
        """The arguments of the function that `step` returns."""
        return self.arguments() + (self.cotangents() if "backward" in self.directions else [])

    def bytes_once(self, direction: str | None = None) -> int:
        """The bytes moved if every array is moved once: in a direction, or in all of this workload's."""
        return sum(self.entry.bytes_once(self.arrays(), d) for d in self._directions(direction))

    def held_bytes(self, function: Callable[..., Any]) -> int | None:
        """Return the bytes that `jax.vjp` of the function hands from forward to backward; None in inference.

        x and the parameters that the function needs are among them. XLA may keep less in a program that has both.
        """
        if "backward" not in self.directions:
            return None
        program = jax.make_jaxpr(lambda *a: jax.vjp(function, *a)[1])(*self.arguments()).jaxpr
        arrays = [v.aval for v in dict.fromkeys(program.outvars)]
        return sum(a.size * a.dtype.itemsize for a in arrays)

    def product_flops(self, direction: str | None = None) -> int:
        """The additions and multiplications of the Linears: one product forward, two backward."""
        elements, features = math.prod(self.shape), sum(self.all_features)
        return sum(2 * (1 + DIRECTIONS.index(d)) * elements * features for d in self._directions(direction))

    def _directions(self, direction: str | None) -> tuple[str, ...]:
        return self.directions if direction is None else (direction,)

    def draw(self, seed: int = 0) -> tuple[list[Any], list[Any]]:
        """Return arguments and cotangents of random numbers of spread 1: arrays of NumPy, or tuples of them.

        Scales are around 1, and kernels are small enough to keep a result as large as what it is made of. All numbers
        fit the workload's dtype, for peers whose parameters have it.
        """
        random, shapes = np.random.default_rng(seed), self.arrays()

        def drawn(role: str, a: Any) -> np.ndarray:
            numbers = random.standard_normal(a.shape) / (math.sqrt(a.shape[0]) if role == "kernel" else 1)
            return (numbers + (role == "scale")).astype(jnp.dtype(self.dtype)).astype(a.dtype)

        made = [jax.tree.map(functools.partial(drawn, a.role), shapes[a.name]) for a in self.entry.arrays]
        count = len(self.entry.arguments)
        return made[:count], made[count:]


def _named(*workloads: Workload) -> dict[str, Workload]:
    return {w.name: w for w in workloads}


def _family(name: str, operator: str, why: str, shapes: Mapping[Any, tuple[int, ...]], **how: Any) -> list[Workload]:
    """A workload of each of these shapes of x, by what stands behind its name."""
    return [Workload(f"{name}-{which}", operator, shape, why, **how) for which, shape in shapes.items()]


def _rows(*widths: int) -> dict[int, tuple[int, ...]]:
    """Rows of 2^25 elements, so that bytes compare by width: the table of benchmarks/README.md."""
    return {h: (2**25 // h, h) for h in widths}


def _examples(*widths: int) -> dict[int, tuple[int, ...]]:
    """The same in examples of 256 rows."""
    return {h: (2**25 // h // 256, 256, h) for h in widths}


# Widths of "Language Models are Unsupervised Multitask Learners" (2019), 1024 tokens a sequence.
_GPT2 = {"small": (16, 768), "medium": (16, 1024), "large": (8, 1280), "xl": (8, 1600)}
_TABLE, _WIDE, _THREE = (1024, 4096, 8192, 16384, 32768), (4096, 8192, 16384), (1024, 4096, 8192)
_ONE = (8192, 4096)
_BIAS = ("bias",)
# Llama 3 8B: 32 heads of queries, 8 of keys and of values.
_LLAMA_LINEARS = {"q-k-v": (4096, 1024, 1024), "gate-up": (14336, 14336)}
_OF_EACH = {"parameter_dtype": "bfloat16", "extras": ("gate",), "of_examples": ("scale", "offset", "gate")}

WORKLOADS = _named(
    *_family("layer-norm", "layer_norm", "2^25 elements: one norm's bytes by its width", _rows(*_TABLE)),
    *_family("add-layer-norm", "add_layer_norm", "the same, a residual added first", _rows(*_TABLE)),
    *(
        Workload(f"gpt2-{size}{part}", operator, (batch, 1024, h), f"GPT-2 {size}: {why}", n * h or None)
        for part, operator, n, why in (
            ("", "layer_norm", 0, "a batch of sequences"),
            ("-add", "add_layer_norm", 0, "the norm before its MLP"),
            ("-qkv", "layer_norm_linear", 3, "norm and QKV projection"),
        )
        for size, (batch, h) in _GPT2.items()
    ),
    Workload("gpt2-small-float32", "layer_norm", (16, 1024, 768), "GPT-2 small, all in float32", dtype="float32"),
    Workload("vit-b16", "layer_norm", (256, 197, 768), "ViT-B/16 on 224x224 images: 14x14 patches and a class token"),
    Workload("vit-b16-mlp", "layer_norm_linear", (256, 197, 768), "ViT-B/16: norm and the MLP's first layer", 3072),
    *_family("llama", "rms_norm", "Llama-like: RMSNorm, no offset, wide rows", _rows(*_WIDE)),
    *(
        Workload(f"llama-{h}-add", "add_rms_norm", shape, "Llama-like: the residual stream and its norm")
        for h, shape in _rows(*_WIDE).items()
    ),
    *(
        Workload(f"llama-4096-{name}", f"{add}rms_norm_linear", _ONE, why, n, absent=_BIAS)
        for name, add, why, n in (
            ("qkv", "", "Llama 8B: 32 query and 2x8 key and value heads", 6144),
            ("mlp", "", "Llama 8B: gate and up projections in one", 28672),
            *((name, "", "Llama 8B, Linears apart", n) for name, n in _LLAMA_LINEARS.items()),
            *((f"add-{name}", "add_", "the same, the residual added first", n) for name, n in _LLAMA_LINEARS.items()),
        )
    ),
    Workload("q-k-v-1024", "layer_norm_linear", (16384, 1024), "QKV of a narrow model, Linears apart", 3 * (1024,)),
    Workload("add-q-k-v-1024", "add_layer_norm_linear", (16384, 1024), "the same, a residual added first", 3 * (1024,)),
    *(
        Workload(f"{name}-{h}", "add_layer_norm", shape, why, extras=extras)
        for h, shape in _examples(*_THREE).items()
        for name, extras, why in (
            ("x-bias", ("x_bias",), "the bias of the Linear in front and the residual, as in GPT-2"),
            ("layer-scale", ("x_bias", "gate"), "the same and LayerScale, as in BEiT"),
        )
    ),
    *_family(
        "ada-norm",
        "add_layer_norm",
        "a diffusion transformer: scale, offset and gate of each example",
        _examples(*_THREE),
        **_OF_EACH,
    ),
    *_family(
        "norms-both-sides",
        "rms_norm_add_rms_norm",
        "Gemma 2 and 3: the norm behind a sublayer, the residual, the norm in front of the next",
        _rows(*_THREE),
    ),
    Workload(
        "norms-both-sides-gated",
        "rms_norm_add_rms_norm",
        (32, 256, 4096),
        "Lumina 2: with a gate of each example behind the first norm",
        extras=("gate",),
        of_examples=("gate",),
    ),
    Workload(
        "norms-both-sides-qkv",
        "rms_norm_add_rms_norm_linear",
        _ONE,
        "Gemma 3: q, k and v behind both norms",
        (4096, 2048, 2048),
        absent=_BIAS,
    ),
    Workload("post-rms-norm", "rms_norm_add", _ONE, "OLMo 2: the norm of a branch, then the residual"),
    Workload("post-layer-norm", "layer_norm_add", _ONE, "Swin 2: likewise"),
    *_family(
        "qk-norm",
        "rms_norm",
        "an attention's queries, each head by itself",
        {d: (4, 2048, 4096 // d, d) for d in (64, 128, 256)},
    ),
    *(
        Workload(f"{name}-{h}", "rms_norm_gated", shape, "2^25 elements, as " + why, options=options)
        for h, shape in _examples(*_THREE).items()
        for name, options, why in (("gated", (), "Qwen 3 Next gates"), ("gate-first", GATE_FIRST, "Mamba 2 gates"))
    ),
    Workload("gated-128", "rms_norm_gated", (4, 2048, 32, 128), "Qwen 3 Next: each head's output of linear attention"),
    Workload("alphafold-pair", "layer_norm", (384, 384, 128), "AlphaFold's pair representation: many short rows"),
    Workload(
        "alphafold-pair-axis-0",
        "layer_norm",
        (128, 384, 384),
        "channels first, as in its triangle multiplication: by XLA",
        axis=0,
    ),
    *_family(
        "convnext",
        "layer_norm",
        "ConvNeXt-L's stages on 384x384 images, channels first: by XLA",
        {768: (64, 768, 24, 24), 1536: (64, 1536, 12, 12)},
        axis=1,
    ),
    Workload("linear-4096-12288", "layer_norm_linear", _ONE, "QKV of a wide model: the products rule", 12288),
    Workload("linear-4096-256", "layer_norm_linear", _ONE, "few features: memory rules, fused kernels", 256),
    Workload("linear-1024-3072", "layer_norm_linear", (16384, 1024), "QKV of a narrow model", 3072),
    Workload("router", "rms_norm_linear", _ONE, "a mixture of 64 experts chooses", 64, absent=_BIAS),
    Workload("adapter", "rms_norm_linear", _ONE, "a low-rank adapter's first product", 16, absent=_BIAS),
    Workload("adapters", "rms_norm_linear", _ONE, "those of q, k and v, in one kernel", 3 * (16,), absent=_BIAS),
    Workload("q-k-v-64", "rms_norm_linear", _ONE, "one small head, in one kernel", 3 * (64,), absent=_BIAS),
    *(
        Workload(f"decode-{m}", "rms_norm", (m, 4096), f"decoding {m} sequences: launch time rules", directions=FORWARD)
        for m in (1, 4, 16, 64)
    ),
    *(
        Workload(
            *(
                f"decode-{m}-qkv",
                "rms_norm_linear",
                (m, 4096),
                f"decoding {m} sequences: the kernel's bytes rule",
                6144,
            ),
            directions=FORWARD,
            absent=_BIAS,
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

ALL: dict[str, Workload] = WORKLOADS | CPU_WORKLOADS

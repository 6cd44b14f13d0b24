"""The named workloads, sizes at which real models run the operators: one list for tests, benchmarks and reports.

`WORKLOADS` are for a GPU, as are `BLOCKS`, `CPU_WORKLOADS` for the CPU. Names are unique over `ALL` of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jln._tools.catalogue import GATE_FIRST
from jln._tools.workload import FORWARD, Block, Workload


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
    Workload("layer-norms-both-sides", "layer_norm_add_layer_norm", _ONE, "CogView: LayerNorms, with offsets"),
    Workload(
        "norms-both-sides-qkv",
        "rms_norm_add_rms_norm_linear",
        _ONE,
        "Gemma 3: q, k and v behind both norms",
        (4096, 2048, 2048),
        absent=_BIAS,
    ),
    Workload(
        "layer-norms-both-sides-qkv",
        "layer_norm_add_layer_norm_linear",
        _ONE,
        "CogView: q, k and v behind both norms",
        3 * (4096,),
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
        "channels first, as in its triangle multiplication: rows side by side in memory",
        axis=0,
    ),
    *_family(
        "convnext",
        "layer_norm",
        "ConvNeXt-L's stages on 384x384 images, channels first: rows side by side, longer than a tile",
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

# The workloads whose tiles may be tuned. Rules alone choose the tiles of the backward pass of a sum with a bias or a
# gate, of a gated norm, and of a norm on both sides.
TUNABLE = {name: w for name, w in WORKLOADS.items() if not (w.extras or w.entry.is_gated or w.entry.both_sides)}

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

BLOCKS = {
    b.name: b
    for width, shape, what, heads in (
        (1024, (8, 1024, 1024), "GPT-2 medium's block, a training step", 16),
        (4096, (2, 2048, 4096), "a wide model's block, a training step", 32),
    )
    for b in (
        Block(f"block-{width}", "block", shape, what, heads=heads),
        Block(f"block-{width}-q-k-v", "block", shape, f"{what}; q, k, v apart", heads=heads, apart=True),
    )
}

ALL: dict[str, Workload] = {**WORKLOADS, **BLOCKS, **CPU_WORKLOADS}

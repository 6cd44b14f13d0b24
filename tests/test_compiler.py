"""Rung 3: every launch that can be chosen is compiled for sm_80, sm_90 and sm_100: no spills, and it fits the chip.

Compiling needs a process without TRITON_INTERPRET, so each case is a worker process's; nothing here needs a GPU.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from jln._bench.workloads import WORKLOADS
from jln._norm import signature as norms
from jln._norm_linear import signature as linears
from jln._norm_linear import tiles as linear_tiles
from jln._triton import compiler, tuning
from jln._triton.chip import CHIPS as ALL_CHIPS
from jln._triton.chip import SHARED_LIMIT
from jln._triton.target import Recorder
from jln._triton.tile import Tile
from jln._triton.tuning import Trial

pytest.importorskip("triton")

CHIPS = ("a100", "h200", "b200")
# x's, the residual's, the parameters'.
DTYPES = {
    "bfloat16": ("bfloat16", "bfloat16", "bfloat16"),
    "float16": ("float16", "float16", "float16"),
    "float32": ("float32", "float32", "float32"),
    "float64": ("float64", "float64", "float64"),
    "bfloat16, float32 parameters": ("bfloat16", "bfloat16", "float32"),
    "bfloat16, float32 stream": ("bfloat16", "float32", "float32"),
    "float16, bfloat16 stream": ("float16", "bfloat16", "float32"),
}

# Of a module whose result has another dtype than x: x's, none, the parameters', the result's.
MODULE_DTYPES = {
    "bfloat16, float32 result": ("bfloat16", None, "float32", "float32"),
    "float32, bfloat16 result": ("float32", None, "float32", "bfloat16"),
}

# Either side of every power of two, so every tile, with and without a mask and with and without aligned rows; and rows
# of several chunks, some with a chunk of a few elements. The others are aligned and have a mask; or a model has them.
WIDTHS = [n for k in range(17) for n in (2**k - 1, 2**k) if n > 0] + [24, 7168, 20000, 40000, 262144]
WIDTHS += sorted({w.width for w in WORKLOADS.values()} - set(WIDTHS))
# Rows that lie side by side: a few, whose starts are not aligned, and many.
STRIDED = [(h, inner) for h in (8, 100, 128, 256, 384, 1024) for inner in (7, 147456)]
LAYOUTS = [(h, 1) for h in WIDTHS] + STRIDED

# The most of everything, the least, and what most models have.
SWITCHES = {
    "add_rms_norm": {
        "adds": True,
        "subtract_mean": False,
        "zero_centered_scale": False,
        "scale": True,
        "offset": False,
    },
    "everything": {"adds": True, "subtract_mean": True, "zero_centered_scale": True, "scale": True, "offset": True},
    "nothing": {"adds": False, "subtract_mean": False, "zero_centered_scale": False, "scale": False, "offset": False},
}


def named(*arrays):
    """Their dtypes' names, None for what is absent."""
    return (None if a is None else a.dtype.name for a in arrays)


def launches(h, inner, dtypes, chip, switches, trial=None):
    """The launches of forward and backward at this size, none made."""
    from jln._norm import launcher

    jax.config.update("jax_enable_x64", True)
    shape, axis = ((100_000, h), -1) if inner == 1 else ((3, h, inner), -2)
    x = jax.ShapeDtypeStruct(shape, dtypes[0])
    added = jax.ShapeDtypeStruct(shape, dtypes[1]) if switches["adds"] else None
    y = x if len(dtypes) == 3 else jax.ShapeDtypeStruct(shape, dtypes[3])
    total = x if added is None else jax.ShapeDtypeStruct(shape, jnp.promote_types(*dtypes[:2]))
    parameter = jax.ShapeDtypeStruct([h if i == len(shape) + axis else 1 for i in range(len(shape))], dtypes[2])
    rstd = jax.ShapeDtypeStruct(
        [1 if i == len(shape) + axis else n for i, n in enumerate(shape)], jnp.promote_types(total.dtype, jnp.float32)
    )
    mean = rstd if switches["subtract_mean"] else None
    scale = parameter if switches["scale"] else None
    offset = parameter if switches["offset"] else None
    dtotal = None if added is None else total
    norm = norms.Norm(axis, 1e-6, switches["subtract_mean"], switches["zero_centered_scale"])
    recorder = Recorder(ALL_CHIPS[chip], trial)
    wanted = norms.Outcome(*named(y, dtotal, mean, rstd))
    jax.eval_shape(
        lambda operands: launcher.forward(operands, norm, wanted, 0, recorder),
        norms.Operands(x, added, scale, offset),
    )
    gradients = norms.Gradients(*named(total, scale, offset, None))
    jax.eval_shape(
        lambda operands: launcher.backward(operands, norm, gradients, 0, recorder),
        norms.Cotangents(y, dtotal, total, scale, None, mean, rstd),
    )
    return recorder.launches


def compile_all(dtypes, chip, switches, layouts):
    """Runs in the worker: `[(description, spilled bytes a thread, shared bytes a block, the chip's limit)]`."""
    made = []
    for h, inner in layouts:
        for launch in launches(h, inner, dtypes, chip, switches):
            resources = compiler.compile_launch(launch)
            what = f"{launch.kernel.fn.__name__} {dtypes} H={h} inner={inner} {launch.tile}"
            made.append((what, resources.spilled, resources.shared, SHARED_LIMIT[launch.chip.capability]))
    return made


@pytest.fixture(scope="module")
def worker():
    """A process that compiles, whatever this one does."""
    with compiler.workers(1) as pool:
        yield pool


# One chip with every switch on takes a minute and a half on two cores; the others are heavy.
COMBINATIONS = [
    pytest.param(s, c, marks=[] if (s, c) == ("everything", "h200") else [pytest.mark.heavy])
    for s in SWITCHES
    for c in CHIPS
]


# Some launches, most of them of float64 or of several dtypes, keep up to so many bytes on the stack with 40 to 128
# registers where twice as many are to be had: the assembler's own choice, which another tile only moves to another
# launch. With every switch on an H200 has none outside of float64.
BY_CHOICE = 24


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("switches", "chip"), COMBINATIONS)
def test_no_spills(worker, switches, chip, dtype):
    made = worker.submit(compile_all, DTYPES[dtype], chip, SWITCHES[switches], LAYOUTS).result()
    assert len(made) > 2 * len(LAYOUTS) - 1
    allowed = 0 if (switches, chip) == ("everything", "h200") and dtype != "float64" else BY_CHOICE
    assert [what for what, spilled, *_ in made if spilled > allowed] == []
    assert [what for what, _, shared, limit in made if shared > limit] == []


# One of every kind of tile, with aligned rows and without; the dtypes are mixed, so no other tile is chosen.
MODULE_LAYOUTS = [(h, 1) for h in (100, 1023, 4096, 8191, 16384, 40000)] + STRIDED[::4]


@pytest.mark.parametrize("dtype", MODULE_DTYPES)
@pytest.mark.parametrize("chip", [pytest.param(c, marks=[] if c == "h200" else [pytest.mark.heavy]) for c in CHIPS])
def test_no_spills_of_modules(worker, chip, dtype):
    switches = SWITCHES["everything"] | {"adds": False, "zero_centered_scale": False}
    made = worker.submit(compile_all, MODULE_DTYPES[dtype], chip, switches, MODULE_LAYOUTS).result()
    assert [what for what, spilled, *_ in made if spilled > (0 if chip == "h200" else 16)] == []
    assert [what for what, _, shared, limit in made if shared > limit] == []


def test_a_spill_is_seen(worker):
    """A tile twice as large as any that is chosen spills, and is reported."""
    assert worker.submit(spills_of_a_large_tile).result() > 0


def spills_of_a_large_tile():
    import dataclasses

    backward = next(
        launch
        for launch in launches(16384, 1, DTYPES["float32"], "h200", SWITCHES["everything"])
        if launch.kernel.fn.__name__ == "backward_kernel"
    )
    constants = backward.constants | {"BLOCK_H": 16384}
    return compiler.compile_launch(dataclasses.replace(backward, tile=Tile(1, 16384, 16), constants=constants)).spilled


# Rows side by side: whole rows and chunks of them, H of which few or no powers of two are a factor.
WIDE = [(33, 768), (300, 128), (2000, 64)]


def load_widths(dtype, layouts):
    """Runs in the worker: of each launch its kernel and the bytes of every load from global memory in its PTX."""
    made = []
    for h, inner in layouts:
        for launch in launches(h, inner, DTYPES[dtype], "h200", SWITCHES["nothing"]):
            ptx = compiler.compile_launch(launch).ptx
            loads = re.findall(r"ld\.global(?:\.\w+)*?(?:\.v(\d))?\.b(\d+)", ptx)
            widths = {int(vector or 1) * int(bits) // 8 for vector, bits in loads}
            widths |= {int(n, 16) for n in re.findall(r"cp\.async\.\w+\.shared\.global \[.*?\], \[.*?\], 0x(\w+)", ptx)}
            made.append((f"{launch.kernel.fn.__name__} {dtype} H={h} inner={inner}", widths))
    return made


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_side_by_side_are_loaded_16_bytes_at_a_time(worker, dtype):
    """Statistics, of which there is one a row, take 4."""
    made = worker.submit(load_widths, dtype, WIDE).result()
    assert len(made) >= 2 * len(WIDE)
    wrong = [m for m in made if m[1] != ({16} if m[0].startswith("forward") else {16, 4})]
    assert wrong == []


def copies_of_a_fused_forward(shape, dtype):
    """Runs in the worker: the bytes of each copy from global to shared memory."""
    m, h, n = shape
    launch = linear_launches(m, h, n, LINEAR_DTYPES[dtype], "h200", SWITCHES["nothing"])[0]
    assert launch.kernel.fn.__module__ == "jln._norm_linear.kernels" and launch.kernel.fn.__name__ == "forward_kernel"
    copies = re.findall(
        r"cp\.async\.\w+\.shared\.global \[.*?\], \[.*?\], 0x(\w+)", compiler.compile_launch(launch).ptx
    )
    return {int(n, 16) for n in copies}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_fused_forward_copies_16_bytes_at_a_time(worker, dtype):
    assert worker.submit(copies_of_a_fused_forward, (100_000, 512, 64), dtype).result() == {16}


def contractible(chip):
    """Runs in the worker: of each kernel of a norm and of a fused Linear the products and sums that may become one."""
    made = launches(65, 1, DTYPES["float32"], chip, SWITCHES["everything"])
    made += linear_launches(200, 64, 16, LINEAR_DTYPES["bfloat16"], chip, SWITCHES["everything"])
    found = {}
    for launch in made:
        ptx = compiler.compile_launch(launch).ptx
        assert "add.rn.f32" in ptx or "fma.rn.f32" in ptx
        found[launch.kernel.fn.__module__, launch.kernel.fn.__name__] = re.findall(r"\b(?:mul|add|sub)\.f\d\d", ptx)
    return found


@pytest.mark.parametrize("chip", CHIPS)
def test_no_product_is_contracted_with_the_sum_it_goes_into(worker, chip):
    """Two threads that add x * x and what the other has would each round the other's, and store two results."""
    found = worker.submit(contractible, chip).result()
    assert len(found) == 7
    assert [kernel for kernel, some in found.items() if some] == []


# LayerNorm+Linear: x's, the kernel's, the norm parameters'.
LINEAR_DTYPES = {
    "bfloat16": ("bfloat16", "bfloat16", "float32"),
    "float16": ("float16", "float16", "float16"),
    "float32": ("float32", "float32", "float32"),
    "float64": ("float64", "float64", "float64"),
    "bfloat16, float32 parameters": ("bfloat16", "float32", "float32"),
    "float32, bfloat16 kernel": ("float32", "bfloat16", "float32"),
    "float16, bfloat16 kernel": ("float16", "bfloat16", "float32"),
}
# M, H, N. Fused: each power of 2 that a product is padded to, with aligned rows of x and dy and without; one chunk and
# many; few rows, whose columns several programs share.
FUSED = [
    (100_000, 4096, 256),
    (100_000, 1000, 136),
    (100_000, 8192, 128),
    (100_000, 4096, 64),
    (100_000, 1023, 7),
    (64, 512, 128),
]
MORE_FUSED = [
    (m, h, n)
    for m in (64, 100_000)
    for h in (8, 33, 512, 768, 1023, 8192)
    for n in (1, 3, 16, 32, 33, 64, 100, 104, 128, 130, 136, 200, 256)
]
# Composed: every kind of tile that `backward_plan` knows.
LINEAR_WIDTHS = (1024, 8192, 8191, 16384)
MORE_LINEAR_WIDTHS = [h for h in WIDTHS if 8 <= h not in LINEAR_WIDTHS]


def linear_launches(rows, h, n, dtypes, chip, switches, trial=None):
    """The launches of LayerNorm+Linear forward and backward at this size, none made; a residual is x's like."""
    from jln._norm_linear import launcher

    jax.config.update("jax_enable_x64", True)
    x, parameter = jax.ShapeDtypeStruct((rows, h), dtypes[0]), jax.ShapeDtypeStruct((h,), dtypes[2])
    kernel, bias = (jax.ShapeDtypeStruct(s, dtypes[1]) for s in ((h, n), (n,)))
    dy = jax.ShapeDtypeStruct((rows, n), jnp.promote_types(*dtypes[:2]))
    rstd = jax.ShapeDtypeStruct((rows, 1), jnp.promote_types(dtypes[0], jnp.float32))
    mean = rstd if switches["subtract_mean"] else None
    scale, offset = (parameter if switches[name] else None for name in ("scale", "offset"))
    everything = scale is not None
    bias = bias if everything else None
    residual = x if switches["adds"] else None  # total and its cotangent are alike
    norm = norms.Norm(-1, 1e-6, switches["subtract_mean"], switches["zero_centered_scale"])
    settings = linears.NormLinear(norm, None, (1,), in_one=True)
    recorder = Recorder(ALL_CHIPS[chip], trial)
    statistics = named(*((mean, rstd) if everything else (None, None)))
    wanted = linears.Outcome(tuple(named(dy)), *named(residual), *statistics)
    operands = linears.Operands(x, residual, scale, offset, (kernel,), (bias,))
    jax.eval_shape(lambda operands: launcher.forward(operands, settings, wanted, 0, recorder), operands)
    gradients = linears.Gradients(*named(x, scale, offset), tuple(named(kernel)), tuple(named(bias)))
    jax.eval_shape(
        lambda operands: launcher.backward(operands, settings, gradients, 0, recorder),
        linears.Cotangents((dy,), residual, x, scale, offset, (kernel,), mean, rstd),
    )
    return recorder.launches


def compile_linear(dtypes, chip, switches, sizes):
    """Runs in the worker: as `compile_all`, and the number of wgmma and of mma instructions."""
    made = []
    for m, h, n in sizes:
        for launch in linear_launches(m, h, n, dtypes, chip, switches):
            resources = compiler.compile_launch(launch)
            sass = compiler.dump(resources.cubin, "--dump-sass")
            what = f"{launch.kernel.fn.__name__} {dtypes} M={m} H={h} N={n} {launch.tile}"
            limit = SHARED_LIMIT[launch.chip.capability]
            made.append((what, resources.spilled, resources.shared, limit, sass.count(" HGMMA."), sass.count(" HMMA.")))
    return made


def assert_fits(made, stack=0):
    assert [what for what, spilled, *_ in made if spilled > stack] == []
    assert [what for what, _, shared, limit, *_ in made if shared > limit] == []


# The chip of the byte table, with every switch on, takes half a minute; the others are heavy.
LINEAR_COMBINATIONS = [
    pytest.param(s, c, d, marks=[] if (s, c, d) == ("everything", "h200", "bfloat16") else [pytest.mark.heavy])
    for s in SWITCHES
    for c in (*CHIPS, "l4")
    for d in LINEAR_DTYPES
]


# float64 has no fused kernels, nor has a product in float32 on Blackwell.
FUSED_COMBINATIONS = [
    p
    for p in LINEAR_COMBINATIONS
    if p.values[2] != "float64" and (p.values[1] != "b200" or p.values[2] in ("bfloat16", "float16"))
]


@pytest.mark.parametrize(("switches", "chip", "dtype"), FUSED_COMBINATIONS)
@pytest.mark.parametrize("sizes", [FUSED, pytest.param(MORE_FUSED, marks=pytest.mark.heavy)], ids=["few", "more"])
def test_fused_linear_does_not_spill_and_uses_wgmma(worker, sizes, switches, chip, dtype):
    product = jnp.promote_types(*LINEAR_DTYPES[dtype][:2]).name
    fused = [s for s in sizes if linear_tiles.forward_tile(*s, product, ALL_CHIPS[chip])]
    assert len(fused) > len(sizes) // 3
    made = worker.submit(compile_linear, LINEAR_DTYPES[dtype], chip, SWITCHES[switches], fused).result()
    assert len(made) == 4 * len(fused)
    assert_fits(made, stack=0 if (switches, chip, dtype) == ("everything", "h200", "bfloat16") else BY_CHOICE)
    if chip == "h200":  # no product falls back to mma, and each kernel but the last has products
        assert [what for what, *_, mma in made if mma] == []
        assert [what for what, *_, wgmma, _ in made if not wgmma and "parameters_kernel" not in what] == []


def unfenced_products(ptx):
    """The products in a kernel's PTX that a thread may come to with no proxy fence since it stored to shared memory.

    wgmma and tcgen05.mma read shared memory by another way than a store takes there, and only such a fence orders them.
    """
    lines = [line.strip() for line in ptx.splitlines()]
    labels = {line.split(":")[0]: at for at, line in enumerate(lines) if re.match(r"\$\w+:", line)}
    found, seen, ahead = set(), set(), [(0, False)]
    while ahead:
        at, stored = ahead.pop()
        while at < len(lines) and (at, stored) not in seen:
            seen.add((at, stored))
            line = lines[at]
            if re.search(r"\bst(matrix|\.(volatile\.)?shared)", line):
                stored = True
            elif "fence.proxy.async" in line:
                stored = False
            elif stored and re.search(r"wgmma\.mma_async|tcgen05\.(mma|cp)\b", line):
                found.add(line)
            if branch := re.search(r"\bbra(?:\.\w+)?\s+(\$\w+)", line):
                ahead.append((labels[branch[1]], stored))
            if re.match(r"(ret|bra)\b", line):
                break
            at += 1
    return sorted(found)


def fences_of_fused_kernels(chip, dtype, sizes):
    """Runs in the worker: of each fused kernel its products, and those that are not fenced."""
    made = []
    for m, h, n in sizes:
        for launch in linear_launches(m, h, n, LINEAR_DTYPES[dtype], chip, SWITCHES["everything"]):
            ptx = compiler.compile_launch(launch).ptx
            products = len(re.findall(r"wgmma\.mma_async|tcgen05\.mma\b", ptx))
            made.append((f"{launch.kernel.fn.__name__} M={m} H={h} N={n}", products, unfenced_products(ptx)))
    return made


@pytest.mark.parametrize(
    ("chip", "dtype"),
    [("h200", "bfloat16"), ("b200", "bfloat16"), pytest.param("h200", "float32", marks=pytest.mark.heavy)],
)
def test_products_wait_for_what_is_stored_to_shared_memory(worker, chip, dtype):
    """Otherwise results are wrong now and then. Triton before 3.7.1 leaves out the fences, and no kernel is fused."""
    if (why := linear_tiles.unfenced(ALL_CHIPS[chip])) is not None:
        for choose in (linear_tiles.forward_tile, linear_tiles.backward_plan):
            assert all(choose(m, h, n, dtype, ALL_CHIPS[chip]) is None for m, h, n in FUSED), why
        return
    made = worker.submit(fences_of_fused_kernels, chip, dtype, [(100_000, 512, 64)]).result()
    assert sum(products > 0 for _, products, _ in made) == 3
    assert [(what, missing) for what, _, missing in made if missing] == []


def test_a_fence_that_is_missing_is_seen():
    loop = "$L__1:\n{wait}\nwgmma.mma_async.sync x;\nst.shared.b32 [%r1], %r2;\n@%p1 bra $L__1;\nret;"
    assert unfenced_products(loop.format(wait="bar.sync 0;")) == ["wgmma.mma_async.sync x;"]
    assert unfenced_products(loop.format(wait="fence.proxy.async.shared::cta;")) == []


@pytest.mark.parametrize(("switches", "chip", "dtype"), LINEAR_COMBINATIONS)
@pytest.mark.parametrize(
    "widths", [LINEAR_WIDTHS, pytest.param(MORE_LINEAR_WIDTHS, marks=pytest.mark.heavy)], ids=["few", "more"]
)
def test_composed_linear_does_not_spill(worker, widths, switches, chip, dtype):
    sizes = [(100_000, h, 12288) for h in widths]
    made = worker.submit(compile_linear, LINEAR_DTYPES[dtype], chip, SWITCHES[switches], sizes).result()
    assert len(made) >= 2 * len(sizes)
    assert_fits(made, stack=0 if (switches, chip, dtype) == ("everything", "h200", "bfloat16") else BY_CHOICE)


def test_linear_workloads_do_not_spill(worker):
    sizes = sorted({(w.rows, w.width, w.features) for w in WORKLOADS.values() if w.is_linear})
    made = worker.submit(compile_linear, LINEAR_DTYPES["bfloat16"], "h200", SWITCHES["everything"], sizes).result()
    assert len(made) >= 2 * len(sizes)
    assert_fits(made)


# Of each choice one that the heuristics do not make, and what the package has.
TUNED = [
    {"choice": "forward", "h": 2048, "layout": "last axis", "itemsize": 2, "mixed": False,
     "tiles": {"tile": Tile(2, 2048, 16)}},
    {"choice": "backward", "h": 1000, "layout": "other axis, unaligned", "itemsize": 4, "mixed": True, "wants_y": False,
     "tiles": {"tile": Tile(16, 64, 8), "sums": Tile(16, 64, 8)}},
    {"choice": "backward", "h": 2048, "layout": "last axis", "itemsize": 4, "mixed": False, "wants_y": False,
     "tiles": {"tile": Tile(4, 2048, 16, 3), "sums": None}},
    {"choice": "backward", "h": 4096, "layout": "last axis", "itemsize": 2, "mixed": False, "wants_y": True,
     "tiles": {"tile": Tile(1, 4096, 16, 4), "sums": None}},
    {"choice": "backward", "h": 1000, "layout": "other axis", "itemsize": 4, "mixed": False, "wants_y": False,
     "tiles": {"tile": Tile(512, 2, 8, 8), "sums": Tile(64, 16, 4)}},
    {"choice": "fused_forward", "h": 4096, "n": 64, "dtype": "bfloat16", "tiles": {"tile": Tile(64, 128, 8, 3)}},
    {"choice": "fused_backward", "h": 1000, "n": 256, "dtype": "bfloat16",
     "tiles": {"row_sums": Tile(64, 64, 8, 4), "backward": Tile(64, 64, 8, 4)}},
]  # fmt: skip
TUNED = [tuning.parsed(e | {"chip": "h200", "tiles": {n: t and vars(t) for n, t in e["tiles"].items()}}) for e in TUNED]
# One that is unsound is an error here.
PACKAGED = [tuning.parsed(e) for path in sorted(tuning.PACKAGED.glob("*.json")) for e in tuning.load(path)["entries"]]


def compile_tuned(key, tiles):
    """Runs in the worker: of each tile (kernel, the tile, spilled bytes, shared bytes)."""
    sizes = dict(key)
    chip, h = sizes["chip"], sizes["h"]
    trial = Trial({key: tiles})
    if "n" in sizes or sizes.get("wants_y"):
        name = sizes.get("dtype") or {2: "bfloat16", 4: "float16" if sizes["mixed"] else "float32"}[sizes["itemsize"]]
        dtypes = LINEAR_DTYPES[name]
        made = linear_launches(100_000, h, sizes.get("n", 12288), dtypes, chip, SWITCHES["everything"], trial)
    else:
        name = {2: "bfloat16", 4: "float32", 8: "float64"}[sizes["itemsize"]]
        dtypes = DTYPES["bfloat16, float32 stream" if sizes["mixed"] else name]
        inner = {"last axis": 1, "other axis": 147456, "other axis, unaligned": 147455}[sizes["layout"]]
        made = launches(h, inner, dtypes, chip, SWITCHES["everything"], trial)
    assert key in trial.asked, f"nothing asks for {key}"
    wanted = [tile for tile in tiles.values() if tile is not None]
    found = []
    for launch in made:
        if launch.tile in wanted:
            resources = compiler.compile_launch(launch)
            found.append((launch.kernel.fn.__name__, launch.tile, resources.spilled, resources.shared))
    assert {tile for _, tile, *_ in found} == set(wanted)
    return found


@pytest.mark.parametrize(
    ("key", "tiles"),
    [(k, t) for k, t in TUNED + PACKAGED if t],
    ids=lambda a: dict(a)["choice"] if isinstance(a, tuple) else "",
)
def test_tuned_tiles_do_not_spill_and_need_no_more_than_is_reckoned(worker, key, tiles):
    """What a file may ask for is bounded by a formula, so that no tile is too large to be launched."""
    sizes = dict(key)
    choice = tuning.CHOICES[sizes["choice"]]
    for kernel, tile, spilled, shared in worker.submit(compile_tuned, key, tiles).result():
        names = [name for name, t in tiles.items() if t == tile]
        reckoned = max(choice.shared(name, tile, sizes) for name in names)
        assert spilled == 0, (kernel, tile)
        # A reduction takes 4 bytes a row and warp, twice, beside it.
        limit = SHARED_LIMIT[ALL_CHIPS[sizes["chip"]].capability]
        assert shared <= min(reckoned + 8 * tile.rows * tile.warps + 64, limit), (kernel, tile)

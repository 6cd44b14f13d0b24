"""Tiles that were measured on a chip, from JSON files; where there is one it goes before the heuristics of `config`.

A file is {"schema": 1, "entries": [...]}, and an entry

    {"choice": "backward", "chip": "h200", "h": 4096, "layout": "last axis", "itemsize": 2, "mixed": false,
     "wants_y": false, "tiles": {"tile": {"rows": 1, "columns": 4096, ...}, "sums": null}, "measured": {...}}

with "tiles" null where nothing measured was faster than the heuristics, and in "measured" where the numbers are from.
No choice depends on the number of rows, so a row's result does not either. Whatever is wrong with a file is said once,
in a warning, and what is wrong is ignored: a choice decides how fast a result comes, never which.

The file that JLN_TUNING names goes first, then the package's own for the chip; JLN_TUNING set to nothing is the
heuristics alone. There is no file that is found without being named: one that somebody left in a home directory would
change the last bits of results for no reason to be seen.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import stat
import threading
import warnings
from collections.abc import Iterator
from typing import Any

from jln._triton import config
from jln._triton.compiler import SHARED_LIMIT
from jln._triton.config import BackwardPlan, Chip, FusedBackward, Tile

SCHEMA = 1
VARIABLE = "JLN_TUNING"
LARGEST = 2**22  # bytes of a file, some 3000 entries as `tune` writes them
PACKAGED = pathlib.Path(__file__).parent / "tuned"

# From the name of each to its value, sorted: what a choice may depend on.
Key = tuple[tuple[str, Any], ...]
# None for a kernel that is not launched.
Tiles = dict[str, Tile | None]

_NORM = {"choice": str, "chip": str, "h": int, "layout": str, "itemsize": int, "mixed": bool}
_FUSED = {"choice": str, "chip": str, "h": int, "n": int, "dtype": str}
# By choice: what it depends on, and the kernels whose tiles it is.
CHOICES: dict[str, tuple[dict[str, type], tuple[str, ...]]] = {
    "forward": (_NORM, ("tile",)),
    "backward": (_NORM | {"wants_y": bool}, ("tile", "sums")),
    "fused_forward": (_FUSED, ("tile",)),
    "fused_backward": (_FUSED, ("row_sums", "backward")),
}
LAYOUTS = ("last axis", "other axis", "other axis, unaligned")


def forward(h: int, inner: int, itemsize: int, mixed: bool, chip: Chip) -> Tile:
    """As `config.forward_tile`."""
    key = _norm_key("forward", h, inner, itemsize, mixed, chip)
    tile = _chosen(key, {"tile": config.forward_tile(h, inner, itemsize, mixed)}, chip, inner)["tile"]
    assert tile is not None
    return tile


def backward(h: int, inner: int, itemsize: int, mixed: bool, wants_y: bool, chip: Chip) -> BackwardPlan:
    """As `config.backward_plan`."""
    plan = config.backward_plan(h, inner, itemsize, mixed, wants_y=wants_y)
    key = _norm_key("backward", h, inner, itemsize, mixed, chip, wants_y=wants_y)
    chosen = _chosen(key, {"tile": plan.tile, "sums": plan.sums}, chip, inner)
    assert chosen["tile"] is not None
    return BackwardPlan(chosen["tile"], chosen["sums"])


def fused_forward(rows: int, h: int, n: int, product_dtype: str, chip: Chip) -> Tile | None:
    """As `config.fused_forward`, which alone decides whether it is fused."""
    tile = config.fused_forward(rows, h, n, product_dtype, chip)
    if tile is None:
        return None
    return _chosen(_fused_key("fused_forward", h, n, product_dtype, chip), {"tile": tile}, chip)["tile"]


def fused_backward(rows: int, h: int, n: int, product_dtype: str, chip: Chip) -> FusedBackward | None:
    """As `config.fused_backward`, which alone decides whether it is fused."""
    tiles = config.fused_backward_tiles(h, n, product_dtype, chip)
    if tiles is None:
        return None
    key = _fused_key("fused_backward", h, n, product_dtype, chip)
    chosen = _chosen(key, {"row_sums": tiles[0], "backward": tiles[1]}, chip)
    assert chosen["row_sums"] is not None and chosen["backward"] is not None
    return config.fused_backward_grid(rows, h, n, chip, chosen["row_sums"], chosen["backward"])


def chip_name(chip: Chip) -> str:
    """Under which its measurements are: "h200" for "NVIDIA H200", and for "NVIDIA H200 NVL" too."""
    words = chip.name.lower().replace("-", " ").split()
    known = [word for word in words if word in config.CHIPS]
    return known[0] if known else "-".join(word for word in words if word != "nvidia")


def _key(**values: Any) -> Key:
    return tuple(sorted(values.items()))


def _norm_key(choice: str, h: int, inner: int, itemsize: int, mixed: bool, chip: Chip, **more: Any) -> Key:
    layout = LAYOUTS[0] if inner == 1 else LAYOUTS[1 if inner * itemsize % 16 == 0 else 2]
    return _key(choice=choice, chip=chip_name(chip), h=h, layout=layout, itemsize=itemsize, mixed=mixed, **more)


def _fused_key(choice: str, h: int, n: int, dtype: str, chip: Chip) -> Key:
    return _key(choice=choice, chip=chip_name(chip), h=h, n=n, dtype=dtype)


@dataclasses.dataclass
class Trial:
    """tiles: to be taken. asked: what was asked for, with what the heuristics say."""

    tiles: dict[Key, Tiles]
    asked: dict[Key, Tiles] = dataclasses.field(default_factory=dict)


_trial: contextvars.ContextVar[Trial | None] = contextvars.ContextVar("jln_trial", default=None)


@contextlib.contextmanager
def trying(tiles: dict[Key, Tiles]) -> Iterator[Trial]:
    """Take these, else the heuristics, whatever the files say; for the search."""
    trial = Trial(tiles)
    token = _trial.set(trial)
    try:
        yield trial
    finally:
        _trial.reset(token)


def _chosen(key: Key, heuristic: Tiles, chip: Chip, inner: int = 1) -> Tiles:
    if (trial := _trial.get()) is not None:
        trial.asked[key] = heuristic
        return trial.tiles.get(key, heuristic)
    for path in _files(chip):
        entries = _read(path)
        if key in entries:
            tiles = entries[key] or heuristic
            # Where fewer rows than a tile's lie side by side, most of it would be nobody's.
            wasteful = inner > 1 and any(t is not None and t.rows >= 2 * inner for t in tiles.values())
            return heuristic if wasteful else tiles
    return heuristic


def _files(chip: Chip) -> list[pathlib.Path]:
    """In the order in which they are asked."""
    named = os.environ.get(VARIABLE)
    if named == "":
        return []
    packaged = PACKAGED / f"{chip_name(chip)}.json"
    users = [pathlib.Path(os.path.expanduser(named))] if named else []
    return [*users, packaged] if packaged.exists() else users


def in_force(chip: Chip) -> list[dict[str, Any]]:
    """The files that are asked for this chip, with how many choices each has for it, what it is known by, and what of
    it is ignored.
    """
    found = []
    for path in _files(chip):
        content = _bytes(path)
        with _lock:
            entries, faults = _parsed(content)
        found.append(
            {
                "file": str(path),
                "choices": sum(dict(key)["chip"] == chip_name(chip) for key in entries),
                "sha256": hashlib.sha256(content).hexdigest()[:12] if isinstance(content, bytes) else None,
                "ignored": faults,
            }
        )
    return found


_lock = threading.Lock()
_said: set[tuple[pathlib.Path, bytes | str]] = set()


def _read(path: pathlib.Path) -> dict[Key, Tiles | None]:
    """What is sound in the file, as it is now; what is not, in a warning, once."""
    content = _bytes(path)
    with _lock:
        entries, faults = _parsed(content)
        news = bool(faults) and (path, content) not in _said
        if news:
            _said.add((path, content))
    if news:
        more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
        warnings.warn(f"jln ignores of its tuning file {path}: {'; '.join(faults[:3])}{more}", stacklevel=2)
    return entries


def _bytes(path: pathlib.Path) -> bytes | str:
    """The file's content, or why there is none. It does not wait, and reads no more than LARGEST."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # asked before it is opened: a pipe would wait for its writer
            return "it is no regular file"
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            return file.read(size) if size <= LARGEST else f"it has more than {LARGEST} bytes"
    except (OSError, ValueError) as error:  # the latter of a name that no file can have
        return str(error)


@functools.lru_cache(maxsize=32)
def _parsed(content: bytes | str) -> tuple[dict[Key, Tiles | None], list[str]]:
    """-> (its entries, what is wrong with it). By the content: a file's times may not tell one from the next."""
    try:
        listed = loaded(content)["entries"]
    except (ValueError, RecursionError) as error:
        return {}, [f"all of it: {' '.join(str(error).split())}"]
    entries, faults = {}, []
    for i, entry in enumerate(listed):
        try:
            key, tiles = parsed(entry)
        except ValueError as error:
            faults.append(f"entry {i}: {error}")
        else:
            entries[key] = tiles
    return entries, faults


def loaded(content: bytes | str) -> dict[str, Any]:
    """Raises ValueError where it is no tuning file's, or (a str) only the reason why it could not be read."""
    if isinstance(content, str):
        raise ValueError(content)
    found = json.loads(content)
    if not isinstance(found, dict) or not isinstance(found.get("entries"), list):
        raise ValueError("it is no tuning file")
    if found.get("schema") != SCHEMA:
        raise ValueError(f"its schema is {found.get('schema')!r}, this version's is {SCHEMA}")
    return found


def load(path: pathlib.Path) -> dict[str, Any]:
    """The file's content. Raises ValueError with the reason where that is none."""
    return loaded(_bytes(path))


def parsed(entry: Any) -> tuple[Key, Tiles | None]:
    """Raises ValueError where it is no choice, or one that a kernel cannot run."""
    if not isinstance(entry, dict) or entry.get("choice") not in tuple(CHOICES):
        raise ValueError(f"its choice is not one of {', '.join(CHOICES)}")
    fields, names = CHOICES[entry["choice"]]
    for name, kind in fields.items():
        if type(entry.get(name)) is not kind:
            raise ValueError(f"{name} is {entry.get(name)!r}, not of type {kind.__name__}")
    key = _key(**{name: entry[name] for name in fields})
    given = entry.get("tiles", {})
    if given is None:
        return key, None
    if not isinstance(given, dict) or set(given) != set(names):
        raise ValueError(f"its tiles are not of {', '.join(names)}")
    tiles = {name: None if given[name] is None else _tile(given[name]) for name in names}
    if (fault := unfit(key, tiles)) is not None:
        raise ValueError(fault)
    return key, tiles


def _tile(given: Any) -> Tile:
    names = {field.name for field in dataclasses.fields(Tile)}
    if not isinstance(given, dict) or set(given) != names or any(type(n) is not int for n in given.values()):
        raise ValueError(f"a tile is not of whole numbers for {', '.join(sorted(names))}")
    return Tile(**given)


def unfit(key: Key, tiles: Tiles) -> str | None:
    """Why kernels cannot run these, or only by accident; None where they can."""
    sizes = dict(key)
    fused = "n" in sizes
    features = config.features(sizes["n"]) if fused else 0
    least = 16 if fused else 1  # of a side of `tl.dot`
    for name, tile in tiles.items():
        if tile is None:
            if name != "sums":
                return f"there is no {name}"
            continue
        for what, number, low, high in (
            ("rows", tile.rows, least, 2**14),
            ("columns", tile.columns, least, 2**16),
            ("warps", tile.warps, 1, 32),
        ):
            if number != config.next_power_of_2(number) or not low <= number <= high:
                return f"{name}'s {what} are {number}, which is no power of 2 from {low} to {high}"
        for what, number, high in (("stages", tile.stages, 8), ("programs_per_sm", tile.programs_per_sm, 16)):
            if not 1 <= number <= high:
                return f"{name}'s {what} are {number}, which is not from 1 to {high}"
        held = max(tile.rows * tile.columns, tile.rows * features, tile.columns * features)
        if held > 128 * 32 * tile.warps:  # of 255 registers
            return f"{name} gives each thread {held // (32 * tile.warps)} elements to hold, more than 128"
        if (shared := _shared_bytes(name, tile, sizes, features)) > (limit := SHARED_LIMIT[_capability(sizes["chip"])]):
            return f"{name} may need {shared} bytes of shared memory, of which there are {limit}"
    tile = tiles.get("tile")
    if sizes["choice"] == "backward" and tile is not None and tiles["sums"] is None and sizes["h"] > 8 * tile.columns:
        return f"{tile.columns} columns are too few of {sizes['h']}: each of a row's programs reads the whole row"
    return None


def _shared_bytes(name: str, tile: Tile, sizes: dict[str, Any], features: int) -> int:
    """About what the compiler takes, and no less but for some reductions' few bytes (tests/test_compiler.py).

    Of norms what is read in a loop, a stage ahead: arrays of rows, the rows' mean, rstd, c1 and c2 where it is a loop
    over rows, and of parameters y's offset, or scale and offset of each chunk; or one array that changes its layout, in
    their place. Of the fused kernels every stage, two where it is one, as dy has two layouts, and the operand that
    stays: of `backward_kernel` the kernel, of the others a tile of dy, which mma wants in registers and so passes
    through there before the last stage is full.
    """
    elements = tile.rows * tile.columns
    if not features:
        itemsize, y = sizes["itemsize"], sizes.get("wants_y", True)
        vectors = 2 if tile.columns < sizes["h"] else int(sizes.get("wants_y", False))
        numbers = vectors * tile.columns
        if sizes["choice"] == "backward" and name == "tile":
            numbers += (4 if tile.columns < sizes["h"] else 2) * tile.rows
        ahead = (2 if y else 3) * elements * itemsize + numbers * max(4, itemsize)
        return max((tile.stages - 1) * ahead, elements * itemsize)
    staged, operand = elements + tile.columns * features, tile.rows * features
    if name == "backward":
        staged, operand = elements + operand, tile.columns * features
    taken = max(2, tile.stages) * staged + operand
    if name != "backward" and _capability(sizes["chip"]) < 90:
        taken = max(taken - operand, (tile.stages - 1) * staged + operand + elements)
    return taken * (4 if sizes["dtype"] == "float32" else 2)


def _capability(chip: str) -> int:
    """Of a chip that is not known the newest, of which most is asked."""
    return config.CHIPS[chip].capability if chip in config.CHIPS else max(SHARED_LIMIT)

"""Tiles that a card has measured, which go before the rules of `jln._junction.tiles`: a JSON file of a chip.

    {"chip": "h100", "versions": {"jln": "0.2.0", "triton": "3.9.0"}, "entries": [
      {"choice": "forward", "h": [4096, 5120], "itemsize": 2, "tiles": [[2, 4096, 8, 5, 1]], "mb_per_s": 3790000},
      {"choice": "backward", "h": [16384], "itemsize": 2, "tiles": [[2, 4096, 16, 3, 1], [2, 2048, 8, 3, 1]]}]}

An entry is of norms of one array, whose rows have these lengths and elements of `itemsize` bytes. A tile has `Tile`'s
numbers: of `forward_kernel`, or of `backward_kernel` and, where rows are wider, of `row_sums_kernel`. JLN_TUNING names
the file, and a file with a fault is left out.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import re
import warnings

from jln._triton.chip import CHIPS, Chip
from jln._triton.tile import Tile, next_power_of_2

VARIABLE = "JLN_TUNING"


def chip_name(chip: Chip) -> str:
    """The name of a chip in measurements: "h200" for "NVIDIA H200 NVL", "mi250x" for "AMD Instinct MI250X / MI250"."""
    words = re.findall(r"[a-z0-9]+", chip.name.lower())
    return next((word for word in words if word in CHIPS), "-".join(word for word in words if word != "nvidia"))


def entries(chip: Chip) -> dict[tuple[str, int, int], tuple[Tile, ...]]:
    """The entries of the file, as it is now, by choice, row length and bytes of an element."""
    if not (path := os.environ.get(VARIABLE)):
        return {}
    try:
        return _parse(pathlib.Path(path).expanduser().read_text(), chip_name(chip))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        _warn(f"jln leaves out its tuning file {path}: {type(error).__name__}: {error}")
        return {}


@functools.lru_cache(maxsize=8)
def _parse(content: str, chip: str) -> dict[tuple[str, int, int], tuple[Tile, ...]]:
    document = json.loads(content)
    if document["chip"] != chip:
        raise ValueError(f"it is of the chip {document['chip']!r}, and this one is {chip!r}")
    found = {}
    for number, entry in enumerate(document["entries"]):
        tiles = tuple(Tile(*numbers) for numbers in entry["tiles"])
        for h in entry["h"]:
            if (fault := _fault(entry["choice"], h, entry["itemsize"], tiles)) is not None:
                raise ValueError(f"entry {number}: {fault}")
            found[entry["choice"], h, entry["itemsize"]] = tiles
    return found


def _fault(choice: str, h: int, itemsize: int, tiles: tuple[Tile, ...]) -> str | None:
    """The reason why the kernels cannot run these tiles, or would give other results; None where they are sound."""
    if not tiles or len(tiles) > {"forward": 1, "backward": 2}.get(choice, 0):
        return f"{choice!r} has {len(tiles)} tiles"
    if any(type(n) is not int for n in (h, itemsize, *(n for tile in tiles for n in dataclasses.astuple(tile)))):
        return "it has what is no int where one belongs"
    for tile in tiles:
        sizes = [tile.rows, tile.columns, tile.warps]
        if [next_power_of_2(n) for n in sizes] != sizes or min(tile.stages, tile.programs_per_core) < 1:
            return f"{tile} has numbers that it cannot have"
        if tile.warps > 32 or tile.rows * tile.columns > 128 * 32 * tile.warps:  # a thread has 255 registers
            return f"{tile} is too large"
    if choice == "backward" and len(tiles) == 1 and h > tiles[0].columns:
        return f"{tiles[0].columns} columns of {h} have no row sums without a tile for them"
    return None


@functools.lru_cache(maxsize=8)  # so that it is said once
def _warn(what: str) -> None:
    warnings.warn(what, stacklevel=2)

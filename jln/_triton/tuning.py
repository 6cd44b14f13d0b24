"""Tiles that a card has measured, which go before the rules of `jln._junction.tiles`: one JSON file a chip.

    {"chip": "h100", "versions": {"jln": "0.2.0", "triton": "3.9.0"}, "entries": [
      {"choice": "forward", "h": [4096, 5120], "itemsize": 2, "tiles": [[2, 4096, 8, 5, 1]], "mb_per_s": 3790000},
      {"choice": "backward", "h": [16384], "itemsize": 2, "tiles": [[2, 4096, 16, 3, 1], [2, 2048, 8, 3, 1]]}]}

An entry is of norms of one array, whose rows have these lengths and elements of `itemsize` bytes. A tile has `Tile`'s
numbers: of `forward_kernel`, or of `backward_kernel` and, where rows are wider, of `row_sums_kernel`. JLN_TUNING names
the file; unset, it is the package's own of the chip; set to nothing, there is none. What is wrong is said and left out.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import re
import warnings

from jln._triton.chip import CHIPS, Chip
from jln._triton.tile import Tile

VARIABLE = "JLN_TUNING"
PACKAGED = pathlib.Path(__file__).parent / "tuned"
POWERS = [2**n for n in range(17)]
NUMBERS = dict(rows=POWERS, columns=POWERS, warps=POWERS[:6], stages=range(1, 9), programs_per_core=range(1, 17))


def chip_name(chip: Chip) -> str:
    """The name of a chip in measurements: "h200" for "NVIDIA H200 NVL", "mi250x" for "AMD Instinct MI250X / MI250"."""
    words = re.findall(r"[a-z0-9]+", chip.name.lower())
    return next((word for word in words if word in CHIPS), "-".join(word for word in words if word != "nvidia"))


def file(chip: Chip) -> pathlib.Path | None:
    """The file that is asked for a chip."""
    packaged = PACKAGED / f"{chip_name(chip)}.json"
    named = os.environ.get(VARIABLE, str(packaged) if packaged.exists() else "")
    return pathlib.Path(os.path.expanduser(named)) if named else None


def entries(chip: Chip) -> dict[tuple[str, int, int], tuple[Tile, ...]]:
    """The sound entries of the file for a chip, as it is now, by choice, row length and bytes of an element."""
    path = file(chip)
    try:
        if path is not None and path.exists() and not path.is_file():
            raise ValueError("it is no regular file")
        return {} if path is None else _parsed(path, path.read_bytes(), chip_name(chip))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        _warn(path, f"{type(error).__name__}: {error}")
        return {}


@functools.lru_cache(maxsize=8)
def _parsed(path: pathlib.Path, content: bytes, chip: str) -> dict[tuple[str, int, int], tuple[Tile, ...]]:
    found, faults, document = {}, [], json.loads(content)
    if document["chip"] != chip:
        raise ValueError(f"it is of the chip {document['chip']!r}, and this one is {chip!r}")
    for number, entry in enumerate(document["entries"]):
        try:
            tiles = tuple(Tile(*numbers) for numbers in entry["tiles"])
            found |= {_key(entry["choice"], h, entry["itemsize"], tiles): tiles for h in entry["h"]}
        except (ValueError, KeyError, TypeError) as error:
            faults.append(f"entry {number}: {type(error).__name__}: {error}")
    if faults:
        _warn(path, "; ".join([*faults[:3], *([f"and {len(faults) - 3} more"] if len(faults) > 3 else [])]))
    return found


@functools.lru_cache(maxsize=8)  # so that it is said once
def _warn(path: pathlib.Path | None, what: str) -> None:
    warnings.warn(f"jln leaves out of its tuning file {path}: {what}", stacklevel=2)


def _key(choice: str, h: int, itemsize: int, tiles: tuple[Tile, ...]) -> tuple[str, int, int]:
    """Return what tiles are for. Raises ValueError where the kernels cannot run them, or only by accident."""
    if type(h) is not int or h < 1 or itemsize not in (2, 4, 8):
        raise ValueError(f"there are no rows of {h!r} elements of {itemsize!r} bytes")
    if (choice, len(tiles)) not in (("forward", 1), ("backward", 1), ("backward", 2)):
        raise ValueError(f"{choice!r} has {len(tiles)} tiles")
    for tile in tiles:
        for name, number in vars(tile).items():
            if type(number) is not int or number not in NUMBERS[name]:
                raise ValueError(f"{name} cannot be {number!r}")
        if tile.rows * tile.columns > 128 * 32 * tile.warps:  # a thread has 255 registers
            raise ValueError(f"a thread of {tile} would hold more than 128 elements")
    if choice == "backward" and len(tiles) == 1 and h > tiles[0].columns:
        raise ValueError(f"{tiles[0].columns} columns of {h} have no row sums without a tile for them")
    return choice, h, itemsize

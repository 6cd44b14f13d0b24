"""Tiles that were measured on a chip, from JSON files; where there is one it goes before the rules of an operator.

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

import collections
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import re
import threading
import warnings
from collections.abc import Callable
from typing import Any

from jln._triton import files
from jln._triton.chip import CHIPS, Chip
from jln._triton.tile import Tile, next_power_of_2

SCHEMA = 1
VARIABLE = "JLN_TUNING"
LARGEST = 2**22  # bytes of the largest file that is read, some 3000 entries as `tune` writes them
PACKAGED = pathlib.Path(__file__).parent / "tuned"

# All that a choice may depend on, as sorted pairs of a name and its value.
Key = tuple[tuple[str, Any], ...]
# The tiles of kernels by the kernels' names, None for a kernel that is not launched.
Tiles = dict[str, Tile | None]


@dataclasses.dataclass(frozen=True)
class Choice:
    """A choice that a measurement may settle: the tiles of the kernels that are launched together.

    name: in the files. fields: what the choice depends on beside the chip. kernels: whose tiles it is. optional: of
      these the kernels that may not be launched. least: of a tile's sides. Of a kernel's tile, at the sizes that the
      choice depends on, held: the elements that a program keeps in registers at once; shared: the bytes of shared
      memory that it may need; free: the numbers that mean something to it, and are not settled. others: what else a
      search may try. fault: why these tiles cannot run together, None where they can.
    """

    name: str
    fields: dict[str, type]
    kernels: tuple[str, ...]
    held: Callable[[Tile, dict[str, Any]], int]
    shared: Callable[[str, Tile, dict[str, Any]], int]
    free: Callable[[str, Tile, dict[str, Any]], tuple[str, ...]]
    others: Callable[[Tiles, dict[str, Any]], list[Tiles]] = lambda tiles, sizes: []
    fault: Callable[[Tiles, dict[str, Any]], str | None] = lambda tiles, sizes: None
    optional: tuple[str, ...] = ()
    least: int = 1

    def __post_init__(self):
        CHOICES[self.name] = self

    def tiles(self, trial: Trial | None, rules: Tiles, chip: Chip, rows_side_by_side: int = 1, **sizes: Any) -> Tiles:
        """The tiles of a trial, or those of the files, else `rules`."""
        key = _key(choice=self.name, chip=chip_name(chip), **sizes)
        if trial is not None:
            trial.asked[key] = rules
            return trial.tiles.get(key, rules)
        for path in _files(chip):
            entries = _read(path)
            if key in entries:
                tiles = entries[key] or rules
                # Where a tile has at least twice as many rows as lie side by side, much of it would be empty.
                few = rows_side_by_side
                wasteful = few > 1 and any(t is not None and t.rows >= 2 * few for t in tiles.values())
                return rules if wasteful else tiles
        return rules

    def unfit(self, sizes: dict[str, Any], tiles: Tiles) -> str | None:
        """The reason why kernels cannot run these tiles, or only by accident; None where they can."""
        for name, tile in tiles.items():
            if tile is None:
                if name not in self.optional:
                    return f"there is no {name}"
                continue
            for what, number, low, high in (
                ("rows", tile.rows, self.least, 2**14),
                ("columns", tile.columns, self.least, 2**16),
                ("warps", tile.warps, 1, 32),
            ):
                if number != next_power_of_2(number) or not low <= number <= high:
                    return f"{name}'s {what} are {number}, which is no power of 2 from {low} to {high}"
            for what, number, high in (("stages", tile.stages, 8), ("programs_per_core", tile.programs_per_core, 16)):
                if not 1 <= number <= high:
                    return f"{name}'s {what} are {number}, which is not from 1 to {high}"
            held = self.held(tile, sizes)
            if held > 128 * 32 * tile.warps:  # a thread has 255 registers
                return f"{name} gives each thread {held // (32 * tile.warps)} elements to hold, more than 128"
            shared, limit = self.shared(name, tile, sizes), known_or_newest(sizes["chip"]).shared
            if shared > limit:
                return f"{name} may need {shared} bytes of shared memory, of which there are {limit}"
        return self.fault(tiles, sizes)


# All choices by their names; each operator's room adds its own.
CHOICES: dict[str, Choice] = {}


@dataclasses.dataclass
class Trial:
    """Tiles to be taken whatever the files say, with a note of the choices asked for and the answers of the rules."""

    tiles: dict[Key, Tiles]
    asked: dict[Key, Tiles] = dataclasses.field(default_factory=dict)


def _key(**values: Any) -> Key:
    return tuple(sorted(values.items()))


def unfit(key: Key, tiles: Tiles) -> str | None:
    """The reason why kernels cannot run these tiles of the choice that `key` names; None where they can."""
    sizes = dict(key)
    return CHOICES[sizes["choice"]].unfit(sizes, tiles)


def chip_name(chip: Chip) -> str:
    """The name of a chip in measurements.

    "h200" for "NVIDIA H200", and for "NVIDIA H200 NVL" too; "mi250x" for "AMD Instinct MI250X / MI250".
    """
    words = re.findall(r"[a-z0-9]+", chip.name.lower())
    known = [word for word in words if word in CHIPS]
    return known[0] if known else "-".join(word for word in words if word != "nvidia")


def _files(chip: Chip) -> list[pathlib.Path]:
    """The tuning files for a chip, in the order in which they are asked."""
    named = os.environ.get(VARIABLE)
    if named == "":
        return []
    packaged = PACKAGED / f"{chip_name(chip)}.json"
    users = [pathlib.Path(os.path.expanduser(named))] if named else []
    return [*users, packaged] if packaged.exists() else users


def in_force(chip: Chip) -> list[dict[str, Any]]:
    """The files that are asked for this chip.

    Each with how many choices it has for the chip, in how many of them nothing was faster than the rule, the versions
    of jln by which they were measured, how many choices it has for other chips by name, a hash of its content, and what
    in it is ignored.
    """
    files = []
    for path in _files(chip):
        content = _bytes(path)
        with _lock:
            entries, faults = _parsed(content)
        of_chips = collections.Counter(dict(key)["chip"] for key in entries)
        files.append(
            {
                "file": str(path),
                "choices": of_chips.pop(chip_name(chip), 0),
                "by_the_rule": sum(
                    tiles is None and dict(k)["chip"] == chip_name(chip) for k, tiles in entries.items()
                ),
                "versions": _measured_by(content, chip_name(chip)) if entries else [],
                "other_chips": dict(sorted(of_chips.items())),
                "sha256": hashlib.sha256(content).hexdigest()[:12] if isinstance(content, bytes) else None,
                "ignored": faults,
            }
        )
    return files


def _measured_by(content: bytes | str, chip: str) -> list[str]:
    """The versions of jln that measured a file's entries for a chip, sorted; "unknown" where an entry does not say."""
    found = set()
    for entry in loaded(content)["entries"]:
        if isinstance(entry, dict) and entry.get("chip") == chip:
            measured = entry.get("measured")
            versions = measured.get("versions") if isinstance(measured, dict) else None
            found.add(str(versions.get("jln", "unknown")) if isinstance(versions, dict) else "unknown")
    return sorted(found)


_lock = threading.Lock()
_said: set[tuple[pathlib.Path, bytes | str]] = set()


def _read(path: pathlib.Path) -> dict[Key, Tiles | None]:
    """The sound entries of the file, as it is now; of the others a warning tells, once."""
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
    """The file's content, or the reason why there is none."""
    return files.content(path, LARGEST)


@functools.lru_cache(maxsize=32)
def _parsed(content: bytes | str) -> tuple[dict[Key, Tiles | None], list[str]]:
    """Return a file's entries and what is wrong with it.

    They are remembered by content: a file's times may not tell one content from the next.
    """
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
    """The JSON object in the content of a tuning file.

    Raises ValueError where it is no such content, or (a str) only the reason why the file could not be read.
    """
    if isinstance(content, str):
        raise ValueError(content)
    document = json.loads(content)
    if not isinstance(document, dict) or not isinstance(document.get("entries"), list):
        raise ValueError("it is no tuning file")
    if document.get("schema") != SCHEMA:
        raise ValueError(f"its schema is {document.get('schema')!r}, this version's is {SCHEMA}")
    return document


def load(path: pathlib.Path) -> dict[str, Any]:
    """The content of a tuning file. Raises ValueError with the reason where there is none."""
    return loaded(_bytes(path))


def parsed(entry: Any) -> tuple[Key, Tiles | None]:
    """The key and the tiles of an entry. Raises ValueError where it is no choice, or one that a kernel cannot run."""
    if not isinstance(entry, dict) or entry.get("choice") not in tuple(CHOICES):
        raise ValueError(f"its choice is not one of {', '.join(CHOICES)}")
    choice = CHOICES[entry["choice"]]
    fields, names = {"chip": str, **choice.fields}, choice.kernels
    for name, kind in fields.items():
        if type(entry.get(name)) is not kind:
            raise ValueError(f"{name} is {entry.get(name)!r}, not of type {kind.__name__}")
    key = _key(choice=choice.name, **{name: entry[name] for name in fields})
    numbers = entry.get("tiles", {})
    if numbers is None:
        return key, None
    if not isinstance(numbers, dict) or set(numbers) != set(names):
        raise ValueError(f"its tiles are not of {', '.join(names)}")
    tiles = {name: None if numbers[name] is None else _tile(numbers[name]) for name in names}
    if (fault := unfit(key, tiles)) is not None:
        raise ValueError(fault)
    return key, tiles


def _tile(numbers: Any) -> Tile:
    names = {field.name for field in dataclasses.fields(Tile)}
    if not isinstance(numbers, dict) or set(numbers) != names or any(type(n) is not int for n in numbers.values()):
        raise ValueError(f"a tile is not of whole numbers for {', '.join(sorted(names))}")
    return Tile(**numbers)


def known_or_newest(chip: str) -> Chip:
    """The chip by the name of its measurements; for an unknown name its maker's newest, of which most is asked."""
    return CHIPS.get(chip, CHIPS["mi355x" if chip.startswith("amd-") else "b200"])

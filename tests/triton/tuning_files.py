"""Files of tuned tiles, as tests write them."""

from __future__ import annotations

import dataclasses
import json

from jln._triton import tuning


def entry(choice, tiles, chip="interpreter", **sizes):
    numbers = {n: None if t is None else dataclasses.asdict(t) for n, t in tiles.items()} if tiles else tiles
    return {"choice": choice, "chip": chip, **sizes, "tiles": numbers}


def norm(choice, tiles, h=128, itemsize=2, layout="last axis", chip="h200", **more):
    return entry(choice, tiles, chip=chip, h=h, layout=layout, itemsize=itemsize, mixed=False, **more)


def write(path, *entries):
    path.write_text(json.dumps({"schema": tuning.SCHEMA, "entries": entries}))
    return path

"""Kernels and launchers broken on purpose, in this process."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import pathlib
import sys
import tempfile
from unittest import mock

# Where else a module is known, by an attribute of another one.
KNOWN = {
    "jln._junction.kernels.with_linear": [("jln._junction.linears.launches", "with_linear")],
    "jln._junction.kernels.with_linear_backward": [("jln._junction.linears.launches", "kernels")],
    "jln._junction.launches": [("jln._junction.linears.launches", "norms")],
}


# Who has taken functions out of a module, and must do so again.
_LAUNCHES = "jln._junction.launches"
_NAMES = ("forward", "backward", "with_linear", "with_linear_backward")
_KERNELS = [f"jln._junction.kernels.{name}" for name in _NAMES]
USERS = {name: [_LAUNCHES] for name in (*_KERNELS[:2], "jln._junction.geometry")}
_ROW_TERMS = "jln._junction.kernels.row_terms"
_RECORDS = "jln._junction.kernels.records"
USERS |= {f"jln._junction.kernels.{name}": [_ROW_TERMS, *_KERNELS, _LAUNCHES] for name in ("records", "terms")}
USERS["jln._junction.kernels.addresses"] = [_RECORDS, *USERS[_RECORDS]]
USERS[_ROW_TERMS] = [*_KERNELS[1:], _LAUNCHES]


@contextlib.contextmanager
def broken(name: str, old: str, new: str):
    """Replace the module of this name, while the context is open, by one with `new` for `old`, there exactly once."""
    original = pathlib.Path(importlib.import_module(name).__file__)
    text = original.read_text()
    assert text.count(old) == 1, f"{text.count(old)} times in {name}: {old!r}"
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as patches:
        path = pathlib.Path(folder, original.name)
        path.write_text(text.replace(old, new))  # Triton reads a kernel's source from its file
        patches.enter_context(loaded(name, path))
        for user in USERS.get(name, ()):
            patches.enter_context(loaded(user, importlib.import_module(user).__file__))
        yield


@contextlib.contextmanager
def loaded(name: str, path: str | pathlib.Path):
    """Replace the module of this name, while the context is open, by what that file holds."""
    package, _, last = name.rpartition(".")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.dict(sys.modules, {name: module}))
        spec.loader.exec_module(module)
        for user, attribute in [(package, last), *KNOWN.get(name, ())]:
            patches.enter_context(mock.patch.object(importlib.import_module(user), attribute, module))
        yield

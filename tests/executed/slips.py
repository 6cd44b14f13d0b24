"""Kernels and launchers broken on purpose, in this process."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import pathlib
import sys
import tempfile
from unittest import mock

# Where else a module of jln._triton is known, by an attribute of another one.
KNOWN = {
    "layer_norm_kernels": [("layer_norm", "kernels")],
    "layer_norm_linear_kernels": [("layer_norm_linear", "kernels")],
    "layer_norm": [("layer_norm_linear", "norm")],
}


@contextlib.contextmanager
def broken(file: str, old: str, new: str):
    """While the context is open, `file` (jln/_triton/*.py) is one in which `old`, there exactly once, is `new`."""
    name = pathlib.Path(file).stem
    package = importlib.import_module("jln._triton")
    original = importlib.import_module(f"jln._triton.{name}")
    text = pathlib.Path(original.__file__).read_text()
    assert text.count(old) == 1, f"{text.count(old)} times in {file}: {old!r}"
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as patches:
        path = pathlib.Path(folder, f"{name}.py")
        path.write_text(text.replace(old, new))  # Triton reads a kernel's source from its file
        spec = importlib.util.spec_from_file_location(f"jln._triton.{name}", path)
        module = importlib.util.module_from_spec(spec)
        patches.enter_context(mock.patch.dict(sys.modules, {spec.name: module}))
        spec.loader.exec_module(module)
        patches.enter_context(mock.patch.object(package, name, module))
        for user, attribute in KNOWN.get(name, ()):
            patches.enter_context(mock.patch.object(importlib.import_module(f"jln._triton.{user}"), attribute, module))
        yield

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
    "jln._norm.kernels": [("jln._norm.launcher", "kernels")],
    "jln._norm_linear.kernels": [("jln._norm_linear.launcher", "kernels")],
    "jln._norm.launcher": [("jln._norm_linear.launcher", "norms")],
}


@contextlib.contextmanager
def broken(name: str, old: str, new: str):
    """While the context is open, the module of this name is one in which `old`, there exactly once, is `new`."""
    package, _, last = name.rpartition(".")
    original = importlib.import_module(name)
    text = pathlib.Path(original.__file__).read_text()
    assert text.count(old) == 1, f"{text.count(old)} times in {name}: {old!r}"
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as patches:
        path = pathlib.Path(folder, f"{last}.py")
        path.write_text(text.replace(old, new))  # Triton reads a kernel's source from its file
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        patches.enter_context(mock.patch.dict(sys.modules, {name: module}))
        spec.loader.exec_module(module)
        for user, attribute in [(package, last), *KNOWN.get(name, ())]:
            patches.enter_context(mock.patch.object(importlib.import_module(user), attribute, module))
        yield

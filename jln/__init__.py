"""LayerNorm and RMSNorm for JAX, as custom_vjp operators whose rules are Triton kernels on NVIDIA GPUs."""

import importlib as _importlib
from types import ModuleType as _ModuleType

from jln import _operators, reference
from jln._core.derivatives import PRODUCT, STATISTICS
from jln._explain import explain
from jln._fuse.transformation import fuse
from jln._operators import *  # noqa: F403
from jln._routes import Route

_ON_DEMAND = ["checkpoint_policies", "equinox", "haiku", "linen", "nnx", "testing"]
__all__ = ["PRODUCT", "STATISTICS", "Route", "explain", "fuse", "reference"]
__all__ += _operators.__all__
__version__ = "0.4.0.dev0"


def __getattr__(name: str) -> _ModuleType:
    """Import the modules beside the operators, which may need a framework, when they are asked for."""
    if name in _ON_DEMAND:
        return _importlib.import_module(f"jln.{name}")
    raise AttributeError(f"module 'jln' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, those of modules that are not imported yet among them."""
    return [*__all__, *_ON_DEMAND, "__version__"]

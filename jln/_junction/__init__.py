"""The one operation: a norm, and what is fused with it in front and behind. The map is in jln/README.md."""

from jln._junction import tiles  # noqa: F401  whose choices a tuning file may have, whatever runs first
from jln._junction.linears import tiles as linear_tiles  # noqa: F401  likewise

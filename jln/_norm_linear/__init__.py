"""LayerNorm or RMSNorm and the Linear behind it as one operator; files are named as in `jln._norm`."""

from jln._norm_linear import tiles  # noqa: F401  as in `jln._norm`

"""LayerNorm or RMSNorm and the Linear behind it as one operator; the files are those of `jln._norm`."""

from jln._norm_linear import tiles  # noqa: F401  as in `jln._norm`

"""LayerNorm or RMSNorm and the Linear behind it as one operator; the files are those of `jln._norm`."""

"""The one operation: a norm, and what is fused with it in front and behind. The map is in jln/README.md."""

"""The parts of `jln.testing`."""

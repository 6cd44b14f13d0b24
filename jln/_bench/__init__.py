"""Benchmarks: named workloads, whole training steps, and the programs that users would have without this library."""

"""What is measured: named workloads, whole training steps, and what users would have instead of this library."""

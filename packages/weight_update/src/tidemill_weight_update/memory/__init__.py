"""Memory that other processes map: shared host memory and CUDA allocations."""

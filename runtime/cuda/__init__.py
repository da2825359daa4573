"""The device ``cuda``: a hot set in HBM, the other experts in pinned host memory, the CPU computing beside
it."""

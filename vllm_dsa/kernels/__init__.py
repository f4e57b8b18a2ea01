"""Triton kernels, one file per kernel: launchers take tensors that the operators have validated."""

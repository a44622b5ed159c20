"""Attention over ragged rows: the rules, the op for the CPU, the kernels for CUDA."""

"""Products with int8 matrices: the choice of a kernel, and the kernels, for the CPU and for CUDA."""

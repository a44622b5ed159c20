"""Products with int8 matrices: which kernel runs, and the kernels, for the CPU and for CUDA."""

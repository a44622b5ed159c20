"""The stages of the GPU benchmarks: each function takes a `Run` and measures one question of `bench.gpu.table`."""

"""The parts of the GPU experiment: kernels one by one, and decoding."""

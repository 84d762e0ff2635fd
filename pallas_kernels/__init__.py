"""GPU kernels for GDN decoding; imports jax only and takes plain arrays."""

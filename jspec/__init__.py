"""Speculative decoding for JAX, on GPU and TPU: pure functions and one XLA program that loops on the device."""

"""What the compiler has to be told about the program that holds the loop.

**One CUDA graph.** XLA captures the kernels of a round in graphs by itself, and its host then waits for the device
after every round, to read one byte: whether there is another. With WHILE among the captured commands, condition and
rounds become one graph with a loop node, and the host waits once. The loop is the only thing in its program, so the
least length of what is captured has to be 1 as well: with XLA's own 5, asking for WHILE captures nothing at all.

**Products of many tokens.** XLA times candidates for each matrix product with its operands in the GPU's cache, where
weights are not when a round comes to them, and then prefers its own kernels. For a few tokens these are the fastest;
for more, cuBLAS is (docs/log.md).
"""

import os

FEW = 32
"""Tokens that a round verifies, of all rows together, up to which XLA's own matrix products are faster."""
_CAPTURE = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE",
    "xla_gpu_graph_min_graph_size": "1",
}
_PRODUCTS = {"xla_gpu_enable_triton_gemm": False}


def loop_options(*, many: bool = False, flags: str | None = None) -> dict[str, str | bool]:
    """Options for `jax.jit(..., compiler_options=...)` of a program that holds the loop; others than GPUs ignore them.

    many: each round verifies more than `FEW` tokens.
    flags: XLA_FLAGS; None: those of this process. What they speak of stays as they say.
    """
    flags = os.environ.get("XLA_FLAGS", "") if flags is None else flags
    wanted = (_CAPTURE, _PRODUCTS) if many else (_CAPTURE,)
    return {name: value for group in wanted if not any(own in flags for own in group) for name, value in group.items()}

"""The loop as one CUDA graph: what the compiler has to be told.

XLA captures the kernels of a round in graphs by itself, and its host then waits for the device after every round, to
read one byte: whether there is another. With WHILE among the captured commands, condition and rounds become one graph
with a loop node, and the host waits once. The loop is the only thing in its program, so the least length of what is
captured has to be 1 as well: with XLA's own 5, asking for WHILE captures nothing at all.
"""

import os

_SETTINGS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE",
    "xla_gpu_graph_min_graph_size": "1",
}


def loop_options(flags: str | None = None) -> dict[str, str]:
    """Options for `jax.jit(..., compiler_options=...)` of a program that holds the loop; others than GPUs ignore them.

    flags: XLA_FLAGS; None: those of this process. Where they speak of command buffers, they stand, and this is empty.
    """
    flags = os.environ.get("XLA_FLAGS", "") if flags is None else flags
    return {} if any(name in flags for name in _SETTINGS) else dict(_SETTINGS)

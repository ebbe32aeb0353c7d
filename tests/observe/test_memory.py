"""Peak memory."""

import torch

from torchtitan_clone.observe.profiling import peak_memory_gib


def test_peak_memory_of_the_process_includes_a_freed_buffer():
    buffer = bytearray(2**28)
    buffer[:: 2**12] = b"x" * len(range(0, 2**28, 2**12))  # touches every page
    del buffer
    assert peak_memory_gib(torch.device("cpu")) > 0.25

"""Speed on a CPU: kernels in C++, an allocator, and collectives through shared memory.

- A *library* is C++ of this package, compiled for this processor when a run starts (`library.py`).
- *Tiles* are the registers of AMX, by which a processor multiplies blocks of matrices in bfloat16.
- The *tensor region* is address space in which large tensors lie, instead of malloc's heap (`tensor_region.py`).
- A *stream* is the pair of buffers through which two ranks of one machine exchange tensors (`shared_memory.py`).

The core finds all of this through `door.py`; closed, by TORCHTITAN_CLONE_CPU=0 or without a compiler, it uses torch's
kernels, malloc and gloo.
"""

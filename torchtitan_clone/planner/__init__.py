"""Predicts memory and time of a step on hardware that need not be here, and searches the fastest mesh.

- A *hardware table* has the speeds of a GPU and of its links (`hardware.py`, `tables/`).
- The *work* of a layer is its products, its attention and its collectives (`work.py`).
- The *time model* adds the work up along the schedule of the pipeline (`time_model.py`).
- A *simulation* runs a step of any number of ranks in one process on tensors without values (`simulate.py`); its
  *trace* of allocations, replayed by a model of CUDA's allocator, is the memory of the step (`step_memory.py`).
- A *collective trace* counts the collectives of a step by axis of the mesh and kind of layer (`collective_trace.py`).
- The *estimate* of memory is a formula, for the search of meshes (`memory_estimate.py`, `search.py`).

The core finds all of this through `door.py`.
"""

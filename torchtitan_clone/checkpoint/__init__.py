"""Saving and loading of training state as named tensors.

- A *step* is a folder `step-N`; a rename commits it (`folder.py`), after its *manifest* was written.
- Each rank writes one *file* of its *shards* of tensors (`format.py`, `tensor_file.py`); the *index* says which.
- A *save* (`save.py`) copies the shards into a staging buffer, from which a thread or a process (`writer.py`) writes.
- A run resumes from the newest step that all ranks agree on (`agree.py`) and that is intact (`load.py`).

`manager.py` is the interface of the trainer; `offline.py`, `summary.py` and, for PyTorch's own format,
`dcp.py` are for scripts.
"""

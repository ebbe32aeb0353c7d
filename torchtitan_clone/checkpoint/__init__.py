"""Saving and loading of training state.

- a *step* is a folder that is committed by one rename, after its manifest: `commit.py`;
- a *plan* says which rank writes which part of which tensor, a *layout* where in its file: `layout.py`;
- a *rank file* is a rank's part of a save, copied into an *arena* of shared memory (`staging.py`) and written by a
  thread or by a *writer* process (`writer.py`, watched by `supervision.py`): `rank_file.py`;
- ranks report their *parts* of a *save* to rank 0, which commits: `parts.py`, `saving.py`;
- `manager.py` decides when to save, `resume.py` what to go on from, `loading.py` reads tensors.
"""

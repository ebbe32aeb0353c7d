"""Saving and loading of training state as named tensors.

- A *step* is a folder that one rename commits, after its manifest is written: `commit.py`.
- A *plan* says which rank writes which shard of which tensor, and where in that rank's file: `layout.py`.
- A *rank file* is the file that one rank contributes. It is written from the tensors directly, or from a *staging
  buffer* in shared memory (`staging.py`) by a thread or by a *writer process* (`writer.py`): `rank_file.py`.
- All ranks *report* to rank 0, which commits the save: `save_votes.py`. One save runs at a time: `saving.py`.
- `resume.py` decides which checkpoint a run resumes from, `loading.py` reads tensors onto any mesh, and `manager.py`
  decides which steps are saved and is the interface of the trainer to all of this.
- `offline.py` reads and writes checkpoints in one process; `hf.py` reads and writes Hugging Face folders.
"""

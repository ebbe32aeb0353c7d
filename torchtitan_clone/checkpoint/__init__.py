"""Saving and loading of training state as named tensors.

A rename commits the folder of a step (`commit.py`). Each rank writes one file (`layout.py`, `rank_file.py`), from the
tensors or from a staging buffer (`staging.py`, `writer.py`). `manager.py` is the interface of the trainer.
"""

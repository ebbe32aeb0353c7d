"""The last module that the forkserver imports: processes need not collect what it has loaded."""

import gc

import numpy.ma as numpy_ma  # imported in every run
import torch.profiler as profiler

import torchtitan_clone.train as train

__all__ = ["numpy_ma", "profiler", "train"]

gc.collect()
gc.freeze()

"""Logging, metrics, goodput, FLOPs and profiling of a run."""

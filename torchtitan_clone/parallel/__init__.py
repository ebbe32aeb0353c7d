"""Applies parallelism to a single-device model, and runs its forward and backward. Terms: docs/parallelism.md."""

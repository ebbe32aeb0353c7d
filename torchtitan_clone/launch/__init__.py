"""Launching a run: processes on this node, and Slurm jobs."""

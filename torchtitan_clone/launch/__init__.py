"""Starting a run: on this machine's processes, and as a Slurm job."""

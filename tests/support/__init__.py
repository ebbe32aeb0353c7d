"""Shared by tests, scripts and benchmarks: ranks in real processes, small runs, replica groups, faults, parity."""

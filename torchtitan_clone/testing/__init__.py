"""What tests, scripts and benchmarks share: ranks in real processes, small runs, replica groups, faults, parity."""

"""What tests and scripts share: ranks in real processes, small runs, replica groups, faults, parity."""

"""Fault tolerance: training with replica groups (TorchFT), recovery from a peer, and watchdogs for hangs."""

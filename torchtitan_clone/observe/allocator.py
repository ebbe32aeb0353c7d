"""Which malloc holds this process's CPU tensors; scripts/allocator.sh sets it up."""

import os
from pathlib import Path

LIBRARIES = ("tcmalloc", "jemalloc", "mimalloc")


def describe_allocator() -> str:
    """Returns a line for the log: the allocator that is loaded, and whether it keeps freed memory for the next step."""
    maps = Path("/proc/self/maps")
    loaded = maps.read_text() if maps.exists() else ""
    if library := next((name for name in LIBRARIES if name in loaded), None):
        return f"allocator: {library}"
    if {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"} <= os.environ.keys():
        pages = " on huge pages" if "glibc.malloc.hugetlb" in os.environ.get("GLIBC_TUNABLES", "") else ""
        return f"allocator: malloc, keeping freed memory{pages}"
    return "allocator: malloc with its defaults"

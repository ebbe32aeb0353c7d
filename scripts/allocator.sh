# Sourced by run_train.sh and benchmarks. `set_up_allocator` exports the variables that make malloc keep the memory that it has
# got from the kernel, on huge pages: PyTorch's CPU tensors are freed and allocated anew in every step, and getting their
# pages again costs 10 % of it. Prefers tcmalloc, if it is installed, to glibc's own variables. Does nothing with
# ALLOCATOR=default, or where one of the variables is set already.

KEEP_BYTES=17179869184 # freed memory at the end of the heap is given back beyond this
MAP_BYTES=8589934592   # allocations below this come from the heap, which keeps its pages

set_up_allocator() {
    local library folder
    [ "${ALLOCATOR:-}" != default ] || return 0
    [ -z "${LD_PRELOAD:-}${MALLOC_MMAP_THRESHOLD_:-}${MALLOC_TRIM_THRESHOLD_:-}${GLIBC_TUNABLES:-}" ] || return 0
    for folder in "/usr/lib/$(uname -m)-linux-gnu" /usr/lib64 /usr/lib /usr/local/lib; do
        for library in "$folder"/libtcmalloc_minimal.so.[0-9]* "$folder"/libtcmalloc.so.[0-9]*; do
            [ -e "$library" ] || continue
            export LD_PRELOAD="$library"
            return
        done
    done
    export MALLOC_MMAP_THRESHOLD_=$MAP_BYTES MALLOC_TRIM_THRESHOLD_=$KEEP_BYTES GLIBC_TUNABLES=glibc.malloc.hugetlb=1
}

"""The region of CPU tensors, in processes of their own: an allocator is that of a whole process."""

from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import dedent

import pytest

from tests.support.harness import run_ranks
from tests.support.runs import options, redirect_output, train

START = """
import logging, resource, sys, threading, os
import torch
from torchtitan_clone.cpu.tensor_region import use_tensor_region
logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
"""
USE = "use_tensor_region()\n"
PAGES = """
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(1 << 24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults(); assert (faults() < 100) is {kept}, faults()
"""


def execute(code: str, log: Path) -> None:
    """Executes code with its output in a file."""
    redirect_output(log)
    exec(code, {})


def run(code: str, *, timeout: float = 120, **environment: str) -> str:
    """Runs code in a process; returns what it writes to the log."""
    with TemporaryDirectory() as folder:
        log = Path(folder, "log")
        run_ranks(execute, 1, START + code, log, timeout=timeout, env={"ALLOCATOR": "", **environment})
        return log.read_text()


def test_a_block_is_used_again_by_a_tensor_of_its_size():
    code = """
    tensors = [torch.full((1 << 20,), float(i)) for i in range(8)]
    small = []
    for i in (1, 3, 5):  # neighbors stay
        address = tensors[i].data_ptr()
        tensors[i] = None
        small += [torch.ones(n) for n in range(1, 100)]  # would take the bytes that a block of malloc lacks
        tensors[i] = torch.full((1 << 20,), float(i))
        assert tensors[i].data_ptr() == address
        assert address % 64 == 0
    assert all((x == i).all() for i, x in enumerate(tensors))
    """
    assert run(USE + dedent(code)) == "allocator of CPU tensors: a region of their own\n"


def test_free_neighbors_are_joined_and_the_smallest_block_that_fits_is_used():
    code = """
    n = 1 << 18
    tensors = [torch.ones(size * n) for size in (4, 1, 1, 1, 1, 2, 1)]
    address = [x.data_ptr() for x in tensors]
    for order in ((1, 2, 3), (3, 2, 1), (1, 3, 2)):
        for i in order:
            tensors[i] = None
        tensors[1] = torch.ones(3 * n)
        assert tensors[1].data_ptr() == address[1]
        tensors[1] = None
        tensors[1:4] = [torch.ones(n) for _ in range(3)]
        assert [x.data_ptr() for x in tensors[1:4]] == address[1:4]
    tensors[0] = tensors[5] = None
    assert torch.ones(2 * n).data_ptr() == address[5]
    tensors[6] = None  # joins what is left above it
    assert torch.ones(100 * n).data_ptr() == address[5]
    """
    run(USE + dedent(code))


def test_tensors_of_4_mib_are_placed_by_first_fit_others_by_best_fit():
    code = """
    n = 1 << 20
    tensors = [torch.ones(size * n) for size in (4, 1, 8, 1, 2, 1)]  # 16, 4, 32, 4, 8 and 4 MiB
    first, _, largest, _, smallest, _ = [x.data_ptr() for x in tensors]
    tensors[0] = tensors[2] = tensors[4] = None
    large = torch.ones(n)
    assert large.data_ptr() == first
    small = torch.ones(n - 64)
    assert small.data_ptr() == smallest
    assert torch.ones(5 * n).data_ptr() == largest
    """
    run(USE + dedent(code))


def test_threads_get_blocks_of_their_own():
    code = """
    wrong = []
    def work(number):
        generator = torch.Generator().manual_seed(number)
        live = {}
        for step in range(400):
            key = int(torch.randint(8, (), generator=generator))
            if (old := live.pop(key, None)) is not None and not (old == old[0]).all():
                wrong.append((number, step))
            size = int(torch.randint(1, 1 << 18, (), generator=generator))
            live[key] = torch.full((size,), float(number * 1000 + step))
    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert not wrong
    """
    run(USE + dedent(code))


def test_a_forked_process_can_allocate():
    """Another thread may hold the region at the time of a fork: without a handler, one of 100 forks or so hangs.

    A fork takes 0.04 s, since the thread holds the GIL, and on a loaded machine 0.4. The first call of an operator
    initializes what torch keeps of it: a process forked meanwhile would wait for that without end.
    """
    code = """
    torch.empty(1 << 18)
    done = threading.Event()
    def work():
        while not done.is_set():
            torch.empty(1 << 18)
    thread = threading.Thread(target=work); thread.start()
    for _ in range(150):
        if (child := os.fork()) == 0:
            torch.empty(1 << 18)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    done.set(); thread.join()
    """
    run(USE + dedent(code), timeout=240)


@pytest.mark.parametrize(("allocator", "kept"), [("", "True"), ("default", "False")])
def test_freed_memory_is_kept(allocator, kept):
    """Counts the page faults of a tensor of 64 MB, the size of some logits, twenty times."""
    run(USE + PAGES.format(kept=kept), ALLOCATOR=allocator)


def test_gaps_between_tensors_take_no_memory():
    code = """
    def mib():
        with open("/proc/self/smaps_rollup") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("Anonymous:")) >> 10
    def ones(mib):
        return torch.full((mib << 18,), float(mib))
    first = torch.full((1 << 15,), 0.0)  # so that the others begin within a page
    before = mib()
    tensors = [ones(16) for _ in range(16)]
    assert 256 <= mib() - before <= 264, mib() - before
    tensors[::2] = [None] * 8  # gaps of 16 MiB, which share a page of 2 MiB with their neighbors
    tensors += [ones(32) for _ in range(4)]  # as much is in use as before
    assert 256 <= mib() - before <= 256 + 8 * 2 + 8, mib() - before
    tensors += [ones(16) for _ in range(8)]  # in the gaps
    assert 384 <= mib() - before <= 392, mib() - before
    assert all((x == x.numel() >> 18).all() for x in tensors if x is not None)
    """
    run(USE + dedent(code))


def test_tensors_that_existed_before_and_that_grow_keep_their_values():
    code = """
    before = torch.arange(1 << 20)
    use_tensor_region()
    grows = torch.ones(3)
    for size in (1 << 10, 1 << 18, 1 << 20):
        grows.resize_(size)
        assert grows[:3].tolist() == [1, 1, 1]
    assert torch.equal(before, torch.arange(1 << 20))
    del before
    assert torch.empty(0).numel() == 0
    """
    run(dedent(code))


def test_the_profiler_sees_the_memory_of_tensors():
    code = """
    with torch.profiler.profile(profile_memory=True) as profile:
        x = torch.empty(1 << 20)
        del x
    sizes = [event.self_cpu_memory_usage for event in profile.key_averages()]
    assert sizes == [1 << 22, -(1 << 22)], sizes
    """
    run(USE + dedent(code))


@pytest.mark.parametrize(
    ("code", "environment", "reason"),
    [
        ("", {"ALLOCATOR": "default"}, "malloc, as $ALLOCATOR is default"),
        ("", {"CXX": "no-such-compiler"}, "no-such-compiler is not on $PATH; install g++"),
        ("", {"CXX": "false"}, "false ended with status 1"),
        ("resource.setrlimit(resource.RLIMIT_AS, (1 << 44, 1 << 44))\n", {}, "address space cannot be reserved"),
        ("resource.setrlimit(resource.RLIMIT_DATA, (1 << 32, 1 << 32))\n", {}, "address space cannot be reserved"),
    ],
)
def test_malloc_allocates_where_there_can_be_no_region(code, environment, reason, tmp_path):
    environment = {"XDG_CACHE_HOME": str(tmp_path), **environment} if "CXX" in environment else environment
    log = run(code + USE + "assert (torch.ones(1 << 20) == 1).all()", **environment)
    assert log.count("allocator of CPU tensors: malloc") == 1
    assert reason in log


def test_training_on_a_cpu_uses_the_region(corpus, tmp_path):
    code, output = train(options(corpus, tmp_path, training__steps=1), log_folder=tmp_path, env={"ALLOCATOR": ""})
    assert code == 0
    assert output.count("allocator of CPU tensors: a region of their own") == 1


def test_pages_are_huge_from_the_first_step_on():
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[madvise]" not in setting.read_text():
        pytest.skip("this kernel has no huge pages on request")
    code = """
    from torchtitan_clone.cpu.tensor_region import use_huge_pages
    def huge_mib():
        with open("/proc/self/smaps_rollup") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("AnonHugePages:")) >> 10
    use_huge_pages()  # does nothing without a region
    use_tensor_region()
    before = huge_mib()
    first = torch.ones(1 << 24)
    assert huge_mib() == before
    use_huge_pages()
    second = torch.ones(1 << 24)
    assert huge_mib() >= before + 60, huge_mib()
    """
    run(dedent(code))

"""Measures what a save costs, in every mode, beside torch's own save and async_save of the same state.

    python benchmarks/checkpoint.py
    python benchmarks/checkpoint.py --gib=0.1 --saves=2
    python benchmarks/checkpoint.py --store --gib=0.25

Every mode runs in a process of its own: it trains a stack of matrices with AdamW, saves, and continues to train while
the save is in flight. `blocked` is how long the loop waits for a save, `of dcp.save` the ratio to torch's save, and
`staging` how long the state is copied. The rate is compared with a plain write and fsync of the same bytes to the same
disk just before; `slower` is how much longer steps take while a save is in flight; `memory` is what the process and its
writer use in addition. Medians over all saves except the first, which has a column of its own. Files are deleted after
each save, so that all modes write to the same blocks of the disk.

With --store, saves whose steps go to an object store take turns with synchronous ones to the disk, and uploads of a
step with puts of its largest file by obstore alone. Then three ranks resume what one has saved, and the bytes that they
receive are counted. The server is in a process of its own on this machine.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone without being installed

from benchmarks.turns import Step, alternate, median_of, processor_name, ratio_of, timed

TORCH_SAVE, TORCH_ASYNC = "dcp.save", "dcp.async_save"
OURS = ("disabled", "async", "async_with_pinned_mem")
LAYERS = 12


def main() -> None:
    """Runs the modes one after the other and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.4, help="size of the state: weights and two moments")
    parser.add_argument("--saves", type=int, default=3, help="saves of each mode; the first is not in the medians")
    parser.add_argument("--rows", type=int, default=64, help="rows of a batch: how long a step lasts")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; default: the one for temporary files")
    parser.add_argument("--store", action="store_true", help="measure saves to an object store")
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.mode:
        print(json.dumps(measure(options)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if options.store:
            measure_store(options, folder=Path(folder))
            return
        rows = {mode: in_own_process(mode, options, folder) for mode in (TORCH_SAVE, TORCH_ASYNC, *OURS)}
    print_table(rows)


def in_own_process(mode: str, options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Returns the measurements of one mode."""
    sizes = [f"--gib={options.gib}", f"--saves={options.saves}", f"--rows={options.rows}"]
    command = [sys.executable, __file__, *sizes, f"--mode={mode}", f"--folder={folder}/{mode}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measures one mode in this process."""
    import torch

    from torchtitan_clone.config.schema import Comm
    from torchtitan_clone.parallel.runtime import Launch, pick_device, process_group

    launch = Launch.from_environment()
    device = pick_device(launch)
    torch.manual_seed(0)
    with process_group(Comm(), launch=launch, device=device):
        loop = Loop(gib=options.gib, rows=options.rows, device=device)
        usual = statistics.median(loop.step() for _ in range(4))
        before = memory_gib(os.getpid())
        plain_write = seconds_of_plain_write(options.folder, size=loop.bytes)
        save = saver(options.mode, loop, options.folder)
        saves, slow = [], []
        for number in range(options.saves):
            figures, over = save(number)
            while not over():
                slow.append(loop.step())
            saves.append(figures())
            shutil.rmtree(options.folder)  # otherwise the next save would allocate new blocks
        after = memory_gib(os.getpid()) + sum(memory_gib(pid) for pid in children(os.getpid()))
        later = saves[1:] or saves
        return {
            "bytes": loop.bytes,
            "first_blocked": saves[0]["blocked"],
            **{key: statistics.median(each[key] for each in later) for key in later[0]},
            "plain_write": plain_write,
            "step": usual,
            "slower": statistics.median(slow) / usual - 1 if slow else 0.0,
            "memory_gib": after - before,
        }


class Loop:
    """A training loop whose state has a given size; `before_update` is called before the weights change."""

    def __init__(self, *, gib: float, rows: int, device: Any):
        import torch

        width = int((gib * 2**30 / 4 / 3 / LAYERS) ** 0.5)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS))).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.inputs = torch.randn(rows, width, device=device)
        self.before_update: Callable[[], None] = lambda: None
        self.step()
        self.bytes = sum(tensor.nbytes for tensor in self.state().values())

    def state(self) -> dict[str, Any]:
        """Returns the tensors themselves, by name."""
        state = {f"model/{name}": parameter.detach() for name, parameter in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                state[f"optimizer/{name}/{key}"] = value
        return state

    def step(self) -> float:
        """Trains one step; returns its seconds."""
        return timed(self._train)[1]["wall"]

    def _train(self) -> None:
        self.model(self.inputs).square().mean().backward()
        self.before_update()
        self.optimizer.step()
        self.optimizer.zero_grad()


def saver(mode: str, loop: Loop, folder: Path) -> Callable[[int], tuple[Callable[[], dict[str, float]], Any]]:
    """Returns a function that begins a save and returns how to get its measurements and whether it has ended."""
    if mode in OURS:
        return saver_of_ours(mode, loop, folder)
    import torch.distributed.checkpoint as dcp

    def save(number: int) -> tuple[Callable[[], dict[str, float]], Any]:
        start = time.perf_counter()
        path, ends = folder / str(number), list[float]()
        if mode == TORCH_SAVE:
            dcp.save(loop.state(), checkpoint_id=path)
            ends.append(time.perf_counter())
        else:
            future: Any = dcp.async_save(loop.state(), checkpoint_id=path)
            future.add_done_callback(lambda _: ends.append(time.perf_counter()))
        blocked = time.perf_counter() - start
        return lambda: {"blocked": blocked, "total": ends[0] - start, "staging": 0.0}, lambda: bool(ends)

    return save


def saver_of_ours(
    mode: str, loop: Loop, folder: Path, *, url: str = "checkpoint"
) -> Callable[[int], tuple[Callable[[], dict[str, float]], Callable[[], bool]]]:
    """Saves with the checkpoint manager, as the trainer uses it."""
    from torchtitan_clone.checkpoint.manager import CheckpointManager
    from torchtitan_clone.checkpoint.progress import Progress
    from torchtitan_clone.config.schema import Checkpoint

    options: Any = {"folder": url, "async_mode": mode, "keep_latest_k": 0}
    manager = CheckpointManager(Checkpoint(**options), folder=folder, state=loop.state, config="")
    loop.before_update = manager.wait_for_staging
    manager.find_resume_point()
    manager.prepare()
    for _ in range(6):  # at least as long as an interval: buffers are prepared during training
        loop.step()

    def save(number: int) -> tuple[Callable[[], dict[str, float]], Callable[[], bool]]:
        manager.save(Progress(step=number + 1, tokens_seen=0, skipped_steps=0, data={}))
        reports: list[Any] = []

        def over() -> bool:
            reports.extend(manager.reports())
            return bool(reports)

        def figures() -> dict[str, float]:
            report = reports[0]
            assert report.error is None, report.error
            assert (failure := manager.finish_uploads()) is None, failure
            return {"blocked": report.blocked_seconds, "total": report.seconds, "staging": report.staging_seconds}

        return figures, over

    return save


def measure_store(options: argparse.Namespace, *, folder: Path) -> None:
    """Prints what saves to a store cost beside their rivals, in turn, and what a resume on another mesh reads."""
    import obstore
    from obstore.store import from_url

    from tests.support.harness import run_ranks
    from tests.support.object_server import served_process
    from torchtitan_clone.checkpoint.copying import TIMEOUT_SECONDS, copy_step
    from torchtitan_clone.checkpoint.remote import open_remote
    from torchtitan_clone.config.schema import Comm
    from torchtitan_clone.parallel.runtime import Launch, pick_device, process_group

    launch, disk, numbers, rounds = Launch.from_environment(), folder / "disk", count(), 1 + max(2, options.saves)
    device = pick_device(launch)
    with served_process() as server, process_group(Comm(), launch=launch, device=device):
        os.environ["AWS_ENDPOINT_URL"] = server.address  # without the proxy, which is a thread of this process
        loop, url = Loop(gib=options.gib, rows=options.rows, device=device), server.make_bucket()
        target = open_remote(server.make_bucket(), timeout_seconds=TIMEOUT_SECONDS)
        bare = from_url(url, client_options={"allow_http": True})
        savers = {
            "disk": saver_of_ours("disabled", loop, disk),
            "store": saver_of_ours("async", loop, folder / "tier", url=url),
        }

        def save(name: str) -> Step:
            if name == "disk":
                shutil.rmtree(disk, ignore_errors=True)  # all saves write to the same blocks
            figures, over = savers[name](next(numbers))
            while not over():
                loop.step()
            return {"wall": figures()["blocked"]}

        def upload(name: str) -> Step:
            (step,) = disk.glob("step-*")
            number = int(step.name.removeprefix("step-"))
            if name == "put":
                step_seconds = timed(lambda: obstore.put(bare, "bare", step / "rank-0.safetensors"))[1]
                obstore.delete(bare, "bare")
            else:
                step_seconds = timed(lambda: copy_step(disk, target, step=number))[1]
                target.delete(number)
            return step_seconds

        saves = alternate({name: partial(save, name) for name in savers}, rounds=rounds)
        uploads = alternate({name: partial(upload, name) for name in ("put", "upload")}, rounds=rounds)
        before = server.proxy.received
        needed = sum(run_ranks(load_part, 3, folder / "other", url, options.gib, timeout=600, env=server.env))
        read = server.proxy.received - before
    blocked = ratio_of(saves["store"][1:], saves["disk"][1:])
    rate = ratio_of(uploads["put"][1:], uploads["upload"][1:])
    print(processor_name(uses_gpu=True))
    print(f"state of {loop.bytes / 2**30:.2f} GiB, medians (quartiles) of {rounds - 1} rounds after the first")
    of_disk = f"of a synchronous save to the disk, which takes {median_of(saves['disk'][1:]):.3f} s"
    print(f"blocked: {blocked.median:.2%} ({blocked.low:.2%}-{blocked.high:.2%}) {of_disk}")
    print(f"upload: {rate} x the rate of a bare put, which takes {median_of(uploads['put'][1:]):.3f} s")
    print(f"resume on 3 ranks: {read / needed:.3f} x the {needed / 2**30:.2f} GiB that they need were received")


def load_part(folder: Path, url: str, gib: float) -> int:
    """Resumes a state that is split over all ranks; returns the bytes of this rank's part."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from torchtitan_clone.checkpoint.manager import CheckpointManager
    from torchtitan_clone.config.schema import Checkpoint, Comm
    from torchtitan_clone.ops.dtensor_shards import local_shard
    from torchtitan_clone.parallel.runtime import Launch, process_group

    launch, device = Launch.from_environment(), torch.device("cpu")
    with process_group(Comm(), launch=launch, device=device):
        mesh = init_device_mesh("cpu", (launch.world_size,))
        whole = Loop(gib=gib, rows=1, device=device).state()
        state: dict[str, torch.Tensor] = {
            name: distribute_tensor(each, mesh, [Shard(0)]) if each.ndim else each for name, each in whole.items()
        }
        options = Checkpoint(folder=url, load_only=True)
        manager = CheckpointManager(options, folder=folder, state=lambda: state, config="")
        assert manager.find_resume_point() is not None
        assert manager.load() is not None
        return sum(local_shard(each).nbytes for each in state.values())


def seconds_of_plain_write(folder: Path, *, size: int) -> float:
    """Returns the seconds of writing and syncing so many bytes, the second time, to blocks that are allocated."""
    piece = os.urandom(1 << 24)
    path = folder.with_name("plain")

    def write() -> None:
        path.unlink(missing_ok=True)
        with path.open("wb") as file:
            for _ in range(size // len(piece)):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())

    write()
    _, step = timed(write)
    path.unlink()
    return step["wall"]


def memory_gib(pid: int) -> float:
    """Returns the proportional set size of a process."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 2**20


def children(pid: int) -> list[int]:
    """Returns the child processes."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()] + [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        if task.name != str(pid)
        for child in (task / "children").read_text().split()
    ]


def print_table(rows: dict[str, dict[str, Any]]) -> None:
    """Prints a line for each mode."""
    size = rows[TORCH_SAVE]["bytes"]
    step, write = (statistics.median(row[key] for row in rows.values()) for key in ("step", "plain_write"))
    print(processor_name(uses_gpu=True))
    print(f"state of {size / 2**30:.2f} GiB, steps of {step:.3f} s, a plain write of it {write:.2f} s\n")
    print(
        f"{'mode':<22}{'blocked s':>10}{'first':>8}{'of dcp.save':>12}{'total s':>9}{'MB/s':>7}{'of plain':>9}"
        f"{'staging s':>11}{'slower':>8}{'memory GiB':>11}"
    )
    for mode, row in rows.items():
        share, of_plain = row["blocked"] / rows[TORCH_SAVE]["blocked"], row["plain_write"] / row["total"]
        print(
            f"{mode:<22}{row['blocked']:>10.4f}{row['first_blocked']:>8.3f}{share:>12.1%}{row['total']:>9.2f}"
            f"{size / row['total'] / 1e6:>7.0f}{of_plain:>9.0%}{row['staging']:>11.3f}"
            f"{row['slower']:>8.0%}{row['memory_gib']:>11.2f}"
        )


if __name__ == "__main__":
    main()

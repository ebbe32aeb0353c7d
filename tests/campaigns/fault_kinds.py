"""The kinds of faults of the campaign: each really does to the processes and files of a scene what its name says."""

import math
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.campaigns.fault_scenes import Groups, NotStruckError, OneNode, Scene
from tests.campaigns.fault_tools import jump, limit_file_size, send, stop_for, wait_until_gone
from torchtitan_clone.checkpoint.folder import committed_steps, is_complete, step_folder

SCENES = ("one node", "streamed data", "launcher", "replica groups", "semi-synchronous", "small disk", "network")
ON_ONE_NODE = ("one node", "streamed data", "launcher")
GROUPS = ("replica groups", "semi-synchronous", "network")
LONGEST_STOP = 30.0


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of fault."""

    name: str
    scenes: tuple[str, ...]
    may_end: bool
    """Whether what it strikes may end, to be started again."""
    strike: Callable[[Scene], str]
    """Returns what was struck; NotStruckError if there was no victim."""


KINDS: dict[str, Kind] = {}


def kind(name: str, *scenes: str, may_end: bool) -> Callable[[Callable[..., str]], Callable[..., str]]:
    """Registers the function that makes faults of this kind happen."""

    def register(strike: Callable[..., str]) -> Callable[..., str]:
        KINDS[name] = Kind(name=name, scenes=scenes, may_end=may_end, strike=strike)
        return strike

    return register


def await_end(scene: OneNode) -> None:
    """Waits until a process of the run has ended; not for ever, because training may outlive the fault."""
    deadline = time.monotonic() + 60
    while all(code is None for code in scene.codes()) and time.monotonic() < deadline:
        time.sleep(0.01)


def stop_seconds(source: random.Random) -> float:
    """Draws how long a process is stopped: from 1 to 30 s, every octave equally often."""
    return round(math.exp(source.uniform(0.0, math.log(LONGEST_STOP))), 2)


# ---------------------------------------------------------------------------------------------------- ranks


@kind("kill a rank", *ON_ONE_NODE, "small disk", may_end=True)
def kill_rank(scene: OneNode) -> str:
    victim = scene.source.choice(scene.pids())
    send(signal.SIGKILL, victim)
    await_end(scene)
    return "one of two"


@kind("kill all ranks", *ON_ONE_NODE, may_end=True)
def kill_ranks(scene: OneNode) -> str:
    send(signal.SIGKILL, *scene.pids())
    await_end(scene)
    return "both at once"


@kind("kill a rank that starts", "one node", "streamed data", may_end=True)
def kill_starting(scene: OneNode) -> str:
    send(signal.SIGKILL, *scene.pids())
    scene.end()
    scene.start()
    time.sleep(scene.source.uniform(0.0, 1.0))
    return kill_rank(scene)


@kind("kill a rank that saves", "one node", "launcher", may_end=True)
def kill_saving(scene: OneNode) -> str:
    wait_for_save(scene)
    return kill_rank(scene)


@kind("kill all ranks while they save", "one node", "launcher", may_end=True)
def kill_all_saving(scene: OneNode) -> str:
    wait_for_save(scene)
    return kill_ranks(scene)


def wait_for_save(scene: OneNode) -> None:
    """Waits until a save has begun and not ended. NotStruckError if none is caught in the act."""
    deadline = time.monotonic() + 10
    while not list(scene.checkpoints.glob("step-*.partial-*")):
        if time.monotonic() > deadline:
            raise NotStruckError("no save was caught in the act")
        time.sleep(0.001)
    time.sleep(scene.source.uniform(0.0, 0.02))


@kind("stop a rank", *ON_ONE_NODE, may_end=False)
def stop_rank(scene: OneNode) -> str:
    seconds = stop_seconds(scene.source)
    stop_for([scene.source.choice(scene.pids())], seconds=seconds)
    return f"{seconds} s"


@kind("stop all ranks", *ON_ONE_NODE, may_end=False)
def stop_ranks(scene: OneNode) -> str:
    seconds = stop_seconds(scene.source)
    stop_for(scene.pids(), seconds=seconds)
    return f"{seconds} s"


# ---------------------------------------------------------------------------------------------------- signals


def signal_run(scene: OneNode, *numbers: int) -> None:
    """Sends signals to the launcher, or to all ranks where there is none, one shortly after the other."""
    for number in numbers:
        try:
            pids = scene.pids("launcher" if scene.has_launcher else "rank")
        except NotStruckError:  # the first signal has ended them
            break
        send(number, *pids)
        time.sleep(scene.source.uniform(0.0, 0.2))
    await_end(scene)


@kind("SIGTERM", *ON_ONE_NODE, may_end=True)
def terminate(scene: OneNode) -> str:
    signal_run(scene, signal.SIGTERM)
    return "to all"


@kind("SIGINT", *ON_ONE_NODE, may_end=True)
def interrupt(scene: OneNode) -> str:
    signal_run(scene, signal.SIGINT)
    return "to all"


@kind("SIGUSR1 or SIGUSR2", *ON_ONE_NODE, may_end=True)
def user_signal(scene: OneNode) -> str:
    number = scene.source.choice([signal.SIGUSR1, signal.SIGUSR2])
    signal_run(scene, number)
    return number.name


@kind("SIGHUP", *ON_ONE_NODE, may_end=True)
def hang_up(scene: OneNode) -> str:
    signal_run(scene, signal.SIGHUP)
    return "to all"


@kind("SIGTERM to one rank", "one node", "launcher", may_end=True)
def terminate_one(scene: OneNode) -> str:
    send(signal.SIGTERM, scene.source.choice(scene.pids()))
    await_end(scene)
    return "one of two"


@kind("two signals", *ON_ONE_NODE, may_end=True)
def two_signals(scene: OneNode) -> str:
    numbers = scene.source.choices([signal.SIGTERM, signal.SIGINT, signal.SIGHUP], k=2)
    signal_run(scene, *numbers)
    return " and ".join(number.name for number in numbers)


@kind("SIGTERM, then SIGKILL", *ON_ONE_NODE, may_end=True)
def terminate_and_kill(scene: OneNode) -> str:
    signal_run(scene, signal.SIGTERM, signal.SIGKILL)
    return "within 0.2 s"


# ---------------------------------------------------------------------------------------------------- launcher


@kind("kill the launcher", "launcher", may_end=True)
def kill_launcher(scene: OneNode) -> str:
    ranks = scene.pids()
    send(signal.SIGKILL, *scene.pids("launcher"))
    if left := wait_until_gone(ranks, timeout=20):
        scene.wrong.append(f"outlived the launcher: {left}")
    return "its ranks must end"


@kind("SIGQUIT to the launcher", "launcher", may_end=True)
def quit_launcher(scene: OneNode) -> str:
    send(signal.SIGQUIT, *scene.pids("launcher"))
    await_end(scene)
    return "it kills its ranks"


@kind("stop the launcher", "launcher", may_end=False)
def stop_launcher(scene: OneNode) -> str:
    seconds = stop_seconds(scene.source)
    stop_for(scene.pids("launcher"), seconds=seconds)
    return f"{seconds} s"


# ---------------------------------------------------------------------------------------------------- helpers


@kind("kill a writer", "one node", "launcher", "small disk", may_end=False)
def kill_writer(scene: OneNode) -> str:
    send(signal.SIGKILL, scene.source.choice(scene.pids("writer")))
    return "one of two"


@kind("kill all writers while they save", "one node", "launcher", may_end=False)
def kill_writers(scene: OneNode) -> str:
    writers = scene.pids("writer")
    wait_for_save(scene)
    send(signal.SIGKILL, *writers)
    return "both"


@kind("stop a writer", "one node", "launcher", may_end=False)
def stop_writer(scene: OneNode) -> str:
    seconds = stop_seconds(scene.source)
    stop_for([scene.source.choice(scene.pids("writer"))], seconds=seconds)
    return f"{seconds} s"


@kind("kill a loader worker", "streamed data", may_end=True)
def kill_worker(scene: OneNode) -> str:
    send(signal.SIGKILL, scene.source.choice(scene.pids("worker")))
    await_end(scene)
    return "one of two"


@kind("stop a loader worker", "streamed data", may_end=False)
def stop_worker(scene: OneNode) -> str:
    seconds = stop_seconds(scene.source)
    stop_for([scene.source.choice(scene.pids("worker"))], seconds=seconds)
    return f"{seconds} s"


def catch_encoder(scene: OneNode) -> list[int]:
    """Starts the run again with an empty cache of tokens, and returns the processes that tokenize."""
    scene.end()
    scene.start(data__cache_folder=scene.folder / f"cache-{scene.source.getrandbits(40)}")
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            return scene.pids("encoder")
        except NotStruckError:
            time.sleep(0.001)
    raise NotStruckError("no tokenizer process was caught in the act")


@kind("kill a tokenizer process", "one node", may_end=True)
def kill_encoder(scene: OneNode) -> str:
    victims = catch_encoder(scene)
    time.sleep(scene.source.uniform(0.0, 0.3))
    send(signal.SIGKILL, scene.source.choice(victims))
    await_end(scene)
    return "while the data is prepared"


@kind("kill the rank that tokenizes", "one node", may_end=True)
def kill_tokenizing(scene: OneNode) -> str:
    catch_encoder(scene)
    time.sleep(scene.source.uniform(0.0, 0.3))
    send(signal.SIGKILL, *scene.pids())
    await_end(scene)
    return "while the data is prepared"


@kind("stop a tokenizer process", "one node", may_end=True)
def stop_encoder(scene: OneNode) -> str:
    seconds = stop_seconds(scene.source)
    stop_for(catch_encoder(scene)[:1], seconds=seconds)
    return f"{seconds} s"


# ---------------------------------------------------------------------------------------------------- files


def newest_file(scene: OneNode) -> Path:
    """Kills the run and returns a file of its newest checkpoint, which is not to be found any more."""
    send(signal.SIGKILL, *scene.pids())
    scene.end()
    intact = [step for step in committed_steps(scene.checkpoints) if is_complete(scene.checkpoints, step=step)]
    if len(intact) < 2:
        raise NotStruckError("there is no older checkpoint")
    scene.committed = intact[-2]
    return scene.source.choice(sorted(step_folder(scene.checkpoints, intact[-1]).iterdir()))


def start_damaged(scene: OneNode) -> None:
    """Starts the run again; a damaged step may still count as complete by its sizes."""
    older = scene.committed
    scene.start()
    scene.committed = scene.before = older


@kind("flip a bit of the newest checkpoint", "one node", "launcher", "small disk", may_end=True)
def flip_bit(scene: OneNode) -> str:
    file = newest_file(scene)
    content = bytearray(file.read_bytes())
    place = scene.source.randrange(len(content))
    content[place] ^= 1 << scene.source.randrange(8)
    file.write_bytes(content)
    start_damaged(scene)
    return f"{file.parent.name}/{file.name}, byte {place} of {len(content)}"


@kind("cut a file of the newest checkpoint", "one node", "launcher", may_end=True)
def cut_file(scene: OneNode) -> str:
    file = newest_file(scene)
    size = scene.source.randrange(file.stat().st_size)
    with file.open("r+b") as stream:
        stream.truncate(size)
    start_damaged(scene)
    return f"{file.parent.name}/{file.name} to {size} bytes"


@kind("delete a file of the newest checkpoint", "one node", "launcher", may_end=True)
def delete_file(scene: OneNode) -> str:
    file = newest_file(scene)
    file.unlink()
    start_damaged(scene)
    return f"{file.parent.name}/{file.name}"


@kind("append half a line to the metrics", "one node", "streamed data", may_end=True)
def half_line(scene: OneNode) -> str:
    send(signal.SIGKILL, *scene.pids())
    scene.end()
    with (scene.dump_folder / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "loss": 5.')
    scene.start()
    return "as a crash leaves it"


def permit_failed_end(scene: OneNode) -> None:
    """Permits a run to have ended that could not save its last step, as it must, to do so when it is started again."""
    scene.may_end = scene.step() == scene.steps


@kind("limit the size of files", "one node", "launcher", may_end=False)
def limit_files(scene: OneNode) -> str:
    pids = scene.pids()
    for pid in pids:
        limit_file_size(pid, size=1 << 19)
    try:
        time.sleep(scene.source.uniform(0.5, 2.0))
    finally:
        for pid in pids:
            limit_file_size(pid, size=-1)
    permit_failed_end(scene)
    return "rank files do not fit"


@kind("full disk", "small disk", may_end=False)
def full_disk(scene: OneNode) -> str:
    assert scene.disk is not None
    seconds = round(scene.source.uniform(0.5, 3.0), 2)
    with scene.disk.full():
        time.sleep(seconds)
    permit_failed_end(scene)
    return f"{seconds} s"


@kind("slow disk", "small disk", may_end=False)
def slow_disk(scene: OneNode) -> str:
    assert scene.disk is not None
    rate = scene.source.choice([200_000, 500_000, 2_000_000])
    with scene.disk.slow(bytes_per_second=rate):
        time.sleep(scene.source.uniform(1.0, 6.0))
    return f"{rate // 1000} kB/s"


@kind("read-only remount", "small disk", may_end=True)
def read_only(scene: OneNode) -> str:
    assert scene.disk is not None
    scene.disk.break_down()
    time.sleep(scene.source.uniform(0.5, 2.0))
    codes = scene.codes()
    if any(code is not None for code in codes):
        scene.wrong.append(f"ended with {codes} when the disk became read-only: {scene.log_text()[-600:]}")
    scene.end()
    wait_until_gone(sorted(scene.seen), timeout=20)
    scene.disk.repair()
    scene.start()
    return "after an error of ext4; killed, checked, mounted, started again"


# ---------------------------------------------------------------------------------------------------- clocks


@kind("clock ahead", *ON_ONE_NODE, may_end=False)
def clock_ahead(scene: OneNode) -> str:
    return move_clock(scene.pids(), source=scene.source, sign=1)


@kind("clock back", *ON_ONE_NODE, may_end=False)
def clock_back(scene: OneNode) -> str:
    return move_clock(scene.pids(), source=scene.source, sign=-1)


@kind("clock of a group ahead", "replica groups", "semi-synchronous", may_end=False)
def group_clock_ahead(scene: Groups) -> str:
    return move_clock(scene.cluster.pids(scene.source.randrange(3)), source=scene.source, sign=1)


@kind("clock of a group back", "replica groups", "semi-synchronous", may_end=False)
def group_clock_back(scene: Groups) -> str:
    return move_clock(scene.cluster.pids(scene.source.randrange(3)), source=scene.source, sign=-1)


def move_clock(pids: list[int], *, source: random.Random, sign: int) -> str:
    """Moves the clocks of processes by the same time."""
    seconds = sign * source.choice([2, 60, 3600, 86_400 * 400])
    for pid in pids:
        jump(pid, seconds=seconds)
    return f"{seconds:+} s"


# ---------------------------------------------------------------------------------------------------- groups


def strike_group(scene: Groups) -> int:
    """Draws a group that runs, and remembers that it may end."""
    running = sorted(scene.cluster.running)
    if not running:
        raise NotStruckError("no group runs")
    scene.struck = {scene.source.choice(running)}
    return next(iter(scene.struck))


def kill_ranks_of(scene: Groups, *groups: int) -> None:
    """Kills groups and waits until their end is known, so that it is not taken for an effect of the next fault."""
    send(signal.SIGKILL, *(pid for group in groups for pid in scene.cluster.pids(group)))
    deadline = time.monotonic() + 60
    while any(None in scene.cluster.running[group].codes for group in groups) and time.monotonic() < deadline:
        time.sleep(0.01)


@kind("kill a group", *GROUPS, may_end=True)
def kill_group(scene: Groups) -> str:
    group = strike_group(scene)
    kill_ranks_of(scene, group)
    return f"group {group}"


@kind("kill a group, then another", *GROUPS, may_end=True)
def kill_two_groups(scene: Groups) -> str:
    groups = scene.source.sample(sorted(scene.cluster.running), min(2, len(scene.cluster.running)))
    scene.struck = set(groups)
    for group in groups:
        kill_ranks_of(scene, group)
        time.sleep(scene.source.uniform(0.0, 0.5))
    return f"groups {groups}"


@kind("kill all groups", *GROUPS, may_end=True)
def kill_groups(scene: Groups) -> str:
    scene.struck = set(scene.cluster.running)
    kill_ranks_of(scene, *scene.struck)
    return "they resume from the newest checkpoint"


@kind("kill a group that returns", *GROUPS, may_end=True)
def kill_returning(scene: Groups) -> str:
    group = strike_group(scene)
    kill_ranks_of(scene, group)
    starts = len(scene.cluster.starts)
    scene.cluster.watch_over(timeout=60, until=lambda: len(scene.cluster.starts) > starts)
    moment = time.monotonic() + scene.source.uniform(0.3, 3.0)
    scene.cluster.watch_over(timeout=60, until=lambda: time.monotonic() > moment)
    kill_ranks_of(scene, group)
    return f"group {group}"


@kind("stop a group", *GROUPS, may_end=True)
def stop_group(scene: Groups) -> str:
    group, seconds = strike_group(scene), stop_seconds(scene.source)
    stop_for(scene.cluster.pids(group), seconds=seconds)
    return f"group {group}, {seconds} s"


@kind("SIGTERM to a group", *GROUPS, may_end=True)
def terminate_group(scene: Groups) -> str:
    group = strike_group(scene)
    send(signal.SIGTERM, *scene.cluster.pids(group))
    return f"group {group}"


@kind("SIGINT twice to a group", *GROUPS, may_end=True)
def interrupt_group(scene: Groups) -> str:
    group = strike_group(scene)
    send(signal.SIGINT, *scene.cluster.pids(group))
    time.sleep(scene.source.uniform(0.0, 0.2))
    send(signal.SIGINT, *scene.cluster.pids(group))
    return f"group {group}"


@kind("kill the lighthouse", *GROUPS, may_end=False)
def kill_lighthouse(scene: Groups) -> str:
    seconds = round(scene.source.uniform(0.0, 3.0), 2)
    scene.cluster.restart_lighthouse(seconds=seconds)
    return f"another starts {seconds} s later"


@kind("stop the lighthouse", *GROUPS, may_end=False)
def stop_lighthouse(scene: Groups) -> str:
    seconds = stop_seconds(scene.source)
    stop_for([scene.cluster.lighthouse_pid], seconds=seconds)
    return f"{seconds} s"


@kind("part a group from the lighthouse", *GROUPS, may_end=False)
def part_from_lighthouse(scene: Groups) -> str:
    group, seconds = strike_group(scene), stop_seconds(scene.source)
    proxy = scene.cluster.proxies[group]
    proxy.blocked = True
    time.sleep(seconds)
    proxy.blocked = False
    return f"group {group}, {seconds} s"


@kind("delay a group's packets to the lighthouse", *GROUPS, may_end=False)
def delay_lighthouse(scene: Groups) -> str:
    group, delay = strike_group(scene), scene.source.choice([0.05, 0.2, 0.8])
    proxy = scene.cluster.proxies[group]
    proxy.delay = delay
    time.sleep(scene.source.uniform(1.0, 5.0))
    proxy.delay = 0.0
    return f"group {group}, {delay} s each way"


@kind("reset a group's connections to the lighthouse", *GROUPS, may_end=False)
def reset_lighthouse(scene: Groups) -> str:
    group = strike_group(scene)
    scene.cluster.proxies[group].reset()
    return f"group {group}"


# ---------------------------------------------------------------------------------------------------- network


@kind("part a group from the network", "network", may_end=True)
def part_group(scene: Groups) -> str:
    assert scene.network is not None
    group, seconds = strike_group(scene), stop_seconds(scene.source)
    with scene.network.drop(group=group):
        time.sleep(seconds)
    return f"group {group}, {seconds} s"


@kind("lose packets", "network", may_end=False)
def lose_packets(scene: Groups) -> str:
    assert scene.network is not None
    probability, seconds = scene.source.choice([0.01, 0.05, 0.2]), scene.source.uniform(2.0, 8.0)
    with scene.network.drop(probability=probability):
        time.sleep(seconds)
    return f"{probability:.0%} of all, {seconds:.1f} s"


@kind("slow network", "network", may_end=False)
def slow_network(scene: Groups) -> str:
    assert scene.network is not None
    kilobits, seconds = scene.source.choice([500, 2000, 20_000]), scene.source.uniform(2.0, 8.0)
    with scene.network.slow(kilobits=kilobits):
        time.sleep(seconds)
    return f"{kilobits} kbit/s, {seconds:.1f} s"


@kind("part all from all", "network", may_end=True)  # it also parts the processes of a group
def part_all(scene: Groups) -> str:
    assert scene.network is not None
    scene.struck = set(scene.cluster.running)
    seconds = stop_seconds(scene.source)
    with scene.network.drop():
        time.sleep(seconds)
    return f"{seconds} s"


@kind("reset a group's connections", "network", may_end=False)
def reset_connections(scene: Groups) -> str:
    assert scene.network is not None
    group = strike_group(scene)
    pids, store = scene.cluster.pids(group), scene.cluster.running[group].ranks[0].store.port
    return f"group {group}, {scene.network.reset(pids, store=store)} connections"

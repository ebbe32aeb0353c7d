"""Copies of checkpoint files between nodes that do not share a local folder, so that the loss of one costs no step.

    node 0          node 1          node 2
    rank 0, 1  -->  rank 2, 3  -->  rank 4, 5  -->  rank 0, 1      each sends its file of a step to the node behind

A *leader* is the first rank of a node. The step of a node has the manifest and all documents, but of the files of
tensors those of its own ranks and of the node before; a start completes the step that it resumes from.
"""

import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_clone.checkpoint import folder as folders
from torchtitan_clone.checkpoint.agree import agreed_errors, gather
from torchtitan_clone.checkpoint.folder import (
    MANIFEST_FILE,
    CorruptCheckpointError,
    digest_of_bytes,
    encode_manifest,
    read_manifest,
    step_folder,
)
from torchtitan_clone.checkpoint.format import file_of_rank
from torchtitan_clone.checkpoint.save import describe_error, lack_of_space
from torchtitan_clone.checkpoint.writer import CHUNK, DIGEST, write_file
from torchtitan_clone.config import ConfigError
from torchtitan_clone.files import sync_folder

logger = logging.getLogger("torchtitan_clone")


class Peers:
    """The nodes of a run. `leaders` has the leader of each rank. ConfigError if nodes differ in ranks. Collective."""

    def __init__(self, leaders: Sequence[int], *, timeout_seconds: float) -> None:
        rank, self._leaders = dist.get_rank(), sorted({*leaders})
        nodes = [[each for each, leader in enumerate(leaders) if leader == first] for first in self._leaders]
        if len({len(ranks) for ranks in nodes}) > 1:
            rule = f"nodes must have equal numbers of ranks, and have {', '.join(str(len(ranks)) for ranks in nodes)}"
            raise ConfigError(f"checkpoint.local_peer_copy = true: {rule}; start as many on each, or set it to false")
        self._leader = leaders[rank]
        number = self._leaders.index(self._leader)
        place = nodes[number].index(rank)
        self._share = slice(place, None, len(nodes[number]))
        self._target, self._source = nodes[(number + 1) % len(nodes)][place], nodes[number - 1][place]
        timeout = timedelta(seconds=timeout_seconds)
        self._group = cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=timeout))
        self._is_broken = False
        self._holders: dict[int, dict[str, list[int]]] = {}

    @property
    def leads(self) -> bool:
        """Whether this rank is the leader of its node."""
        return dist.get_rank() == self._leader

    # ------------------------------------------------------------------ saving, in the thread of the save

    def exchange(self, folder: Path, *, own: str | None) -> None:
        """Sends a file of a save to the node behind, and receives one of the node before; `own` is None after an error.

        An error, as of a lost node, ends the exchanges of this rank with a warning, and costs no save.
        """
        if self._is_broken:
            return
        try:
            content = _mapped(folder / own) if own else torch.empty(0, dtype=torch.uint8)
            size = torch.tensor([0])
            self._swap(torch.tensor([len(content)]), size)
            write_file(folder / file_of_rank(self._source), self._received(content, size=int(size)))
        except (OSError, RuntimeError) as error:
            self._is_broken = True
            text = "rank %d no longer copies checkpoints from rank %d and to rank %d: %s; start again to resume that"
            logger.warning(text, dist.get_rank(), self._source, self._target, describe_error(error))

    def _received(self, content: Tensor, *, size: int) -> Iterator[memoryview]:
        for begin in range(0, max(size, len(content)), CHUNK):
            received = torch.empty(max(0, min(CHUNK, size - begin)), dtype=torch.uint8)
            self._swap(content[begin : begin + CHUNK], received)
            yield received.numpy().data

    def _swap(self, sent: Tensor, received: Tensor) -> None:
        works = [dist.irecv(received, src=self._source, group=self._group)] if len(received) else []
        works += [dist.isend(sent, dst=self._target, group=self._group)] if len(sent) else []
        for work in works:
            assert work is not None, "this rank is in the group"
            work.wait()

    # ------------------------------------------------------------------ starting

    def survey(self, folder: Path) -> set[int]:
        """Returns the steps of which each file is on some node, as far as sizes tell. Collective."""
        own: list[list[object]] = []
        for step in folders.committed_steps(folder) if self.leads else ():
            with suppress(CorruptCheckpointError, OSError):
                manifest = read_manifest(step_folder(folder, step), step=step)
                sizes = {path.name: path.lstat().st_size for path in step_folder(folder, step).iterdir()}
                here = [name for name, record in manifest.files.items() if sizes.get(name) == record.bytes]
                digest = digest_of_bytes(encode_manifest(manifest), algorithm=DIGEST)
                own.append([step, digest, len(manifest.files), here])
        found: dict[tuple[int, str, int], dict[str, list[int]]] = {}  # nodes by file, for each step and manifest
        for rank, answer in enumerate(gather(own)):
            for entry in answer.items():
                step, digest, count, names = entry.items(count=4)
                nodes = found.setdefault((step.integer(), digest.text(), count.integer()), {})
                for name in names.items():
                    nodes.setdefault(name.file_name(), []).append(rank)
        self._holders = {step: nodes for (step, _, count), nodes in found.items() if len(nodes) == count}
        return {*self._holders}

    def complete(self, folder: Path, *, step: int, digests: bool) -> None:
        """Copies to each node the files of a step that it lacks or, with `digests`, has damaged. Collective.

        CorruptCheckpointError if a file is intact on no node, ConfigError if there is no space for it.
        """
        place, holders = step_folder(folder, step), self._intact_holders(folder, step=step, digests=digests)
        if lost := [name for name, nodes in holders.items() if not nodes]:
            raise CorruptCheckpointError(f"{lost[0]} is intact on no node")
        has_manifest = {node for nodes in self._holders[step].values() for node in nodes}
        lacking = {name: [node for node in self._leaders if node not in nodes] for name, nodes in holders.items()}
        with agreed_errors(folder):
            if self.leads and self._leader not in has_manifest:
                shutil.rmtree(place, ignore_errors=True)  # of another save
                place.mkdir(parents=True)
            targets = [node for node in self._leaders if node not in has_manifest]
            self._copy(place / MANIFEST_FILE, source=min(has_manifest), targets=targets)
            own = [name for name, nodes in lacking.items() if self._leader in nodes]
            if self.leads and own:
                files = read_manifest(place, step=step).files
                if problem := lack_of_space(folder, size=sum(files[name].bytes for name in own)):
                    raise ConfigError(f"the files of step {step} that other nodes have do not fit: {problem}")
        with agreed_errors(folder):
            for name, nodes in lacking.items():
                self._copy(place / name, source=holders[name][0], targets=nodes)
            for name in own if self.leads else ():
                folders.check_digest(place, name, manifest=read_manifest(place, step=step))
            if self.leads and own:
                sync_folder(place)
                logger.info("step %d: received %d files from other nodes", step, len(own))

    def _intact_holders(self, folder: Path, *, step: int, digests: bool) -> dict[str, list[int]]:
        """Returns the nodes that have each file of a step; with `digests`, without damaged ones. Collective."""
        holders, damaged = self._holders[step], list[str]()
        here = [name for name, nodes in holders.items() if self._leader in nodes]
        with agreed_errors(folder):
            for name in here[self._share] if digests else ():
                try:
                    folders.check_digest(
                        step_folder(folder, step), name, manifest=read_manifest(step_folder(folder, step))
                    )
                except CorruptCheckpointError as problem:
                    damaged.append(name)
                    logger.warning("step %d: %s; another node may have it", step, problem)
        answers = [each.items(count=2) for each in gather([self._leader, damaged])]
        bad = {(node.integer(), name.text()) for node, names in answers for name in names.items()}
        return {name: [node for node in nodes if (node, name) not in bad] for name, nodes in holders.items()}

    def _copy(self, path: Path, *, source: int, targets: Sequence[int]) -> None:
        """Copies a file from the leader of one node to those of others."""
        if dist.get_rank() == source:
            content = _mapped(path)
            for target in targets:
                dist.send(torch.tensor([len(content)]), dst=target)
                for chunk in content.split(CHUNK) if len(content) else ():
                    dist.send(chunk, dst=target)
        elif dist.get_rank() in targets:
            dist.recv(size := torch.tensor([0]), src=source)
            write_file(path, _chunks_from(source, size=int(size)))


def _chunks_from(rank: int, *, size: int) -> Iterator[memoryview]:
    for begin in range(0, size, CHUNK):
        dist.recv(chunk := torch.empty(min(CHUNK, size - begin), dtype=torch.uint8), src=rank)
        yield chunk.numpy().data


def _mapped(path: Path) -> Tensor:
    """Returns the content of a file, read as it is used."""
    size = path.stat().st_size
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8) if size else torch.empty(0)

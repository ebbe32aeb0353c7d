"""One of several replica groups, by way of torchft: who takes part in a step, healing, and whether the step counts.

All groups meet at the start of each step (a *quorum*, which the lighthouse forms), so that the rows of the step can be
divided among those that are there; who is behind is healed first. From then on nobody joins. Gradients are summed over
the groups after backward; if that fails anywhere in a group, none of its ranks commits.
"""

import hashlib
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchft
from torch import Tensor, nn

from torchtitan_clone import torch_compat
from torchtitan_clone.config.schema import FaultTolerance
from torchtitan_clone.fault_tolerance.process_groups import PROCESS_GROUPS
from torchtitan_clone.fault_tolerance.protocol import RecoveryState
from torchtitan_clone.fault_tolerance.recovery import PeerTransport, UnlikeGroupsError
from torchtitan_clone.fault_tolerance.watchdog import StepTimeout
from torchtitan_clone.ops.dtensor_shards import local_shard

logger = logging.getLogger("torchtitan_clone")

BUCKET_BYTES = 32 << 20
"""Gradients are summed in pieces of about this size."""
LAST_BYTES = 1 << 20
"""Of the records, some thousand steps, which are looked at when this group goes on where others are."""
OUTRANKING = ("TORCHFT_TIMEOUT_SEC", "TORCHFT_QUORUM_TIMEOUT_SEC", "TORCHFT_CONNECT_TIMEOUT_SEC")
"""Environment variables that torchft prefers to what it is told."""


class TorchFTGroup:
    """This process's side of its replica group's talk with the others; all ranks of the group call the same methods.

    `step` is the last one done, `healing` what a group that is behind takes over, `is_over` says whether others have
    finished the run, `sum_over_ranks` sums over the ranks of this group, `identity` is what must be alike in all of
    them, `folder` is for this one's records.
    `part` of `parts` is what this group takes of the global batch, valid from `begin` to the next; `writes` holds in
    one of the groups, the one that saves.
    """

    def __init__(
        self,
        fault_tolerance: FaultTolerance,
        *,
        device: torch.device,
        step: int,
        healing: Callable[[], RecoveryState],
        sum_over_ranks: Callable[[list[float]], list[float]],
        is_over: Callable[[], bool],
        wants_to_stop: Callable[[], bool],
        identity: str,
        folder: Path,
        rounds_of_steps: int = 1,
    ):
        self.part, self.parts, self.writes = 0, 0, True
        self._options = fault_tolerance
        self._healing = healing()
        self._sum_over_ranks = sum_over_ranks
        self._is_over = is_over
        self._wants_to_stop = wants_to_stop
        self._device = device if fault_tolerance.process_group == "nccl" else torch.device("cpu")
        self._timeout = timedelta(milliseconds=fault_tolerance.process_group_timeout_ms)
        self._connect_timeout = min(self._timeout, timedelta(milliseconds=fault_tolerance.heartbeat_timeout_ms))
        self._watch = StepTimeout(factor=fault_tolerance.stall_factor, grace_seconds=2 * self._timeout.total_seconds())
        self._is_first_rank = dist.get_rank() == 0
        self._pg = PROCESS_GROUPS[fault_tolerance.process_group](
            timeout=self._timeout, connect_timeout=self._connect_timeout
        )
        self._transport = PeerTransport(self._pg, tensors=self._healing.tensors, device=self._device)
        self._manager = self._build_manager()
        self._manager.load_state_dict({"step": step // rounds_of_steps, "batches_committed": 0})
        self._note: dict[str, Any] = {}
        self._received: dict[str, Any] | None = None
        self._steps_of_round = rounds_of_steps
        (self._started,) = sum_over_ranks([time.time()])  # the same for all ranks: they must decide alike
        self._identity = int.from_bytes(hashlib.blake2b(identity.encode(), digest_size=5).digest())
        self._quorum_of_identity = -1
        self._manager.register_state_dict_fn(PeerTransport.KEY, self._receive_note, lambda: self._note)
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._records = (folder / f"rows.rank{dist.get_rank()}.jsonl").open("a", buffering=1)
        self._write(started=step)
        self._warn_of_traps()

    def _build_manager(self) -> torchft.Manager:
        logging.getLogger("torchft").setLevel(logging.CRITICAL)  # what goes wrong is told here, in one line
        try:
            return self._connected_manager(*self._open_store())
        except RuntimeError as error:
            raise RuntimeError(
                f"no lighthouse answers at $TORCHFT_LIGHTHOUSE = {os.environ['TORCHFT_LIGHTHOUSE']}; start "
                f"scripts/lighthouse.py first ({error})"
            ) from None

    def _connected_manager(self, host: str, port: int) -> torchft.Manager:
        return torchft.Manager(
            pg=self._pg,
            load_state_dict=None,
            state_dict=None,
            min_replica_size=self._options.min_replica_size,
            use_async_quorum=False,
            timeout=self._timeout,
            quorum_timeout=self._timeout,
            connect_timeout=self._connect_timeout,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            store_addr=host,
            store_port=port,
            hostname=socket.gethostname(),
            replica_id=f"replica_{self._options.replica_id}",
            checkpoint_transport=self._transport,
            init_sync=False,  # initial weights are a function of the seed
        )

    def _open_store(self) -> tuple[str, int]:
        """A store that the other groups reach too; torchrun's may be known by an address of this machine only."""
        address: list[Any] = [None]
        if self._is_first_rank:
            host = socket.gethostname()
            self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
            address = [(host, self._store.port)]
        dist.broadcast_object_list(address)
        return address[0]

    def _warn_of_traps(self) -> None:
        if not self._is_first_rank:
            return
        for name in OUTRANKING:
            if name in os.environ:
                logger.warning("$%s = %s outranks fault_tolerance.process_group_timeout_ms", name, os.environ[name])
        if self._options.group_size == 2:
            logger.warning(
                "with two replica groups neither is a majority: if one hangs and does not die, the other waits until "
                "the watchdog ends it (fault_tolerance.stall_factor); three groups go on without it"
            )

    def begin(self) -> bool:
        """Meets the other groups and heals where this one is behind; False where there is nothing to go on for.

        That is: a request to stop while too few groups were there, or the others have finished the run.
        """
        told, step = None, self._manager.current_step()
        while True:
            error = self._meet()
            over = error is not None and self._is_first_rank and self._is_over()
            failed, stops, over = self._sum_over_ranks([error is not None, self._wants_to_stop(), over])
            if not failed:
                break
            if stops or over:
                return False
            if error is not None and str(error) != told:
                told = str(error)
                logger.warning("waiting for replica groups: %s", told.splitlines()[0])
            self._stay_at(step)
            self._leave(error)
        self._take_over()
        self._count()
        self._watch.start()
        return True

    def lost_steps(self) -> set[int]:
        """Steps that this group committed, and others again without it; as far as the ends of the records tell."""
        own: dict[int, int] = {}
        newest: dict[int, tuple[float, int]] = {}
        for file in self._folder.parent.glob("replica-*/rows.rank0.jsonl"):
            for row in _last_rows(file):
                if row.get("committed"):
                    step, attempt = row["step"], (row["time"], row["quorum"])
                    newest[step] = max(attempt, newest.get(step, attempt))
                    if file.parent == self._folder:
                        own[step] = row["quorum"]
        return {step for step, quorum in own.items() if newest[step][1] != quorum}

    def _meet(self) -> Exception | None:
        """One quorum, with healing; what went wrong."""
        self._note = self._healing.note()
        try:
            self._manager.start_quorum()
        except (TimeoutError, RuntimeError) as error:
            torch_compat.forget_failed_quorum(self._manager)
            if isinstance(error, TimeoutError):
                where = os.environ["TORCHFT_LIGHTHOUSE"]
                return TimeoutError(f"the lighthouse at {where} is away, or too few are there")
            return error
        if (error := self._error()) is not None:
            if isinstance(error, UnlikeGroupsError):
                raise error
            return error
        if self._manager.num_participants() < self._options.min_replica_size:
            time.sleep(0.2)
            return RuntimeError(
                f"{self._manager.num_participants()} are there, fault_tolerance.min_replica_size = "
                f"{self._options.min_replica_size}; the lighthouse was started with a smaller minimum"
            )
        return self._compare()

    def _compare(self) -> Exception | None:
        """Whether the groups are alike and have numbers of their own, once for each set of them.

        UnlikeGroupsError where it is this one, which has just come, that does not fit.
        """
        if torch_compat.quorum_id(self._manager) == self._quorum_of_identity:
            return None
        is_new = self._quorum_of_identity == -1
        part, parts = self._manager.participating_rank(), self._manager.num_participants()
        # Who is part of the run keeps its number; of two that are, one was taken for dead, and the later replaced it.
        claim = -self._started if is_new else self._started
        own = [self._identity, self._options.replica_id, claim]
        table = self._sum([float(value * (part == group)) for group in range(parts) for value in own])
        if self._error() is not None:
            return self._error()
        identities, ids, claims = table[::3], table[1::3], table[2::3]
        if len(set(identities)) > 1:
            error = UnlikeGroupsError(
                "replica groups were started with different options of model, training or optimizer"
            )
            is_meant = is_new
        elif len(set(ids)) < parts:
            error = UnlikeGroupsError(
                f"two replica groups run with the same number: fault_tolerance.replica_id = {sorted(map(int, ids))}"
            )
            is_meant = claim < max(claims[group] for group in range(parts) if ids[group] == own[1])
        else:
            self._quorum_of_identity = torch_compat.quorum_id(self._manager)
            return None
        if is_meant:
            raise error
        return error

    def _leave(self, error: Exception | None) -> None:
        """Breaks up with the groups just met, so that they notice at once, and votes against the step."""
        self._write(left=str(error or "another rank failed")[:200])
        self._manager.report_error(error or RuntimeError("another rank of this replica group failed"))
        self._hang_up(error)
        self._manager.should_commit(timeout=2 * self._timeout)

    def _hang_up(self, error: Exception | None) -> None:
        """Groups that still wait for this one in a collective notice at once."""
        if error is not None:
            error.__traceback__ = error.__context__ = None  # its frames hold the work, and that the connections
        self._pg.abort()

    def _receive_note(self, note: dict[str, Any]) -> None:
        """Not used yet: another rank of this group may have received nothing, and they must not differ."""
        self._received = note

    def _stay_at(self, step: int) -> None:
        """Some rank of this group was not healed, or could not meet the others: as if none had been."""
        self._received = None
        self._manager.load_state_dict({"step": step, "batches_committed": 0})

    def _take_over(self) -> None:
        if self._received is None:
            return
        self._healing.take_over(self._received)
        self._transport.apply()
        self._received = None
        if self._is_first_rank:
            logger.info("healed from another replica group: step %d", self._steps_done)

    @property
    def _steps_done(self) -> int:
        return self._manager.current_step() * self._steps_of_round

    def _count(self) -> None:
        part, parts = self._manager.participating_rank(), self._manager.num_participants()
        assert part is not None
        if self._is_first_rank and (part, parts) != (self.part, self.parts):
            logger.info("step %d: %d replica groups, this one is %d", self._steps_done + 1, parts, part)
        self.part, self.parts, self.writes = part, parts, part == 0

    def sum(self, values: list[float]) -> list[float]:
        """Sums each number over the groups; where that fails the values themselves, and the step will not commit."""
        return self._sum(values)

    def _sum(self, values: list[float]) -> list[float]:
        total = torch.tensor(values, dtype=torch.float64, device=self._device)
        self._manager.allreduce(total, reduce_op=dist.ReduceOp.SUM).wait()
        return values if self._manager.errored() else total.tolist()

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sums the gradients over the groups, in place; this rank's part of them with the same part elsewhere."""
        self._receive(self._send([local_shard(p.grad).detach() for p in parameters if p.grad is not None]))

    def _send(self, tensors: list[Tensor]) -> list[Any]:
        sent = []
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.flatten() for tensor in bucket]).to(self._device)
            sent.append((bucket, flat, self._manager.allreduce(flat, reduce_op=dist.ReduceOp.SUM)))
        return sent

    def _receive(self, sent: list[Any]) -> None:
        """Waits for the sums of what was sent, and puts them in its place."""
        for bucket, flat, work in sent:
            work.wait()
            for tensor, total in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                tensor.copy_(total.view_as(tensor))

    def record(self, rows: range) -> None:
        """Notes which rows of the global order this rank feeds to the attempt."""
        self._write(part=self.part, parts=self.parts, rows=[rows.start, rows.stop])

    def commit(self, *, healthy: bool) -> bool:
        """Whether the step counts: everywhere in this group all went well."""
        if not healthy:
            self._manager.report_error(FloatingPointError("loss or gradient is not finite"))
        self._positions = self._gather(self._healing.positions())
        self._watch.stop()
        return self._vote()

    def complete(self) -> bool:
        """A step that was committed is not taken back."""
        self._healing.take_positions(self._positions)
        return True

    def _gather(self, found: list[Any]) -> list[Any]:
        """What all groups have found; this one's own where that fails, and then the step will not commit."""
        if not found or self.parts == 1:
            return found
        text = bytearray(json.dumps(found).encode())
        lengths = [int(length) for length in self._sum([len(text) * (part == self.part) for part in range(self.parts)])]
        table = torch.zeros(self.parts, max(lengths), dtype=torch.uint8)
        table[self.part, : len(text)] = torch.frombuffer(text, dtype=torch.uint8)
        table = table.to(self._device)
        self._manager.allreduce(table, reduce_op=dist.ReduceOp.SUM).wait()
        if self._error() is not None:
            return found
        texts = [bytes(row[:length]) for row, length in zip(table.tolist(), lengths, strict=True)]
        return [one for text in texts for one in json.loads(text)]

    def _error(self) -> Exception | None:
        error = self._manager.errored()
        return error and error.original_exception

    def _vote(self) -> bool:
        if (error := self._error()) is not None:
            self._hang_up(error)
        committed = self._manager.should_commit(timeout=3 * self._timeout)
        self._write(committed=committed, **({} if error is None else {"error": str(error)[:200]}))
        if not committed and self._is_first_rank:
            logger.warning("the step is repeated: %s", str(error or "a rank failed")[:200])
        return committed

    def _write(self, **values: Any) -> None:
        step = self._manager.current_step() + (0 if values.get("committed") else 1)
        row = {"step": step, "quorum": torch_compat.quorum_id(self._manager), "time": time.time()} | values
        self._records.write(json.dumps(row) + "\n")

    def close(self) -> None:
        """Ends this group's part; the others go on."""
        self._records.close()
        self._manager.shutdown(wait=False)


def _last_rows(file: Path) -> Iterator[dict[str, Any]]:
    """The last ones of a file of JSON lines, without those that are torn."""
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - LAST_BYTES))
        for line in stream.read().splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                yield row


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one type, of about BUCKET_BYTES together."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        full = sum(t.nbytes for t in bucket) >= BUCKET_BYTES
        if bucket and (full or bucket[0].dtype != tensor.dtype):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket

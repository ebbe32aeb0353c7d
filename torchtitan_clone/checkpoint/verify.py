"""Verifies a checkpoint before anything of it is used: sizes, digests, and that all documents agree."""

from io import BufferedReader
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan_clone.checkpoint import commit
from torchtitan_clone.checkpoint.commit import CorruptCheckpointError, Manifest, reading
from torchtitan_clone.checkpoint.index import Index, check_parts, read_index
from torchtitan_clone.checkpoint.layout import INDEX_FILE, OFFSETS_KEY
from torchtitan_clone.checkpoint.loading import agreed_errors
from torchtitan_clone.checkpoint.random_state import MAX_STATE_BYTES, RNG, is_random_state
from torchtitan_clone.checkpoint.tensor_file import NAMES, read_header
from torchtitan_clone.documents import MAX_BYTES, escape, open_regular, parse_json
from torchtitan_clone.ops.dtensor_shards import TensorShard

TENSOR_FILES = ".safetensors"
Parts = dict[str, tuple[int, TensorShard]]
"""First byte and shard of the tensors in one file, by name."""


def verify(folder: Path, *, step: int | None, digests: bool) -> Index:
    """Returns the tensors of a checkpoint, if it is intact; errors as agreed_errors(). Collective.

    `digests` checks the bytes of tensors too. Without them it is still certain that every element of every tensor is
    in the files once, that each file has the tensors that the index says, and that no document contradicts another.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    index: Index = {}
    with agreed_errors(folder):
        manifest = commit.check_sizes(folder, step=step)
        index = read_index(folder, manifest=manifest)
        for name in list(index)[rank::world_size]:
            check_parts(name, index[name])
        by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name].bytes, name))
        dealt = by_size[rank::world_size]  # in turn, to balance the reading
        parts = _parts_of_files(index, files=[name for name in dealt if name.endswith(TENSOR_FILES)])
        for name in dealt:
            if name in parts:
                _check_tensor_file(folder, name, parts=parts[name])
            _check_bytes(folder, name, manifest=manifest, digests=digests)
        if stray := {
            file for tensor in index.values() for file, *_ in tensor.shards if not file.endswith(TENSOR_FILES)
        }:
            raise CorruptCheckpointError(f"{INDEX_FILE}: {min(stray)} is no file of tensors")
    return index


def _parts_of_files(index: Index, *, files: list[str]) -> dict[str, Parts]:
    parts: dict[str, Parts] = {file: {} for file in files}
    for name, tensor in index.items():
        for file, begin, shard in tensor.shards:
            if file not in parts:
                continue
            if name in parts[file]:
                raise CorruptCheckpointError(f"{INDEX_FILE}: {escape(name)} has two parts in {file}")
            parts[file][name] = (begin, shard)
    return parts


def _check_bytes(folder: Path, name: str, *, manifest: Manifest, digests: bool) -> None:
    """Compares the digest of a file, unless it was compared when the file was read."""
    if name in (commit.PROGRESS_FILE, INDEX_FILE):
        return
    is_document = not name.endswith(TENSOR_FILES)
    if is_document and manifest.files[name].bytes > MAX_BYTES:
        raise CorruptCheckpointError(f"{name} has {manifest.files[name].bytes:,} bytes, too many for a document")
    if is_document or digests:
        commit.check_digest(folder, name, manifest=manifest)


def _check_tensor_file(folder: Path, file: str, *, parts: Parts) -> None:
    """Compares the header of a file with the index, in both directions."""
    with reading(file):
        header = read_header(folder / file)
        # Stated for torch's reader.
        offsets = parse_json(header.metadata.get(OFFSETS_KEY, "{}"), where=f"{file}: {OFFSETS_KEY}").plain_entries()
    if header.entries.keys() != parts.keys():
        name = min(header.entries.keys() ^ parts.keys())
        raise CorruptCheckpointError(f"{file} and {INDEX_FILE} disagree: {escape(name)} is in one of them only")
    for name, (begin, shard) in parts.items():
        entry = header.entries[name]
        saved = (entry.dtype, entry.shape, header.begins[name], offsets.get(name))
        if saved != (NAMES[shard.dtype], shard.size, begin, {"saved_offsets": [*shard.offset]}):
            raise CorruptCheckpointError(f"{file} and {INDEX_FILE} disagree about {escape(name)}")
        if name.startswith(RNG):
            _check_random_state(folder, file, name=name, part=(begin, shard))


def _check_random_state(folder: Path, file: str, *, name: str, part: tuple[int, TensorShard]) -> None:
    begin, shard = part
    is_state = shard.dtype is torch.uint8 and shard.size == shard.global_shape and len(shard.size) == 1
    if is_state and 0 < shard.size[0] <= MAX_STATE_BYTES:
        with reading(file), BufferedReader(open_regular(folder / file)) as stream:
            stream.seek(begin)
            state = torch.frombuffer(bytearray(stream.read(shard.size[0])), dtype=torch.uint8)
        if is_random_state(name, state=state):
            return
    raise CorruptCheckpointError(f"{file}: {escape(name)} is not the state of a random number generator")

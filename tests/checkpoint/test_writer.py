"""Files are written completely, with direct I/O if possible, and with or without xxhash."""

import mmap
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.checkpoint_states import save
from torchtitan_clone.checkpoint.folder import CorruptCheckpointError, check_digest, check_sizes, committed_steps
from torchtitan_clone.checkpoint.writer import BLOCK, CHUNK, DIGEST, FileRecord, chunks_of, digest_of, write_file

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("folder", ["/dev/shm", ""])  # tmpfs does not support direct I/O
@pytest.mark.parametrize("shift", [0, 1])
def test_direct_io_writes_files_of_every_length(tmp_path, folder, shift):
    memory = mmap.mmap(-1, 2 * CHUNK + 3 * BLOCK)
    memory[:] = os.urandom(len(memory))
    with tempfile.TemporaryDirectory(dir=folder or tmp_path) as place:
        for size in (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK, CHUNK + 1, 2 * CHUNK + BLOCK + 5):
            file = Path(place) / str(size)
            content = memoryview(memory)[shift : shift + size]
            beats = []
            record = write_file(file, chunks_of(content), direct=True, alive=lambda beats=beats: beats.append(0))
            assert file.read_bytes() == content
            with file.open("rb", buffering=0) as written:
                assert record == FileRecord(bytes=size, digest=digest_of(written, name=DIGEST))
            assert len(beats) == -(-size // CHUNK)


WITHOUT_XXHASH = """
import sys
sys.modules["xxhash"] = None
from pathlib import Path
from torchtitan_clone.checkpoint.folder import check_sizes, write_manifest
from torchtitan_clone.checkpoint.writer import write_file
folder = Path(sys.argv[1])
folder.mkdir()
files = {"progress.json": b'{"step": 7, "tokens_seen": 0, "skipped_steps": 0, "data": {}}', "x": b"numbers"}
write_manifest(folder, step=7, files={name: write_file(folder / name, [text]) for name, text in files.items()})
assert check_sizes(folder, step=7).algorithm == "blake2b"
check_sizes(Path(sys.argv[2]))
"""


def test_without_xxhash_another_digest_is_used(tmp_path):
    save(tmp_path, [1])
    command = [sys.executable, "-c", WITHOUT_XXHASH, tmp_path / "step-7", tmp_path / "step-1"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert "ConfigError" in done.stderr
    assert "was written with xxh3_128 digests, which need a package: pip install xxhash" in done.stderr
    assert committed_steps(tmp_path) == [1, 7]
    manifest = check_sizes(tmp_path / "step-7", step=7)
    check_digest(tmp_path / "step-7", "x", manifest=manifest)
    (tmp_path / "step-7" / "x").write_bytes(b"numberz")
    with pytest.raises(CorruptCheckpointError, match="x does not match its digest"):
        check_digest(tmp_path / "step-7", "x", manifest=manifest)

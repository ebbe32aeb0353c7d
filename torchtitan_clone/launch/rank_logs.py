"""Output of the ranks that the console does not show, for torchrun's elastic agent."""

import os
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, LogsSpecs, Std

STREAMS = ("stderr", "stdout")
LAST_LINES = 20


class FolderLogs(DefaultLogsSpecs):
    """Sends the streams of hidden ranks to new files below a folder, which stay there."""

    def __init__(self, folder: Path, *, ranks: Collection[int], hidden: Collection[int]) -> None:
        super().__init__(str(folder), {rank: Std.ALL if rank in hidden else Std.NONE for rank in ranks})
        self.paths = LogsDest()

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Returns where each rank writes, in a new folder of this launch; "" is the launcher's own stream."""
        self.paths = super().reify(envs)
        return self.paths

    def keep(self) -> Path:
        return Path(self.root_log_dir)


class UnnamedLogs(LogsSpecs):
    """Sends the streams of hidden ranks to files without a name, which a launcher that is killed cannot leave behind.

    OSError if no temporary file can be created.
    """

    def __init__(self, *, hidden: Collection[int]) -> None:
        super().__init__()
        self._files = {(rank, stream): tempfile.TemporaryFile() for rank in hidden for stream in STREAMS}  # noqa: SIM115
        self.paths = LogsDest()

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Returns where each rank writes; "" is the launcher's own stream."""
        paths = {key: f"/proc/self/fd/{file.fileno()}" for key, file in self._files.items()}
        errors, outputs = ({rank: paths.get((rank, stream), "") for rank in envs} for stream in STREAMS)
        self.paths = LogsDest(stdouts=outputs, stderrs=errors, error_files=dict.fromkeys(envs, os.devnull))
        return self.paths

    @property
    def root_log_dir(self) -> str:
        return os.devnull

    def keep(self) -> Path:
        """Copies the files to a new folder, as RANK/STREAM.log. OSError if they cannot be copied."""
        folder = Path(tempfile.mkdtemp(prefix="torchtitan_clone_"))
        for (rank, stream), file in self._files.items():
            copy = folder / str(rank) / f"{stream}.log"
            copy.parent.mkdir(exist_ok=True)
            file.seek(0)
            with copy.open("wb") as kept:
                shutil.copyfileobj(file, kept)
        return folder


RankLogs = FolderLogs | UnnamedLogs


def tail(logs: RankLogs, *, rank: int) -> str:
    """Returns the last lines of a hidden rank's stderr, or of its stdout if stderr is empty."""
    paths = (logs.paths.stderrs.get(rank, ""), logs.paths.stdouts.get(rank, ""))
    contents = (Path(path).read_text(errors="replace") for path in paths if os.path.exists(path))
    return "".join(next(filter(None, contents), "").splitlines(keepends=True)[-LAST_LINES:])

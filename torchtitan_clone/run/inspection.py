"""What a run trains on, from its folder and its prepared data, without starting it.

Shapes: B rows of a global batch, T tokens of a row (seq_len).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import get_args

import numpy as np

from torchtitan_clone.config import Config, ConfigError, load_config
from torchtitan_clone.data import Dataset, Tokenizer, build_tokenizer, open_dataset
from torchtitan_clone.data.row_reader import slice_of_rank
from torchtitan_clone.data.sources import hub_id
from torchtitan_clone.data.token_dataset import TokenDataset
from torchtitan_clone.data.token_store import Split
from torchtitan_clone.documents import DocumentError, parse_json
from torchtitan_clone.observe.goodput import read_rows
from torchtitan_clone.observe.metrics import METRICS_FILE
from torchtitan_clone.run.plan import CONFIG_FILE

PERCENTILES = (10, 50, 90, 99)


@dataclass(frozen=True, kw_only=True)
class InspectedRun:
    """A run folder, or a configuration that has none yet, and its data."""

    config: Config
    folder: Path
    dataset: Dataset
    tokenizer: Tokenizer

    def rows_of_step(self, step: int) -> np.ndarray:
        """Returns the rows [B, T + 1] that a step, counted from 1, trains on, in the order of the global batch."""
        samples = self.samples_of_step(step)
        training = self.config.training
        batch_slice = slice_of_rank(0, num_ranks=1, global_batch_size=len(samples), seq_len=training.seq_len)
        seed = self.config.debug.seed
        reader = self.dataset.train_reader(batch_slice, seed=seed, samples=samples.start, streams=[])
        rows, _ = next(iter(reader))
        return rows

    def samples_of_step(self, step: int) -> range:
        """Returns the samples of a step: from the logged steps around it where the batch size is not in the file."""
        if step < 1:
            raise ConfigError(f"step {step}: steps are counted from 1.")
        if (size := self.config.training.global_batch_size) > 0:
            return range((step - 1) * size, step * size)
        for (first, seen), (last, seen_later) in pairwise(self._tokens_seen):
            if step <= last or last == self._tokens_seen[-1][0]:
                size, rest = divmod(seen_later - seen, (last - first) * self.config.training.seq_len)
                if rest:
                    break  # the batch size changed between them
                start = seen // self.config.training.seq_len + (step - 1 - first) * size
                return range(start, start + size)
        raise ConfigError(
            f"step {step}: training.global_batch_size is -1, and {self.folder / METRICS_FILE} does not tell how many "
            "samples come before; give the size as --training.global_batch_size=N."
        )

    @cached_property
    def _tokens_seen(self) -> list[tuple[int, int]]:
        """Logged steps in order, with the tokens up to each."""
        seen = {0: 0}
        try:
            for line in read_rows(self.folder / METRICS_FILE):
                try:
                    row = parse_json(line, where=METRICS_FILE).entries()
                    if "tokens_seen" in row:
                        seen[row["step"].integer()] = row["tokens_seen"].integer()
                except (DocumentError, KeyError):
                    continue  # a killed process leaves an incomplete line
        except DocumentError as error:
            raise ConfigError(f"{self.folder}: {error}") from error
        return sorted(seen.items())

    def describe_rows(self, step: int, *, rows: list[int]) -> Iterator[str]:
        """Yields the text of rows of a step, one document after another; of all rows if none is named."""
        found = self.rows_of_step(step)
        for row in rows or range(len(found)):
            if not 0 <= row < len(found):
                raise ConfigError(f"row {row}: the global batch of step {step} has the rows 0 to {len(found) - 1}.")
            yield f"step {step}, row {row}"
            yield from self._describe_row(found[row, :-1])

    def _describe_row(self, tokens: np.ndarray) -> Iterator[str]:
        eos_id = self.tokenizer.eos_id
        ends = np.flatnonzero(tokens == eos_id) + 1
        pieces = [piece for piece in np.split(tokens, ends) if len(piece)]
        while pieces and pieces[-1].tolist() == [eos_id]:
            pieces.pop()
        for piece in pieces:
            yield f"--- document of {len(piece):,} tokens"
            yield self.tokenizer.decode([token for token in piece.tolist() if token != eos_id])
        if padding := len(tokens) - sum(map(len, pieces)):
            yield f"--- {padding:,} tokens of padding"

    def describe_documents(self) -> Iterator[str]:
        """Yields a table of the lengths of the documents in each split."""
        if not isinstance(self.dataset, TokenDataset):
            raise ConfigError("the documents of streamed data are not known before they are read.")
        seq_len = self.config.training.seq_len
        yield f"{'split':<12}{'documents':>12}{'tokens':>16}{'mean':>8}" + "".join(f"{p:>7} %" for p in PERCENTILES)
        for split in get_args(Split):
            lengths = np.diff(self.dataset.store.offsets(split))
            if len(lengths):
                quantiles = np.percentile(lengths, PERCENTILES, method="lower").astype(int).tolist()
                row = f"{split:<12}{len(lengths):>12,}{lengths.sum():>16,}{lengths.mean():>8,.0f}"
                yield row + "".join(f"{each:>9,}" for each in quantiles)
                longer = f"{np.mean(lengths > seq_len + 1):.1%} are longer than a row of {seq_len + 1:,} tokens"
                yield f"{'':<12}the longest has {lengths.max():,}; {longer}"


def inspect_run(folder: Path | None, *, words: list[str]) -> InspectedRun:
    """Opens the configuration of a run folder, None: of the command line alone, changed by options. ConfigError."""
    file = [] if folder is None else [f"--job.config_file={folder / CONFIG_FILE}"]
    config = load_config([*file, *words])
    if dataset := hub_id(config.training):
        raise ConfigError(f"training.dataset = {dataset}: streamed data has no order that can be read at any step.")
    if config.data.sources or config.data.stages or config.data.skip_steps:
        raise ConfigError("data.sources, data.stages and data.skip_steps: the rows of a mixture are not shown.")
    tokenizer = build_tokenizer(config.model.hf_assets_path)
    dataset = open_dataset(training=config.training, data=config.data, tokenizer=tokenizer)
    return InspectedRun(config=config, folder=folder or Path(), dataset=dataset, tokenizer=tokenizer)

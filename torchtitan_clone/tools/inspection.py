"""What a run trains on, from its folder and its prepared data, without starting it.

Shapes: B rows of a global batch, T tokens of a row (seq_len).
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import get_args

import numpy as np

from torchtitan_clone.checkpoint.folder import CONFIG_FILE
from torchtitan_clone.config import Config, ConfigError, load_config, load_run_config
from torchtitan_clone.config.checks import find_range_errors
from torchtitan_clone.config.imports import import_modules
from torchtitan_clone.config.resolved import hub_id
from torchtitan_clone.config.schema_training import MAX_STEPS
from torchtitan_clone.config.stages import find_data_errors, has_timeline, resolved_timeline
from torchtitan_clone.data import Dataset, Tokenizer, build_tokenizer, open_dataset
from torchtitan_clone.data.dataset import TokenDataset, slice_of_rank
from torchtitan_clone.data.kinds import list_names
from torchtitan_clone.data.marks import TARGET, ends_of, ids_of, marks_of
from torchtitan_clone.data.mixture import Mixture
from torchtitan_clone.data.mixture_dataset import MixtureDataset
from torchtitan_clone.data.token_store import Split, TokenStore
from torchtitan_clone.documents import DocumentError, parse_json
from torchtitan_clone.observe.goodput import read_rows
from torchtitan_clone.observe.metrics import METRICS_FILE
from torchtitan_clone.tools.duplicates import UniqueStore

PERCENTILES = (10, 50, 90, 99)


@dataclass(frozen=True, kw_only=True)
class LoggedStep:
    """What metrics.jsonl tells of a step."""

    step: int
    tokens_seen: int
    batch: int | None
    """Number of its global batch in data.stages, of a run that has any."""


@dataclass(frozen=True, kw_only=True)
class InspectedRun:
    """A run folder, or a configuration that has none yet, and its data."""

    config: Config
    folder: Path
    dataset: Dataset
    tokenizer: Tokenizer
    logged: tuple[LoggedStep, ...]
    """In order, from a step 0."""

    def rows_of_step(self, step: int) -> list[tuple[str, np.ndarray | None]]:
        """Returns what a step, counted from 1, trains on: source and tokens [T + 1] of each row of the global batch.

        None are the tokens of a stream, which depend on those before it; "" is the source of a run without a mixture.
        """
        if not 1 <= step <= MAX_STEPS:
            raise ConfigError(f"step {step}: steps are counted from 1 to {MAX_STEPS:,}.")
        seed = self.config.debug.seed
        if isinstance(self.dataset, MixtureDataset):
            return self.dataset.read_batch(self.batch_of_step(step, dataset=self.dataset), seed=seed)
        samples = self.samples_of_step(step)
        seq_len = self.config.training.seq_len
        batch_slice = slice_of_rank(0, num_ranks=1, global_batch_size=len(samples), seq_len=seq_len)
        reader = self.dataset.train_reader(batch_slice, seed=seed, samples=samples.start, streams=[])
        rows, _ = next(iter(reader))
        return [("", row) for row in rows]

    def batch_of_step(self, step: int, *, dataset: MixtureDataset) -> int:
        """Returns the global batch of a step: after that of the logged step before it, past the skipped ones."""
        timeline = dataset.mixture.timeline
        known = {each.step: each.batch for each in self.logged if each.batch is not None}
        first = max(each for each in known if each <= step)
        later = min((each for each in known if each > step), default=None)
        if step == first or (later is not None and known[later] - known[first] == later - first):
            return known[first] + step - first  # none were passed over, even if data.skip_steps names some by now
        batches = {first: known[first]}
        for number in range(first + 1, (later or step) + 1):
            batches[number] = timeline.unskipped(batches[number - 1] + 1)
        if later is not None and batches[later] != known[later]:
            skipped = f"batches were passed over between the logged steps {first} and {later}"
            raise ConfigError(f"step {step}: {skipped} that data.skip_steps does not name; inspect one of these.")
        return batches[step]

    def samples_of_step(self, step: int) -> range:
        """Returns the samples of a step: from the logged steps around it, and by the options after the last of them."""
        training = self.config.training
        size = first = 0
        for before, later in pairwise(self.logged):
            end, rest = divmod(later.tokens_seen, training.seq_len)
            steps = later.step - before.step
            size = size or (end - first) // steps
            last = end - first - (steps - 1) * size  # a start may change the size, and its first step is logged
            if rest or last < 1:
                raise ConfigError(f"training.seq_len = {training.seq_len}: not that of step {later.step}; restore it.")
            if step <= later.step:
                start = first + (step - 1 - before.step) * size
                return range(start, end if step == later.step else start + size)
            size, first = last, end
        size = training.global_batch_size if training.global_batch_size > 0 else size
        if size < 1:
            raise ConfigError(f"step {step}: {_unknown_size(self.folder)}")
        start = first + (step - 1 - self.logged[-1].step) * size
        return range(start, start + size)

    def describe_rows(self, step: int, *, rows: list[int]) -> Iterator[str]:
        """Yields the text of rows of a step, one document after another; of all rows if none is named."""
        found = self.rows_of_step(step)
        for row in rows or range(len(found)):
            if not 0 <= row < len(found):
                raise ConfigError(f"row {row}: the global batch of step {step} has the rows 0 to {len(found) - 1}.")
            source, tokens = found[row]
            yield f"step {step}, row {row}" + (f", source {source}" if source else "")
            if tokens is None:
                yield "--- streamed: the text of a row is known only after that of all steps before"
            else:
                yield from self._describe_row(tokens[:-1])

    def _describe_row(self, tokens: np.ndarray) -> Iterator[str]:
        eos_id = self.tokenizer.eos_id
        ends = np.flatnonzero(ends_of(tokens, marks=marks_of(tokens), eos_id=eos_id)) + 1
        pieces = [piece for piece in np.split(tokens, ends) if len(piece)]
        while pieces and pieces[-1].tolist() == [eos_id]:
            pieces.pop()
        for piece in pieces:
            if (marks := marks_of(piece)) is not None:
                yield from self._describe_chat(ids_of(piece), is_target=marks & TARGET > 0)
                continue
            yield f"--- document of {len(piece):,} tokens"
            yield self.tokenizer.decode([token for token in piece.tolist() if token != eos_id])
        if padding := len(tokens) - sum(map(len, pieces)):
            yield f"--- {padding:,} tokens of padding"

    def _describe_chat(self, ids: np.ndarray, *, is_target: np.ndarray) -> Iterator[str]:
        """Yields the text of the targets, and of what is between them, in quotes."""
        yield f"--- chat of {len(ids):,} tokens, of which {np.count_nonzero(is_target):,} are targets"
        changes = np.flatnonzero(np.diff(is_target)) + 1
        for run, are_targets in zip(np.split(ids, changes), np.split(is_target, changes), strict=True):
            text = json.dumps(self.tokenizer.decode(run.tolist()), ensure_ascii=False)
            yield f"{'target' if are_targets[0] else 'context':<8}{text}"

    def describe_documents(self) -> Iterator[str]:
        """Yields a table of the lengths of the documents in each split of each local source."""
        sources = self.dataset.sources if isinstance(self.dataset, MixtureDataset) else {"": self.dataset}
        yield f"{'split':<12}{'documents':>12}{'tokens':>16}{'mean':>8}" + "".join(f"{p:>7} %" for p in PERCENTILES)
        for name, source in sources.items():
            if name:
                yield f"source {name}"
            if isinstance(source, TokenDataset):
                yield from self._describe_store(source.store)
            else:
                yield "streamed: its documents are not known before they are read"

    def _describe_store(self, store: TokenStore) -> Iterator[str]:
        seq_len = self.config.training.seq_len
        for split in get_args(Split):
            lengths = np.diff(store.offsets(split))
            if len(lengths):
                quantiles = np.percentile(lengths, PERCENTILES, method="lower").astype(int).tolist()
                row = f"{split:<12}{len(lengths):>12,}{lengths.sum():>16,}{lengths.mean():>8,.0f}"
                yield row + "".join(f"{each:>9,}" for each in quantiles)
                longer = f"{np.mean(lengths > seq_len + 1):.1%} are longer than a row of {seq_len + 1:,} tokens"
                yield f"{'':<12}the longest has {lengths.max():,}; {longer}"
        files = store.base.files if isinstance(store, UniqueStore) else store.files
        yield f"{'':<12}read from {list_names(files, root=Path(os.path.commonpath([file.parent for file in files])))}"
        if isinstance(store, UniqueStore):
            dropped = sum(store.base.meta.documents.values()) - sum(store.meta.documents.values())
            yield f"{'':<12}{dropped:,} documents are dropped as duplicates"

    def describe_plan(self) -> Iterator[str]:
        """Yields tables of what each stage of a mixture, and the run, read of each source."""
        if not isinstance(self.dataset, MixtureDataset):
            raise ConfigError("the run has no data.sources, data.stages or data.skip_steps, and so no plan of them.")
        steps, timeline = self.config.training.steps, self.dataset.mixture.timeline
        last = self.batch_of_step(steps, dataset=self.dataset)
        end = timeline.first_sample(batch=last + 1)
        tokens, epochs = self.dataset.mixture.tokens_by_stage(end), self.dataset.epochs_by_stage(end)
        for index, stage in enumerate(timeline.stages):
            following = timeline.stages[index + 1].first_batch if index + 1 < len(timeline.stages) else last + 1
            batches = f"{max(0, min(following, last + 1) - stage.first_batch):,} batches"
            size = f"{stage.global_batch_size:,} sequences of {stage.seq_len:,} tokens"
            yield f"stage {index + 1}, from step {stage.first_batch:,}: {batches} of {size}"
            by_source = {name: each[index] for name, each in epochs.items()}
            yield from _describe_shares(tokens[index], weights=stage.weights, epochs=by_source)
        yield f"all {steps:,} steps"
        total = tokens.sum(axis=0)
        weights = dict(zip(self.dataset.sources, total.tolist(), strict=True))
        yield from _describe_shares(total, weights=weights, epochs=self.dataset.epochs_before(end))


def _describe_shares(tokens: np.ndarray, *, weights: Mapping[str, float], epochs: Mapping[str, float]) -> Iterator[str]:
    """Yields a row for each source; the epochs of a streamed one are not known."""
    yield f"    {'source':<20}{'share':>9}{'tokens':>20}{'epochs':>10}"
    sum_of_weights = sum(weights.values()) or 1
    for (name, weight), count in zip(weights.items(), tokens.tolist(), strict=True):
        times = f"{epochs[name]:.3f}" if name in epochs else "-"
        yield f"    {name:<20}{weight / sum_of_weights:>9.2%}{count:>20,}{times:>10}"


def inspect_run(folder: Path | None, *, words: list[str]) -> InspectedRun:
    """Opens the configuration of a run folder, None: of $CONFIG_FILE if set, changed by options. ConfigError."""
    config = load_config([f"--job.config_file={folder / CONFIG_FILE}", *words]) if folder else load_run_config(words)
    import_modules((load_config(words) if folder else config).job.imports)  # no module that a folder names
    if errors := [*find_range_errors(config, at=""), *find_data_errors(config.data, training=config.training)]:
        raise ConfigError(errors)
    if (dataset := hub_id(config.training)) and not config.data.sources:
        raise ConfigError(f"training.dataset = {dataset}: streamed data has no order that can be read at any step.")
    folder = folder or Path()
    logged = _read_logged(folder / METRICS_FILE)
    tokenizer = build_tokenizer(config.model.hf_assets_path, add_bos=config.data.add_bos)
    mixture = _mixture(config, folder, logged)
    dataset = open_dataset(training=config.training, data=config.data, tokenizer=tokenizer, mixture=mixture)
    return InspectedRun(config=config, folder=folder, dataset=dataset, tokenizer=tokenizer, logged=logged)


def _mixture(config: Config, folder: Path, logged: tuple[LoggedStep, ...]) -> Mixture | None:
    """Returns the order of the samples of a mixture; ConfigError if neither options nor metrics tell the batch size."""
    training = config.training
    size = training.global_batch_size
    if not has_timeline(config.data, training=training):
        return None
    if size < 1:
        first = [each.tokens_seen for each in logged if each.step == 1]  # a batch of any shape
        if not first or first[0] % training.seq_len:
            raise ConfigError(_unknown_size(folder))
        size = first[0] // training.seq_len
    timeline = resolved_timeline(config.data, training=training, global_batch_size=size)
    return None if timeline is None else Mixture(timeline, seed=config.debug.seed)


def _unknown_size(folder: Path) -> str:
    return (
        f"training.global_batch_size is -1, and {folder / METRICS_FILE} does not tell how many samples come before; "
        "give the size as --training.global_batch_size=N."
    )


def _read_logged(file: Path) -> tuple[LoggedStep, ...]:
    found = {0: LoggedStep(step=0, tokens_seen=0, batch=0)}
    try:
        for line in read_rows(file):
            try:
                row = parse_json(line, where=METRICS_FILE).entries()
                if "tokens_seen" in row:
                    step, batch = row["step"].integer(), row["batch"].integer() if "batch" in row else None
                    found[step] = LoggedStep(step=step, tokens_seen=row["tokens_seen"].integer(), batch=batch)
            except (DocumentError, KeyError):
                continue  # a killed process leaves an incomplete line
    except DocumentError as error:
        raise ConfigError(f"{file}: {error}") from error
    return tuple(found[step] for step in sorted(found))

"""Mixtures of the data tests: two local sources and a hub dataset, in three stages."""

from tests.data.corpora import TOKENIZER, jsonl, texts, write
from torchtitan_clone.config.schema_training import Data, DataSource, Stage, Training
from torchtitan_clone.config.stages import resolved_timeline
from torchtitan_clone.data import Loader, LoaderOptions, open_dataset
from torchtitan_clone.data.mixture import Mixture

SEQ_LEN = 16
GLOBAL_BATCH = 8
STAGES = [
    Stage(first_step=31, weights={"web": 0.2, "code": 0.3, "hub": 0.5}),
    Stage(first_step=61, seq_len=32, weights={"code": 0.5, "hub": 0.5}),
]


def write_sources(folder):
    """Writes the text of all sources; the hub dataset is read from below the current folder."""
    write(folder, {"web/a.jsonl": jsonl(texts(60, seed=1)), "code/a.jsonl": jsonl(texts(40, seed=2))})
    write(folder, {"org/name/a.jsonl": jsonl(texts(80, seed=3, words=25))})


def sources(folder, *, has_hub=True, **changes):
    """Returns the sources; `changes` are options of them by name."""
    web = {"name": "web", "path": str(folder / "web"), "weight": 0.6}
    code = {"name": "code", "path": str(folder / "code"), "weight": 0.1}
    hub = {"name": "hub", "dataset": "org/name", "weight": 0.3}
    entries = [web, code, *([hub] if has_hub else [])]
    return [DataSource(**entry | changes.get(entry["name"], {})) for entry in entries]


def open_mixture(folder, *, entries=None, stages=STAGES, skip_steps=(), steps=None, tokenizer=TOKENIZER, **training):
    """Opens a mixture; `steps` checks it for a run of that length."""
    data = Data(
        sources=sources(folder) if entries is None else entries,
        stages=list(stages),
        skip_steps=[list(each) for each in skip_steps],
        held_out_fraction=0.1,
        cache_folder=str(folder / "cache"),
    )
    options = Training(**{"seq_len": SEQ_LEN, **training})
    timeline = resolved_timeline(data, training=options, global_batch_size=GLOBAL_BATCH)
    mixture = None if timeline is None else Mixture(timeline, seed=0)
    dataset = open_dataset(training=options, data=data, tokenizer=tokenizer, mixture=mixture)
    if steps is not None:
        dataset.check(steps=steps)
    return dataset


class Run:
    """Reads global batches as a trainer does, with a new loader for each phase; the ranks take turns."""

    def __init__(
        self,
        dataset,
        *,
        num_ranks=1,
        num_workers=0,
        state=None,
        local_batch_size=1,
        split=1,
        allow_change=False,
        reads_ahead=False,
    ):
        self._dataset = dataset
        self._allow_change = allow_change
        self._num_ranks = num_ranks
        self._options = {"num_workers": num_workers, "local_batch_size": local_batch_size}
        self._split = split
        self._reads_ahead = reads_ahead
        self._phase = None
        self.loaders = []
        self._open(state)

    def _open(self, state):
        timeline = self._dataset.mixture.timeline
        samples = state["samples"] if state else 0
        self._phase = timeline.phase_stage(batch=timeline.unskipped(timeline.batch_at(samples)))
        self.loaders = []
        for rank in range(self._num_ranks):
            sizes = {"seq_len": self._phase.seq_len, "document_masking": True}
            options = LoaderOptions(rank=rank, num_ranks=self._num_ranks, **sizes)
            loader = Loader(
                self._dataset,
                options=options,
                seed=0,
                global_batch_size=self._phase.global_batch_size,
                gather_positions=lambda _: self._gather(),
                **self._options,
            )
            if state:
                loader.load_state_dict(state, allow_change=self._allow_change)
            self.loaders.append(loader)

    def _gather(self):
        return [position for loader in self.loaders for position in loader.stream_positions]

    def batches(self, count):
        """Returns the next batches of all ranks."""
        found = []
        for _ in range(count):
            timeline = self._dataset.mixture.timeline
            if timeline.phase_stage(batch=self.loaders[0].next_batch_number) is not self._phase:
                self._open(self.state())
            found.append([loader.next_batch() for loader in self.loaders])
            for loader in self.loaders:
                if self._reads_ahead:
                    loader.read_ahead()
                loader.commit()
        return found

    def state(self):
        """Returns the state, which must be the same on all ranks."""
        states = [loader.state_dict() for loader in self.loaders]
        assert all(state == states[0] for state in states)
        return states[0]

"""Options that decide what is trained: the model, the data, batches and the optimizer; and the ranges of numbers."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple


class Range(NamedTuple):
    """Values that a number accepts, from `low` to `high`; `above` and `below` exclude an end, `or_auto` adds -1."""

    low: float
    high: float
    above: bool = False
    below: bool = False
    or_auto: bool = False

    def holds(self, value: float) -> bool:
        """Returns whether the value is in the range; NaN is in none."""
        if self.or_auto and value == -1:
            return True
        above = self.low < value if self.above else self.low <= value
        return above and (value < self.high if self.below else value <= self.high)

    def describe(self) -> str:
        """Returns the range in words that complete "must be ..."."""
        low, high = (f"{end:,}" if isinstance(end, int) else f"{end:g}" for end in (self.low, self.high))
        if self.above or self.below:
            words = f"{'above' if self.above else 'at least'} {low} and {'below' if self.below else 'at most'} {high}"
        else:
            words = f"from {low} to {high}"
        return f"-1 or {words}" if self.or_auto else words


MAX_STEPS = 10**12
MAX_SIZE = 10**9
MAX_SECONDS = 2_000_000
"""23 days; poll() takes at most 2**31 - 1 milliseconds."""

Size = Annotated[int, Range(1, MAX_SIZE)]
AutoOrSize = Annotated[int, Range(1, MAX_SIZE, or_auto=True)]
Count = Annotated[int, Range(0, MAX_SIZE)]
Degree = Annotated[int, Range(1, 10**6)]
AutoOrDegree = Annotated[int, Range(1, 10**6, or_auto=True)]
Steps = Annotated[int, Range(1, MAX_STEPS)]
StepsOrZero = Annotated[int, Range(0, MAX_STEPS)]
Seconds = Annotated[int, Range(1, MAX_SECONDS)]
Duration = Annotated[float, Range(0.0, float(MAX_SECONDS), above=True)]
Milliseconds = Annotated[int, Range(1, 1000 * MAX_SECONDS)]
LearningRate = Annotated[float, Range(0.0, 1e30, above=True)]
OptimizerEpsilon = Annotated[float, Range(1e-30, 1e30)]  # float32 rounds less than 1e-45 to 0, and 0 / 0 is NaN
Decay = Annotated[float, Range(0.0, 1e6)]
Fraction = Annotated[float, Range(0.0, 1.0, below=True)]
UnitInterval = Annotated[float, Range(0.0, 1.0)]
AboveZero = Annotated[float, Range(0.0, math.inf, above=True)]
WEIGHTS = Range(0.0, 1e12)
Weight = Annotated[float, WEIGHTS]


FROM_FOLDER = "from_folder"
"""Value of both model.name and model.flavor where neither is set and a run starts from a Hugging Face folder."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """Model family, size and tokenizer."""

    name: str = "llama3"
    """Model family: llama3, qwen3, qwen3_moe, qwen3_5, qwen3_5_moe, qwen3_next, deepseek_v3, deepseek_v32, gpt_oss,
    llama4, olmo2, olmo3, olmo_hybrid, qwen2, mistral, ministral3, mistral4, smollm3, granite, kimi_k2, kimi_linear,
    glm4_moe, glm_moe_dsa, minimax_m2, gemma3, apertus or gpt2."""
    flavor: str = "debugmodel"
    """Predefined size within the family, for example "debugmodel", "1B" or "8B"."""
    args: dict[str, object] = field(default_factory=dict[str, object])
    """Overrides of the flavor's model arguments, for example --model.args.n_layers=4; validated against the family."""
    hf_assets_path: str | None = None
    """Folder with tokenizer.json, and tokenizer_config.json that names the eos_token; unset: the bundled tokenizer with
    2,048 tokens."""
    converters: list[Literal["float8", "quantize.linear.float8"]] = field(
        default_factory=list[Literal["float8", "quantize.linear.float8"]]
    )
    """Conversions of the model: both names compute linear layers in float8 (extra "float8"), as [quantize] says."""


@dataclass(frozen=True, kw_only=True)
class Freeze:
    """One entry of training.freeze_schedule: options that apply from a given step on."""

    step: Steps
    """First optimizer step at which this entry applies, counted from 1."""
    layers: Size
    """Number of frozen blocks, counted from the input; the embedding is frozen with them."""
    pipeline_parallel_degree: Degree | None = None
    """Pipeline-parallel degree from this step on; freed ranks join the shard axis. Unset: unchanged."""
    local_batch_size: Size | None = None
    """Micro-batch size per data-parallel rank from this step on, in sequences; unset: unchanged."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Data source, batch size, number of steps and precision."""

    dataset: str = "stdlib"
    """Key of data.DATASETS, or a Hugging Face dataset to stream: "org/name", or with a commit and a subset
    "org/name@commit:subset" (extra "data")."""
    dataset_path: str | None = None
    """Text, .jsonl or .parquet file, also compressed, or a folder of them; takes precedence over dataset. Local, or the
    URL of an object store, s3://BUCKET/PREFIX (extra "cloud"), which may also be a token store."""
    text_key: str = "text"
    """Field of a .jsonl record, or column of a .parquet file or Hugging Face dataset, that holds the text."""
    parse_special_tokens: bool = False
    """Encode special tokens that a text spells out, such as "<|im_start|>", as their ids; otherwise as characters."""
    format: Literal["text", "chat"] = "text"
    """What each row of local files is. chat: "messages", or "prompt" and "completion", which the tokenizer's chat
    template renders."""
    supervise: Literal["assistant", "last", "all"] = "assistant"
    """Targets in chats: the assistant's turns with their end-of-turn tokens, its last turn, or all tokens."""
    supervise_thinking: bool = True
    """Whether what the assistant thinks in these turns is a target; false: its answers and calls of tools are."""
    supervise_tool_calls: bool = True
    """Whether the assistant's calls of tools in these turns are targets. Results of tools are only with "all"."""
    long_chats: Literal["drop", "cut"] = "drop"
    """What packing by best fit does with chats longer than a row: leave them out, or cut them after a turn that is a
    target."""
    seq_len: Size = 2048
    """Sequence length, in tokens."""
    local_batch_size: Size = 8
    """Micro-batch size per data-parallel rank, in sequences."""
    global_batch_size: AutoOrSize = -1
    """Sequences per optimizer step over all ranks and replica groups; -1: one micro-batch per data-parallel rank."""
    document_masking: bool = True
    """Restrict attention and positions to each document; false: treat each sequence as one document."""
    steps: Steps = 10000
    """Total number of optimizer steps."""
    max_norm: AboveZero = 1.0
    """Maximum global gradient norm; larger gradients are scaled down to it. inf disables clipping."""
    loss_chunk_tokens: AutoOrSize = -1
    """Tokens per chunk of the output projection and loss; smaller chunks save memory, larger chunks are faster. -1:
    the power of two with logits of at most 256 MiB, at least 1,024, or on a CPU of at most 128 MiB, 512 to 1,024."""
    z_loss: Annotated[float, Range(0.0, 1.0)] = 0.0
    """Coefficient of the squared logarithm of the softmax's denominator (mean over targets), which is added to the loss
    of the next token and logged as auxiliary/output_z; it keeps logits small, for example 1e-5. 0: none."""
    max_skipped_steps: StepsOrZero = 10
    """Maximum number of consecutive steps skipped for a non-finite loss or gradient norm; one more is an error."""
    on_spike: Literal["none", "skip", "rewind"] = "none"
    """What to do in a step whose loss or gradient norm is far above those of the last steps: nothing, or leave weights
    and optimizer state as they are. rewind: also go back to a checkpoint after spike_patience spikes in a row, and pass
    over the batches since."""
    spike_window: Annotated[int, Range(4, 10**5)] = 128
    """Number of last steps that a step is compared with; none is a spike before half as many."""
    spike_sigma: Annotated[float, Range(1.0, 1e6)] = 6.0
    """Standard deviations above the mean of these steps, past which a step is a spike."""
    spike_patience: Steps = 10
    """Number of spikes in a row after which their level counts as normal or, with "rewind", the run goes back."""
    max_rewinds: Annotated[int, Range(1, 1000)] = 3
    """Maximum number of times that a run goes back to a checkpoint because of spikes; once more is an error."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the master weights and optimizer state."""
    mixed_precision_param: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of weights and activations in forward and backward; auto: bfloat16, or float32 on processors without
    bfloat16 units. Decays of linear attention keep that of `dtype`."""
    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"
    """Data type of the gradient reduction across ranks."""
    init_cutoff: Annotated[float, Range(1e-3, math.inf)] = 3.0
    """Standard deviations at which initial values are clamped; inf does not clamp."""
    freeze_schedule: list[Freeze] = field(default_factory=list[Freeze])
    """Entries in order of step that freeze the first blocks during the run, for example [{step = 100, layers = 4}]."""
    enable_cpu_offload: bool = False
    """Keep master weights, gradients and optimizer state in host memory."""
    gc_freq: Steps = 50
    """Interval of Python garbage collection, in steps; automatic collection is disabled."""
    max_seconds: Annotated[float, Range(0.0, 1e9, above=True)] | None = None
    """Time limit of the process, in seconds; the run stops in time for one more step and for a save like the longest of
    this process so far. Leave time for its first save, and for exports. Unset: no limit."""


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """One entry of data.sources: text, and its share of the mixture."""

    name: str
    """Name of the source in data.stages, messages and metrics."""
    path: str | None = None
    """File or folder, as training.dataset_path; set this or dataset."""
    dataset: str | None = None
    """Name of a dataset, as training.dataset."""
    text_key: str = "text"
    """Field or column that holds the text, as training.text_key."""
    parse_special_tokens: bool = False
    """Encode special tokens that a text spells out as their ids, as training.parse_special_tokens."""
    format: Literal["text", "chat"] = "text"
    """What each row is, as training.format."""
    supervise: Literal["assistant", "last", "all"] = "assistant"
    """Targets in chats, as training.supervise."""
    supervise_thinking: bool = True
    """Whether thoughts are targets, as training.supervise_thinking."""
    supervise_tool_calls: bool = True
    """Whether calls of tools are targets, as training.supervise_tool_calls."""
    long_chats: Literal["drop", "cut"] = "drop"
    """What becomes of chats longer than a row, as training.long_chats."""
    weight: Weight = 1.0
    """Share of the tokens, relative to the sum over all sources; 0: none, except where a stage gives another."""
    max_epochs: Annotated[float, Range(1e-6, 1e6)] | None = None
    """Maximum number of times that the source may be read in the run, an error before the start if exceeded. Unset: no
    limit."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One entry of data.stages: options of the data from a given step on. Unset options keep the value before."""

    first_step: Steps
    """First step of the stage, counted from 1; steps that data.skip_steps passes over are counted."""
    weights: dict[str, float] = field(default_factory=dict[str, float])
    """Share of the tokens by name of the source, for example {web = 0.7, code = 0.3}; sources not named have none."""
    seq_len: Size | None = None
    """Sequence length, in tokens; unless set too, the batch sizes change with it to keep the tokens of a batch."""
    global_batch_size: Size | None = None
    """Sequences per optimizer step."""
    local_batch_size: Size | None = None
    """Micro-batch size per data-parallel rank, in sequences."""
    rope_theta: AboveZero | None = None
    """Base of the rotary positions, as model.args.rope_theta."""
    rope_scaling: dict[str, object] | None = None
    """Scaling of the rotary positions, as model.args.rope_scaling."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Sources and stages of the data, tokenization, caching and loading."""

    sources: list[DataSource] = field(default_factory=list[DataSource])
    """Sources of a mixture, instead of training.dataset and training.dataset_path."""
    stages: list[Stage] = field(default_factory=list[Stage])
    """Changes of the mixture, the sequence length or the batch size during the run, in order of their steps. Stages may
    be added while a run is under way, from a step that is not trained."""
    skip_steps: list[list[int]] = field(default_factory=list[list[int]])
    """Global batches that are passed over, as ranges [first, last] of the steps that would train them, in order; for
    example [[1200, 1250]] after a loss spike. Batches that were trained stay trained."""

    num_workers: Annotated[int, Range(0, 1024)] = 0
    """Data loading processes per rank, which need a writable /dev/shm; 0, enough for local tokens, has none."""
    cache_folder: str | None = None
    """Cache folder of tokenized datasets; unset: torchtitan_clone in $XDG_CACHE_HOME or ~/.cache."""
    cache_gib: Annotated[float, Range(0.25, 1e6)] = 50.0
    """Maximum size in cache_folder of what is read from object stores, in GiB: of blocks of token stores, and of files
    that are tokenized, each. What was used least recently is removed."""
    add_bos: bool | None = None
    """Put the beginning-of-text token of the tokenizer before each text; unset: as the files of the tokenizer say."""
    prepare_processes: Annotated[int, Range(1, 1024, or_auto=True)] = -1
    """Number of processes that tokenize a new dataset; -1: one per CPU core."""
    held_out_fraction: Fraction = 0.01
    """Fraction of documents, selected by hash, that is held out for validation; 0 holds out none."""
    packing: Literal["concatenate", "best_fit"] = "concatenate"
    """How local documents become sequences. concatenate: joined, and cut every seq_len tokens; best_fit: packed whole,
    so that only longer ones are cut, which requires training.document_masking."""
    drop_duplicates: bool = False
    """Drop local documents whose tokens equal those of a document before, in the same source or in an earlier one."""
    max_bad_rows: StepsOrZero = 0
    """Maximum number of unreadable records (invalid JSON, missing key, invalid UTF-8) to skip; one more is an error."""


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """Training on what a teacher predicts for each target besides the target itself."""

    teacher_path: str | None = None
    """Folder of the teacher, with the vocabulary of the model: of a run, of a step, or in the Hugging Face format. Its
    predictions are computed in each step; unset: there is none, or they are read from the store."""
    store: str | None = None
    """Folder that scripts/store_predictions.py wrote for this data, instead of teacher_path."""
    alpha: UnitInterval = 0.5
    """Share of the divergence from the teacher in the objective (1 - alpha) CE + alpha T^2 KL(teacher || student); the
    rest is that of the cross-entropy."""
    temperature: Annotated[float, Range(0.01, 100.0)] = 1.0
    """Number T that the logits of both are divided by in the divergence."""

    @property
    def is_enabled(self) -> bool:
        """Whether there is a teacher."""
        return self.teacher_path is not None or self.store is not None


@dataclass(frozen=True, kw_only=True)
class OptimizerGroup:
    """One entry of optimizer.groups: options of the parameters whose names match a pattern."""

    pattern: str
    """Pattern of parameter names in a checkpoint, for example "layers.*.attention.wq.weight": * matches any characters,
    including dots, ? matches one, and [0-3] one of these."""
    name: str | None = None
    """Optimizer of these parameters, a key of optim.OPTIMIZERS; unset: optimizer.name."""
    lr: LearningRate | None = None
    """Peak learning rate; unset: optimizer.lr."""
    lr_points: list[list[float]] = field(default_factory=list[list[float]])
    """Further factor of this learning rate, as pairs [step, factor] like those of lr_scheduler.points; []: 1."""
    weight_decay: Decay | None = None
    """Weight decay of all matched parameters, vectors included; unset: as set in [optimizer]."""
    beta1: Fraction | None = None
    """Decay rate of the first moment; unset: optimizer.beta1."""
    beta2: Fraction | None = None
    """Decay rate of the second moment; unset: optimizer.beta2."""
    eps: OptimizerEpsilon | None = None
    """Term added to the denominator of the update; unset: optimizer.eps."""
    args: dict[str, object] = field(default_factory=dict[str, object])
    """Options of this group's optimizer, as in optimizer.args, which they override if it is the same optimizer."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Optimizer, its hyperparameters and parameter groups."""

    name: str = "AdamW"
    """Optimizer: a key of optim.OPTIMIZERS (AdamW, Adam, Muon). Muon updates the matrices of the layers; AdamW, at the
    same learning rate, updates vectors, the embedding and the output projection."""
    lr: LearningRate = 8e-4
    """Peak learning rate."""
    beta1: Fraction = 0.9
    """Decay rate of the first moment (running average of gradients)."""
    beta2: Fraction = 0.95
    """Decay rate of the second moment (running average of squared gradients)."""
    eps: OptimizerEpsilon = 1e-8
    """Term added to the denominator of the update for numerical stability."""
    weight_decay: Decay = 0.1
    """Weight decay of matrices, decoupled in AdamW; also of vectors with decay_all_parameters."""
    decay_all_parameters: bool = False
    """Apply weight decay to vectors (norm weights, biases) too."""
    implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    """Implementation of the PyTorch optimizer. On a GPU a kernel of this package replaces "fused" for large weights."""
    args: dict[str, object] = field(default_factory=dict[str, object])
    """Options that only this optimizer has, for example momentum and adjust_lr of Muon (optim.muon.MuonArgs)."""
    qk_clip: AboveZero | None = None
    """Attention logit above which a step scales the weights of queries and keys of that head down, for example 100;
    inf only logs the largest logit. Unset: neither."""
    qk_clip_alpha: UnitInterval = 0.5
    """Share of the scaling that queries get, as the exponent of its factor; keys get the rest."""
    groups: list[OptimizerGroup] = field(default_factory=list[OptimizerGroup])
    """Options by parameter name, for example [{pattern = "*embeddings.weight", lr = 3e-3}]. The first matching entry
    applies; a pattern without a match is an error; all other parameters use the options of this table."""


@dataclass(frozen=True, kw_only=True)
class LRScheduler:
    """Learning rate schedule: linear warmup, then constant, then decay."""

    warmup_steps: StepsOrZero = 200
    """Number of linear warmup steps from learning rate 0, limited to the steps of the schedule."""
    total_steps: Steps | None = None
    """Number of steps of the schedule, for runs that end before it; unset: training.steps. Later steps have the final
    learning rate."""
    decay_ratio: Annotated[float, Range(0.0, 1.0, above=True)] | None = None
    """Fraction of all steps spent in decay at the end, limited to the steps after the warmup; unset: all of those."""
    decay_type: str = "linear"
    """Decay curve: a key of optim.SCHEDULES (linear, cosine, sqrt, inverse_sqrt). The last one needs no end: it is
    sqrt(s / (step - 1)), where the decay begins after step s, and at least min_lr_factor."""
    min_lr_factor: UnitInterval = 0.0
    """Final learning rate, as a fraction of the peak."""
    points: list[list[float]] = field(default_factory=list[list[float]])
    """Schedule of its own, instead of the options above: pairs [step, factor of the peak], with linear interpolation
    between them, for example [[0, 0.0], [200, 1.0], [9000, 1.0], [10000, 0.1]]."""
    weight_decay_points: list[list[float]] = field(default_factory=list[list[float]])
    """Schedule of the weight decay of every group, as pairs [step, factor] like those of points; []: constant."""
    momentum_points: list[list[float]] = field(default_factory=list[list[float]])
    """Schedule of the momentum of Muon and of beta1 of AdamW and Adam, as pairs [step, factor from 0 to 1]; []:
    constant."""

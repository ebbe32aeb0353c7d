"""Options of a run: one frozen dataclass per TOML table. The docstring under a field is its `--help` text.

Names follow torchtitan v0.2 wherever the meaning is the same. Rules that relate several fields are in checks.py.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from torchtitan_clone.config.schema_cluster import Cluster, Slurm
from torchtitan_clone.config.schema_training import (
    MAX_STEPS,
    AutoOrDegree,
    AutoOrSize,
    Count,
    Data,
    Degree,
    Distillation,
    Duration,
    Fraction,
    LRScheduler,
    Milliseconds,
    Model,
    Optimizer,
    Range,
    Seconds,
    Size,
    Steps,
    StepsOrZero,
    Training,
    UnitInterval,
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """Name of the run and where it writes."""

    config_file: str | None = None
    """TOML file of the run, given on the command line as --job.config_file=FILE."""
    extends: str | None = None
    """Base TOML file, relative to this file; its values apply to every key that this file does not set."""
    imports: list[str] = field(default_factory=list[str])
    """Modules of your own that every rank imports first, for example ["my_optimizers"]: they add models, datasets,
    optimizers and schedules (docs/extending.md). Found as by python -m: in the current folder and PYTHONPATH."""
    description: str = ""
    """One-line description of the run, logged at startup."""
    dump_folder: str = "./outputs"
    """Parent folder of all run folders."""
    run_name: str | None = None
    """Name of the run's folder in dump_folder; unset: the name of the TOML file without its suffix."""
    dry_run: bool = False
    """Validate the configuration, print the run plan and exit without training. --dry-run is a shorthand."""
    dry_run_all: bool = False
    """Print all options in a dry run, not only those that differ from their defaults. --all is a shorthand."""
    dry_run_device: str = "auto"
    """Device for which a dry run or simulation checks the configuration: cpu, cuda, or a hardware table such as h100 or
    my_machine.toml, for which it also predicts the step time. auto: cuda if an option requires it, else that of this
    machine. --device is a shorthand."""


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Degrees and options of each parallelism; the product of all but the expert degree is the world size."""

    data_parallel_replicate_degree: Degree = 1
    """Number of model replicas with averaged gradients; combined with a shard degree above 1 this is HSDP."""
    data_parallel_shard_degree: AutoOrDegree = -1
    """FSDP2 sharding degree of weights, gradients and optimizer state; -1: all remaining ranks."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free gathered weights between forward and backward; default: always, except with pipeline parallelism."""
    fsdp_prefetch_blocks: Degree = 1
    """Number of blocks gathered ahead; 1 is FSDP2's implicit prefetch, more hide slow networks and use memory."""
    fsdp_blocks_per_group: AutoOrSize = -1
    """Maximum number of consecutive blocks that FSDP gathers and reduces together; where it is above 1,
    fsdp_prefetch_blocks counts such groups. -1: 1, on a CPU as many small blocks as have 16 MiB of weights."""
    tensor_parallel_degree: Degree = 1
    """Tensor-parallel degree: number of ranks that shard each weight matrix."""
    enable_async_tensor_parallel: bool = False
    """Decompose matrix products and their collectives so that they overlap; requires CUDA and compile.enable."""
    pipeline_parallel_degree: Degree = 1
    """Pipeline-parallel degree: number of ranks that split the layers."""
    pipeline_parallel_schedule: str = "1F1B"
    """Pipeline schedule: GPipe, 1F1B, LoopedBFS, Interleaved1F1B, InterleavedZeroBubble, ZBVZeroBubble or DualPipeV.
    The last three split the backward pass, which makes activation checkpointing slower."""
    pipeline_parallel_schedule_csv: str | None = None
    """CSV file with one line of actions such as 0F1,0B1 per pipeline rank; takes precedence over the named schedule."""
    pipeline_parallel_microbatch_size: Size = 1
    """Pipeline micro-batch size, in sequences; local_batch_size is split into these."""
    pipeline_parallel_layers_per_stage: Size | None = None
    """Layers per pipeline stage; unset: one or two stages per rank, as the schedule requires."""
    pipeline_parallel_first_stage_less_layers: Count = 1
    """Cost of the embedding in layers, subtracted from the first stage."""
    pipeline_parallel_last_stage_less_layers: Count = 1
    """Cost of the final norm and output projection in layers, subtracted from the last stage."""
    module_fqns_per_model_part: list[list[str]] | None = None
    """Module names per pipeline stage, as [["tok_embeddings", "layers.0"], ["norm", "output"]]; unset: by cost."""
    context_parallel_degree: Degree = 1
    """Context-parallel degree: number of ranks that split each sequence."""
    context_parallel_rotate_method: Literal["allgather", "alltoall", "ring"] = "allgather"
    """How attention gets other ranks' keys and values: all-gather, all-to-all of sequence and head shards, or ring."""
    expert_parallel_degree: Degree = 1
    """Expert-parallel degree: number of ranks that hold different experts. It divides the product of the shard, context
    and tensor degrees, and adds no ranks."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Saving, loading and exporting of checkpoints."""

    enable: bool = True
    """Save at the interval, at the end and when the run is stopped; resume from the latest complete checkpoint."""
    folder: str = "checkpoint"
    """Checkpoint folder, relative to the run's folder, or the URL of an object store: "s3://BUCKET/PREFIX"."""
    local_folder: str = "checkpoint"
    """With a store: folder in which steps are committed before they are uploaded, relative to the run's folder."""
    local_interval: Steps | None = None
    """With a store: steps between two checkpoints in local_folder, a divisor of interval; unset: interval."""
    local_keep_latest_k: Count = 2
    """With a store: number of complete checkpoints to keep in local_folder; 0 keeps all."""
    local_peer_copy: bool = False
    """With a store, and nodes that do not share local_folder: also copy what a node saves there to the next node, so
    that a run that has lost a node resumes from the local folders of the others."""
    upload_mib_per_second: Annotated[float, Range(0.0, 1e6, above=True)] | None = None
    """With a store: limit on what each rank uploads, in MiB/s; unset: none."""
    store_timeout_seconds: Duration = 120.0
    """Time for which a request to a store is repeated before it counts as failed, in seconds; at a start, other ranks
    wait for it, so that it must be less than comm.init_timeout_seconds."""
    interval: Steps = 500
    """Steps between two checkpoints."""
    interval_minutes: Annotated[float, Range(0.0, 1e7, above=True)] | None = None
    """Maximum time between two checkpoints, in minutes; unset: no time-based checkpoints."""
    enable_first_step_checkpoint: bool = False
    """Also save after the first step, so that storage problems surface immediately."""
    keep_latest_k: Count = 10
    """Number of complete checkpoints to keep; 0 keeps all."""
    keep_every: StepsOrZero = 0
    """Save and permanently keep every step divisible by this number; 0 disables."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Save mode. "disabled": training waits. "async": the state is copied to host memory during the next step, then a
    thread writes it. "async_with_pinned_mem": the copy is in pinned shared memory, and a separate process writes it."""
    writer_timeout_seconds: Duration = 300.0
    """Time without progress, in seconds, after which a writer process is restarted, and then replaced with a thread."""
    verify: Literal["full", "sizes"] = "full"
    """Verification before loading: "full" compares the digest of every file, "sizes" only file sizes."""
    load_step: Annotated[int, Range(0, MAX_STEPS, or_auto=True)] = -1
    """Step to resume from; later checkpoints are moved aside, and a run that is started again continues from what it
    saved since. -1: the latest complete checkpoint."""
    load_only: bool = False
    """Resume from a checkpoint but never save."""
    start_fresh: bool = False
    """Start from step 1 if checkpoints exist but none is complete; false: this is an error."""
    allow_partial: bool = False
    """Load the tensors whose name and shape match, converted to the run's data type, and list all differences; false: a
    difference is an error."""
    exclude_from_loading: list[str] = field(default_factory=list[str])
    """State that is not loaded: "model", "optimizer", "ema", "rng", "data", or tensors as "model/output.weight"."""
    create_seed_checkpoint: bool = False
    """Save the initial state as step 0 and exit."""
    initial_load_path: str | None = None
    """Initial weights of a new run: a step-N folder or its parent, or with initial_load_in_hf Hugging Face weights."""
    initial_load_model_only: bool = True
    """Load only the weights of initial_load_path; false: also optimizer state, counters and data position."""
    initial_load_in_hf: bool = False
    """Initialize a new run from the .safetensors files in initial_load_path, or if unset in model.hf_assets_path. If
    neither model.name nor flavor is set, config.json in the folder decides family, sizes and tokenizer."""
    resize_vocabulary: bool = False
    """With initial_load_in_hf: the folder may have another vocabulary than model.args.vocab_size. Further rows of its
    embedding and output are left out, missing ones drawn with the mean and covariance of the others."""
    last_save_in_hf: bool = False
    """Export the final weights in Hugging Face format to hf/step-N in the run's folder."""
    hf_export_interval: StepsOrZero = 0
    """Steps between two blocking exports in Hugging Face format, all of which are kept; 0 disables."""
    export_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Data type of exported weights."""
    last_save_model_only: bool = False
    """Also write the final weights without training state to the folder model_only."""
    allow_data_change: bool = False
    """Resume even if the dataset, the tokenizer, seq_len or the teacher changed since the checkpoint."""


@dataclass(frozen=True, kw_only=True)
class EMA:
    """Exponential moving average of the weights, kept beside them in fp32."""

    enable: bool = False
    """Keep the average, also in checkpoints; a run that was begun without it starts it at the weights."""
    decay: Fraction = 0.999
    """Share of the average that an update of the weights leaves."""
    half_life: Annotated[float, Range(1e-6, 1e6)] | None = None
    """Updates after which the share of earlier weights is halved, as a fraction of all updates so far: the average
    covers ever more of them. Takes precedence over decay; unset: decay."""
    freq: Steps = 1
    """Updates of the weights between two of the average, which then keeps the share of all of them together."""
    validate: bool = False
    """Validate, evaluate and sample with the average in place of the weights."""
    export: bool = False
    """Export the average in place of the weights in Hugging Face format."""


@dataclass(frozen=True, kw_only=True)
class Preemption:
    """Behavior when a signal (SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2) or training.max_seconds stops the run."""

    deadline_seconds: Duration | None = None
    """Time from the signal until the process must exit, in seconds. After half of it, a running step is interrupted and
    repeated after the restart; the other half is for saving, and after four fifths no upload to a store is waited for.
    Unset: never interrupt a step."""
    requeue: bool = False
    """Exit with code 75 if steps remain, so that a batch job knows to restart the run; false: exit with code 0."""


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpoint:
    """Activations that are recomputed in backward instead of stored."""

    mode: Literal["none", "full", "selective"] = "selective"
    """Recompute nothing, every block, or a selection."""
    selective_ac_option: str = "2"
    """For mode = "selective": "op" stores the outputs of expensive operations; "n" recomputes every n-th block."""
    first_blocks: AutoOrSize = -1
    """Number of blocks, from the first one of each pipeline stage on, to which the mode applies; later ones recompute
    nothing. Use it to recompute no more than memory requires. -1: all blocks."""


@dataclass(frozen=True, kw_only=True)
class Compile:
    """torch.compile, and CUDA graphs."""

    enable: bool = False
    """Compile the components."""
    components: list[Literal["model", "loss"]] = field(default_factory=lambda: ["model", "loss"])
    """What to compile; the model is compiled block by block, the loss on a GPU only."""
    backend: str = "inductor"
    """torch.compile backend."""
    cuda_graph: bool = False
    """Launch forward and backward on a GPU as one graph, also without `enable`; faster if it waits for the host."""

    @property
    def compiles_model(self) -> bool:
        """Whether the model is compiled."""
        return self.enable and "model" in self.components


@dataclass(frozen=True, kw_only=True)
class Float8:
    """Linear layers that cast inputs, weights and gradients to float8 before each product."""

    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """One scale per tensor or per row; rowwise_with_gw_hp does not cast for the gradients of weights."""
    filter_fqns: list[str] = field(default_factory=list[str])
    """Parts of names: linear layers whose name contains one of them are not converted."""
    emulate: bool = False
    """Round to float8 and multiply in training.mixed_precision_param, for GPUs without products in float8."""


@dataclass(frozen=True, kw_only=True)
class QuantizeLinear:
    """Formats of linear layers."""

    float8: Float8 = field(default_factory=Float8)
    """Linear layers in float8."""


@dataclass(frozen=True, kw_only=True)
class Quantize:
    """Training in low precision, for the conversions in model.converters."""

    linear: QuantizeLinear = field(default_factory=QuantizeLinear)
    """Formats of linear layers."""


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Logging of training metrics."""

    log_freq: Steps = 10
    """Steps between two log lines and rows of metrics.jsonl."""
    statistics_freq: StepsOrZero = 0
    """Steps between two rows that also have gradient norm and RMS of activations of each block, the ratio of update to
    weights of each group of the optimizer, and the share of clipped steps; a multiple of log_freq. 0 disables."""
    enable_tensorboard: bool = False
    """Write TensorBoard event files."""
    save_tb_folder: str = "tb"
    """Folder of the TensorBoard event files, relative to the run's folder."""
    enable_wandb: bool = False
    """Log to Weights & Biases (extra "wandb"), configured by its own environment variables."""
    disable_color_printing: bool = False
    """Disable colored log output on terminals."""


@dataclass(frozen=True, kw_only=True)
class Profiling:
    """torch.profiler traces and CUDA memory snapshots."""

    enable_profiling: bool = False
    """Write Chrome traces."""
    save_traces_folder: str = "profile_traces"
    """Folder of the traces, relative to the run's folder."""
    profile_freq: Steps = 10
    """Steps between two traces or memory snapshots."""
    profiler_warmup: StepsOrZero = 3
    """Warmup steps of the profiler before each trace."""
    profiler_active: Steps = 1
    """Steps recorded in each trace."""
    enable_memory_snapshot: bool = False
    """Write CUDA memory snapshots every profile_freq steps and on out-of-memory errors."""
    save_memory_snapshot_folder: str = "memory_snapshot"
    """Folder of the memory snapshots, relative to the run's folder."""


@dataclass(frozen=True, kw_only=True)
class Comm:
    """Timeouts, diagnostics and simulation of collective communication."""

    mode: Literal["default", "fake_backend"] = "default"
    """Set to "fake_backend" to simulate WORLD_SIZE ranks in one process and print their memory and collectives."""
    interface: str = ""
    """Network interface that the nodes and replica groups of a run communicate over; "": loopback if all are here."""
    init_timeout_seconds: Seconds = 300
    """Timeout of a collective until the first step has finished and while saving, in seconds."""
    train_timeout_seconds: Seconds = 100
    """Timeout of a collective during training, in seconds."""
    trace_buf_size: Annotated[int, Range(0, 10**7)] = 2000
    """Number of collectives kept by torch's flight recorder for hang reports; 0 disables it."""
    save_traces_folder: str = "comm_traces"
    """Folder of hang reports (stacks of all threads, last collectives), relative to the run's folder."""
    straggler_freq: StepsOrZero = 100
    """Steps between two measurements of slow ranks and links, each without communication overlap; 0 disables."""
    replica_check_freq: StepsOrZero = 0
    """Steps between two comparisons, bit by bit, of what ranks must hold alike, such as the weights of replicas; also
    before each save and export. A difference ends the run with the name of the rank. 0 disables."""


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Validation loss on the documents that data.held_out_fraction holds out."""

    enable: bool = False
    """Validate at the interval and after the last step."""
    freq: Steps = 100
    """Training steps between two validations; one that a stop of the run prevents or interrupts is left out."""
    steps: Annotated[int, Range(1, MAX_STEPS, or_auto=True)] = -1
    """Batches per validation; -1: one pass over the validation split, for local data only."""
    local_batch_size: Size = 8
    """Micro-batch size per data-parallel rank in validation and evaluation, in sequences."""
    prompts: list[str] = field(default_factory=list[str])
    """Texts whose most likely continuation is logged at each validation."""
    sample_tokens: Size = 32
    """Tokens of each continuation; each takes a forward pass."""


@dataclass(frozen=True, kw_only=True)
class EvaluationTask:
    """One entry of evaluation.tasks."""

    name: str
    """Name of the task in messages and metrics."""
    kind: Literal["text", "multiple_choice", "cloze", "copy", "recall", "brackets"]
    """text: bits per byte of documents; multiple_choice: a .jsonl file of query, choices and gold (index of the right
    choice); cloze: names in source code; copy, recall, brackets: probes made by code."""
    path: str | None = None
    """Local file or folder; unset, for cloze only: the held-out modules of the standard library."""
    text_key: str = "text"
    """Field or column that holds the text, as training.text_key."""
    examples: Size = 100
    """Number of examples that are made, for cloze and probes."""
    length: Annotated[int, Range(1, 900)] = 16
    """Length of a probe: words to copy, pairs of key and value (at least 4 of either), or brackets."""
    depth: UnitInterval = 0.5
    """Place of the key that recall asks for, from 0 (first) to 1 (last)."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Scores on tasks by log-likelihood while training, in batches of validation.local_batch_size."""

    enable: bool = False
    """Evaluate at the interval and after the last step."""
    freq: Steps = 1000
    """Training steps between two evaluations; one that a stop of the run prevents or interrupts is left out."""
    tasks: list[EvaluationTask] = field(default_factory=list[EvaluationTask])
    """Tasks, for example [{name = "arc", kind = "multiple_choice", path = "arc.jsonl"}]."""


@dataclass(frozen=True, kw_only=True)
class FaultTolerance:
    """Replica groups: jobs that train one model together and tolerate each other's failures (TorchFT)."""

    enable: bool = False
    """Join a run as one replica group; requires the extra "ft" and a lighthouse at the address $TORCHFT_LIGHTHOUSE."""
    process_group: Literal["gloo", "nccl"] = "gloo"
    """Backend of the gradient reduction across replica groups."""
    process_group_timeout_ms: Milliseconds = 10000
    """Timeout of a collective across replica groups and of recovery, in milliseconds; then the step is repeated."""
    replica_id: Annotated[int, Range(0, 10**6)] = 0
    """Index of this replica group, from 0."""
    group_size: Annotated[int, Range(0, 10**6)] = 0
    """Total number of replica groups; the global batch is divided among the live ones."""
    min_replica_size: Degree = 1
    """Minimum number of live replica groups; with fewer, training waits."""
    stall_factor: Annotated[float, Range(1.0, 1e6)] = 10.0
    """A process whose step exceeds this many median steps plus two timeouts dumps its stacks and exits."""
    semi_sync_method: Literal["local_sgd", "diloco"] | None = None
    """Average weights periodically instead of reducing gradients in every step; unset: reduce gradients."""
    sync_steps: Steps = 5
    """Steps between two averages of the same weight."""
    num_fragments: Degree = 1
    """Number of model fragments; one fragment is averaged every sync_steps / num_fragments steps."""
    module_fqns_per_model_fragment: list[list[str]] = field(default_factory=list[list[str]])
    """Module names of each fragment, for example [["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]]."""
    fragment_sync_delay: StepsOrZero = 0
    """Steps by which communication of an average may overlap with training."""
    fragment_update_alpha: UnitInterval = 0.0
    """Weight of the group's own parameters when the average is applied, from 0 (average only) to 1."""
    heartbeat_timeout_ms: Milliseconds = 5000
    """Time without a heartbeat after which a replica group is considered dead, in milliseconds."""
    join_timeout_ms: Milliseconds = 60000
    """For scripts/lighthouse.py: time to wait for a live replica group that is late, in milliseconds."""


@dataclass(frozen=True, kw_only=True)
class Debug:
    """Reproducibility and debugging."""

    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    """Seed of the initial weights and the data order."""
    deterministic: bool = False
    """Use deterministic algorithms only; slower."""
    trace_collectives: bool = False
    """Log a table of the collectives of this process' second step and write it to collectives.rankN.json."""
    explain_compile: bool = False
    """Log, with compile.enable, what ends a graph of torch.compile early, and why code is compiled again."""
    moe_force_load_balance: bool = False
    """Let the tokens of each row take the experts in turn instead of those that the router prefers."""
    deterministic_warn_only: bool = False
    """With deterministic: warn about operations without a deterministic implementation instead of raising an error."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Complete configuration of a run: read by config.reader, written to the run's folder as config.toml."""

    job: Job = field(default_factory=Job)
    model: Model = field(default_factory=Model)
    training: Training = field(default_factory=Training)
    data: Data = field(default_factory=Data)
    distillation: Distillation = field(default_factory=Distillation)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    parallelism: Parallelism = field(default_factory=Parallelism)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    ema: EMA = field(default_factory=EMA)
    preemption: Preemption = field(default_factory=Preemption)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    quantize: Quantize = field(default_factory=Quantize)
    metrics: Metrics = field(default_factory=Metrics)
    profiling: Profiling = field(default_factory=Profiling)
    comm: Comm = field(default_factory=Comm)
    validation: Validation = field(default_factory=Validation)
    evaluation: Evaluation = field(default_factory=Evaluation)
    fault_tolerance: FaultTolerance = field(default_factory=FaultTolerance)
    launch: Cluster = field(default_factory=Cluster)
    slurm: Slurm = field(default_factory=Slurm)
    debug: Debug = field(default_factory=Debug)

"""Every option of a run, as plain data.

One frozen dataclass per TOML table, collected in `Config`. The string under a field documents it: `--help` prints
it, and a test refuses a field without one, and a field that no code reads. Table and key names are torchtitan v0.2's
wherever the meaning is the same. Rules that span several fields stand in `checks.py`, not here.
"""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the run is called and where it writes."""

    config_file: str | None = None
    """TOML file that describes the run; given on the command line as --job.config_file=FILE."""
    extends: str | None = None
    """Another TOML file, relative to this one, whose keys apply where this file is silent."""
    description: str = ""
    """One line about the run, for people; it is logged at the start."""
    dump_folder: str = "./outputs"
    """Folder under which every run gets its own folder."""
    run_name: str | None = None
    """Name of the run's folder below dump_folder; unset: the name of the TOML file without its ending."""
    dry_run: bool = False
    """Resolve and check the configuration, print what would run, and exit; --dry-run is short for it."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """Which model, in which size."""

    name: str = "llama3"
    """Family of the model: a key of models.MODELS."""
    flavor: str = "debugmodel"
    """Size within the family, for example debugmodel, 1B, 8B."""
    args: dict[str, Any] = field(default_factory=dict[str, Any])
    """Laid over the flavor's arguments, for example --model.args.n_layers=4; checked against that model's arguments."""
    hf_assets_path: str | None = None
    """Folder that holds tokenizer.json; unset: the 2,048-token tokenizer that this package ships."""


@dataclass(frozen=True, kw_only=True)
class Freeze:
    """A point of training.freeze_schedule: what changes before a step, for that step and all that follow."""

    step: int
    """First step that trains without these blocks."""
    layers: int
    """Blocks that are frozen from then on, counted from the first; the embedding is frozen with them."""
    pipeline_parallel_degree: int | None = None
    """Ranks over which the layers are split from then on; the shard axis takes what gets free. Unset: as before."""
    local_batch_size: int | None = None
    """Rows that one data-parallel rank passes through the model at once from then on; unset: as before."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained on, how much, and in which precision."""

    dataset: str = "stdlib"
    """Key of data.DATASETS; or a hub id, "org/name" or "org/name:configuration", that is streamed (extra "data")."""
    dataset_path: str | None = None
    """Text, .jsonl(.gz|.zst) or .parquet file, or a folder of these; where set, it is read instead of dataset."""
    text_key: str = "text"
    """Field of a .jsonl row, or column of a .parquet file or hub dataset, that holds the document."""
    seq_len: int = 2048
    """Tokens in one row of a batch."""
    local_batch_size: int = 8
    """Rows that one data-parallel rank passes through the model at once."""
    global_batch_size: int = -1
    """Rows of one optimizer step over all ranks and replica groups; -1: local_batch_size of each."""
    document_masking: bool = True
    """Attention stays within a document and positions restart at each; false: rows are plain streams of tokens."""
    steps: int = 10000
    """Optimizer steps of the whole run."""
    max_norm: float = 1.0
    """Gradients are scaled down to this global norm where they exceed it."""
    loss_chunk_tokens: int = 1024
    """Tokens for which logits exist at one time; smaller saves memory, larger multiplies faster."""
    max_skipped_steps: int = 10
    """Steps in a row that may be skipped for a non-finite loss or gradient norm before the run stops with an error."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the master weights and of the optimizer's state."""
    mixed_precision_param: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the weights and activations in forward and backward."""
    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"
    """Type in which gradients are reduced over ranks."""
    freeze_schedule: list[Freeze] = field(default_factory=list[Freeze])
    """Blocks that stop learning, for example [{step = 100, layers = 4, pipeline_parallel_degree = 1}]: from step 100 on
    the embedding and the first 4 blocks stay as they are, and ranks that get free take part of the data."""
    enable_cpu_offload: bool = False
    """Keep master weights, gradients and optimizer state in host memory."""
    gc_freq: int = 50
    """Steps between two runs of Python's garbage collector, which is off in between."""
    max_seconds: float | None = None
    """Stop and save so that the process ends after this many seconds at most; unset: no limit."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """How text becomes batches."""

    num_workers: int = 0
    """Loader processes per rank; 0 reads in the training process, which is enough for prepared (not streamed) data."""
    cache_folder: str | None = None
    """Folder of prepared token stores; unset: torchtitan_clone below $XDG_CACHE_HOME or ~/.cache."""
    prepare_processes: int = -1
    """Processes that tokenize a new source; -1: one per CPU core."""
    held_out_fraction: float = 0.01
    """Share of the documents, chosen by hash, that is kept for validation and never trained on; 0 holds none out."""
    max_bad_rows: int = 0
    """Rows that may be unreadable (not JSON, key missing, not UTF-8) and are left out; one more is an error."""


@dataclass(frozen=True, kw_only=True)
class OptimizerGroup:
    """An entry of optimizer.groups: settings of the parameters whose name a pattern matches."""

    pattern: str
    """Parameter names as a checkpoint has them, for example "layers.*.attention.wq.weight"; * stands for any
    characters (dots too), ? for one, [0-3] for one of these."""
    name: str | None = None
    """Key of optim.OPTIMIZERS; unset: optimizer.name."""
    lr: float | None = None
    """Peak learning rate of the schedule; unset: optimizer.lr."""
    weight_decay: float | None = None
    """Weight decay of all these parameters, vectors too; unset: optimizer.weight_decay, by its rule."""
    beta1: float | None = None
    """Decay rate per step of the mean of gradients; unset: optimizer.beta1."""
    beta2: float | None = None
    """Decay rate per step of the mean of squared gradients; unset: optimizer.beta2."""
    eps: float | None = None
    """Added to the denominator of the update; unset: optimizer.eps."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """How gradients change weights."""

    name: str = "AdamW"
    """Key of optim.OPTIMIZERS (AdamW, Adam)."""
    lr: float = 8e-4
    """Peak learning rate of the schedule."""
    beta1: float = 0.9
    """Decay rate per step of the mean of gradients."""
    beta2: float = 0.95
    """Decay rate per step of the mean of squared gradients."""
    eps: float = 1e-8
    """Added to the denominator of the update."""
    weight_decay: float = 0.1
    """Weight decay (decoupled in AdamW), for matrices only unless decay_all_parameters."""
    decay_all_parameters: bool = False
    """Decay vectors (norm weights, biases) too."""
    implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    """Which of torch's implementations runs."""
    groups: list[OptimizerGroup] = field(default_factory=list[OptimizerGroup])
    """Settings by parameter name, for example [{pattern = "*embeddings.weight", lr = 3e-3, weight_decay = 0.0}]; an
    entry can set name, lr, weight_decay, beta1, beta2 and eps. The first pattern that matches a parameter wins, a
    pattern that matches none is an error, and parameters without a match have the settings of this table."""


@dataclass(frozen=True, kw_only=True)
class LRScheduler:
    """Warm-up, then stable, then decay."""

    warmup_steps: int = 200
    """Steps over which the learning rate rises linearly from 0."""
    decay_ratio: float | None = None
    """Share of all steps over which it falls at the end, at most what the warm-up leaves; unset: all that it leaves."""
    decay_type: str = "linear"
    """Shape of the fall: a key of optim.SCHEDULES (linear, cosine, sqrt)."""
    min_lr_factor: float = 0.0
    """Learning rate at the end of the fall, as a share of optimizer.lr."""


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """How many ranks each axis of the device mesh has."""

    data_parallel_replicate_degree: int = 1
    """Copies of the model whose gradients are averaged (HSDP when the shard degree is above 1 too)."""
    data_parallel_shard_degree: int = -1
    """Ranks over which FSDP2 shards weights, gradients and optimizer state; -1: all ranks that are left."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free gathered weights between forward and backward; default: always, but not under pipeline parallelism."""
    fsdp_prefetch_blocks: int = 1
    """Blocks whose weights are gathered ahead of the one at work, forward and backward; 1 is what torch does by itself
    as long as the CPU runs ahead, more hide slow networks and cost the memory of so many blocks."""
    tensor_parallel_degree: int = 1
    """Ranks over which each matrix is split."""
    enable_async_tensor_parallel: bool = False
    """Take each product and its collective apart, so that they overlap; CUDA and compile.enable only."""
    pipeline_parallel_degree: int = 1
    """Ranks over which the layers are split."""
    pipeline_parallel_schedule: str = "1F1B"
    """Order of the pipeline's work: GPipe, 1F1B, LoopedBFS, Interleaved1F1B, or one that computes the gradients of
    inputs and weights apart and so recomputes activations slowly: InterleavedZeroBubble, ZBVZeroBubble, DualPipeV."""
    pipeline_parallel_schedule_csv: str | None = None
    """File with a line of actions such as 0F1,0B1 for each rank of the pipeline; where set, it is the schedule."""
    pipeline_parallel_microbatch_size: int = 1
    """Rows that a stage takes at once; the local_batch_size rows of a pass follow one another through the stages."""
    pipeline_parallel_layers_per_stage: int | None = None
    """Layers in a stage; unset: as many as give one or two stages a rank, whichever the schedule is made for."""
    pipeline_parallel_first_stage_less_layers: int = 1
    """Layers that the embedding counts for."""
    pipeline_parallel_last_stage_less_layers: int = 1
    """Layers that norm and output count for."""
    module_fqns_per_model_part: list[list[str]] | None = None
    """Modules of every stage, for example [["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]]."""
    context_parallel_degree: int = 1
    """Ranks over which each sequence is split."""
    context_parallel_rotate_method: Literal["allgather", "alltoall", "ring"] = "allgather"
    """How queries meet the keys of other ranks: gathered, whole sequences of fewer heads, or passed round a ring."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When training state is saved."""

    enable: bool = True
    """Save at the interval, at the end and when the run is asked to stop; resume from the newest saved step."""
    folder: str = "checkpoint"
    """Folder of the checkpoints below the run's folder."""
    interval: int = 500
    """Steps between two saves."""
    interval_minutes: float | None = None
    """Minutes after which a step is saved even if the interval is not over; unset: only steps count."""
    enable_first_step_checkpoint: bool = False
    """Save after the first step too, so that a run that could not save says so at once."""
    keep_latest_k: int = 10
    """Newest whole steps that are kept; 0 keeps all."""
    keep_every: int = 0
    """Steps divisible by this are saved and kept for ever; 0: none."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """disabled: training waits for a save; async: a copy of the state is taken during the next step and written by a
    thread; async_with_pinned_mem: the copy is in shared memory, on CUDA pinned, and a process of its own writes it."""
    writer_timeout_seconds: float = 300.0
    """Longest time without progress of a writer process before it is replaced, once, and then done without."""
    verify: Literal["full", "sizes"] = "full"
    """What is checked before a checkpoint is loaded: all bytes against their digests, or the sizes of files only."""
    load_step: int = -1
    """Step to go on from; newer ones are put aside. -1: the newest that is whole."""
    load_only: bool = False
    """Go on from a checkpoint, and save nothing."""
    start_fresh: bool = False
    """Begin with the first step where there are checkpoints of which none is whole; otherwise that is an error."""
    allow_partial: bool = False
    """Load what fits of a checkpoint with other names, shapes or types than the run's, and list the rest."""
    exclude_from_loading: list[str] = field(default_factory=list[str])
    """What stays as it is at the start: "model", "optimizer", "rng", "data", or names such as "model/output.weight"."""
    create_seed_checkpoint: bool = False
    """Save the initial state as step 0 and exit."""
    initial_load_path: str | None = None
    """Where a new run takes its weights from: a step-N folder, a folder of such, or with initial_load_in_hf weights in
    the Hugging Face format."""
    initial_load_model_only: bool = True
    """Of a checkpoint there take the weights only; false: optimizer, counters and position in the data too."""
    initial_load_in_hf: bool = False
    """A new run starts with the .safetensors of initial_load_path, or where that is unset of model.hf_assets_path."""
    last_save_in_hf: bool = False
    """After the last step, also export the weights in the Hugging Face format, into hf/step-N of the run's folder."""
    hf_export_interval: int = 0
    """Steps between two such exports while training, which stands still meanwhile; all are kept; 0: none."""
    export_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights in exports."""
    last_save_model_only: bool = False
    """After the last step, export the weights to the folder model_only too; the last checkpoint itself is complete."""
    allow_data_change: bool = False
    """Resume although the data, the tokenizer or seq_len changed since the checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Preemption:
    """What follows when a signal (SIGTERM, SIGINT, SIGUSR1, SIGUSR2) or training.max_seconds stops a run."""

    deadline_seconds: float | None = None
    """Time from a signal to the end of the process. After half of it the step under way is given up between two
    micro-batches, to be repeated after the restart, so that the other half is left for saving; unset: never."""
    requeue: bool = False
    """Exit with code 75 where steps are left, so that a batch job knows that it must go on; false: with code 0."""


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpoint:
    """What is recomputed in backward instead of kept in memory."""

    mode: Literal["none", "full", "selective"] = "selective"
    """Recompute nothing, every block, or a selection."""
    selective_ac_option: str = "2"
    """For mode = "selective": "op" keeps the outputs of costly operations; "n" recomputes every n-th block."""


@dataclass(frozen=True, kw_only=True)
class Compile:
    """torch.compile."""

    enable: bool = False
    """Compile the components."""
    components: list[Literal["model", "loss"]] = field(default_factory=lambda: ["model", "loss"])
    """What is compiled; the model is compiled block by block."""
    backend: str = "inductor"
    """torch.compile backend."""


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """What is shown and written while training."""

    log_freq: int = 10
    """Steps between two lines of the log and rows of metrics.jsonl."""
    enable_tensorboard: bool = False
    """Write TensorBoard event files."""
    save_tb_folder: str = "tb"
    """Folder of the TensorBoard event files below the run's folder."""
    enable_wandb: bool = False
    """Log to Weights & Biases (extra "wandb"); its own environment variables apply."""
    disable_color_printing: bool = False
    """Plain log lines even on a terminal."""


@dataclass(frozen=True, kw_only=True)
class Profiling:
    """torch.profiler and CUDA memory snapshots."""

    enable_profiling: bool = False
    """Write Chrome traces."""
    save_traces_folder: str = "profile_traces"
    """Folder of the traces below the run's folder."""
    profile_freq: int = 10
    """Steps from one trace to the next."""
    profiler_warmup: int = 3
    """Steps the profiler runs before it records."""
    profiler_active: int = 1
    """Steps in one trace."""
    enable_memory_snapshot: bool = False
    """Write the CUDA allocator's history, at profile_freq and when memory runs out."""
    save_memory_snapshot_folder: str = "memory_snapshot"
    """Folder of the memory snapshots below the run's folder."""


@dataclass(frozen=True, kw_only=True)
class Comm:
    """Collective communication."""

    mode: Literal["default", "fake_backend"] = "default"
    """fake_backend: simulate WORLD_SIZE ranks in this process, print memory and collectives of a step, and exit."""
    init_timeout_seconds: int = 300
    """Longest wait for a collective until this process has finished its first step, and while it saves."""
    train_timeout_seconds: int = 100
    """Longest wait for a collective from then on."""
    trace_buf_size: int = 2000
    """Collectives that torch's flight recorder remembers, for the report about a hang; 0 turns it off."""
    save_traces_folder: str = "comm_traces"
    """Folder below the run's folder for reports about hangs: stacks of all threads and the last collectives."""
    straggler_freq: int = 100
    """Steps between two in which no communication overlaps, to find a slow rank or a slow link; 0: none."""


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Loss on the documents that data.held_out_fraction keeps from training."""

    enable: bool = False
    """Validate at the interval and at the end."""
    freq: int = 100
    """Training steps between two validations."""
    steps: int = -1
    """Batches of one validation; -1: the whole held-out split once."""
    local_batch_size: int = 8
    """Rows that one data-parallel rank passes through the model at once."""


@dataclass(frozen=True, kw_only=True)
class FaultTolerance:
    """Replica groups: runs of this program that train one model together and survive each other's deaths."""

    enable: bool = False
    """Be one replica group of a run; needs the extra "ft" and a lighthouse, whose address $TORCHFT_LIGHTHOUSE gives."""
    process_group: Literal["gloo", "nccl"] = "gloo"
    """How gradients travel between replica groups."""
    process_group_timeout_ms: int = 10000
    """Longest wait for the other groups in one collective, and for a group that heals; then the step is repeated."""
    replica_id: int = 0
    """Which of the replica groups this one is, from 0."""
    group_size: int = 0
    """Replica groups when all are alive; the global batch is divided among those that are."""
    min_replica_size: int = 1
    """Fewest replica groups with which training goes on; with fewer it waits."""
    stall_factor: float = 10.0
    """A process that is in one step for so many median steps (and two timeouts) shows its stacks and ends itself."""
    semi_sync_method: Literal["local_sgd", "diloco"] | None = None
    """Groups train apart for rounds of steps and average their weights; unset: they sum gradients in every step."""
    sync_steps: int = 5
    """Steps from one average of a weight to the next."""
    num_fragments: int = 1
    """Fragments of the model, one of which is averaged after every sync_steps / num_fragments steps."""
    module_fqns_per_model_fragment: list[list[str]] = field(default_factory=list[list[str]])
    """Modules of every fragment, for example [["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]]."""
    fragment_sync_delay: int = 0
    """Steps for which the average may be on its way while training goes on."""
    fragment_update_alpha: float = 0.0
    """Share of a group's own weights that stays when the average arrives."""
    heartbeat_timeout_ms: int = 5000
    """Silence after which a replica group counts as dead to the lighthouse, and to those that connect to it."""
    join_timeout_ms: int = 60000
    """For scripts/lighthouse.py: wait for a group that is alive but late, for example saving; then go on without it."""


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """What scripts/slurm/submit.py asks Slurm for; of no meaning to the run itself."""

    nodes: int = 1
    """Nodes of the job."""
    gpus_per_node: int = 8
    """GPUs that the job takes of each node; 0 trains on CPUs."""
    processes_per_node: int | None = None
    """Ranks on each node; unset: gpus_per_node, or 1 on CPUs."""
    cpus_per_node: int | None = None
    """CPU cores that the job takes of each node; unset: nodes are not shared."""
    time: str | None = None
    """Longest time of one start of the job, as Slurm writes it: "1-12:00:00"; unset: the partition's."""
    partition: str | None = None
    """Slurm's partition; unset: the default one."""
    account: str | None = None
    """Slurm's account; unset: the user's."""
    signal_seconds: int = 120
    """Seconds before the end of the time at which the run is told to save."""
    max_starts_without_progress: int = 3
    """Starts in a row without a new checkpoint after which the job is not requeued any more."""
    sbatch_options: list[str] = field(default_factory=list[str])
    """Further options of sbatch, for example ["--constraint=h100", "--qos=long"]."""
    setup: list[str] = field(default_factory=list[str])
    """Lines of shell that the batch script runs first, for example ["module load cuda"]."""
    container: str = ""
    """Command under which every node starts, for example "apptainer exec --nv image.sif"."""
    environment: dict[str, Any] = field(default_factory=dict[str, Any])
    """Environment variables of the job, as strings; PYTHON is the one in the container."""


@dataclass(frozen=True, kw_only=True)
class Debug:
    """Reproducibility."""

    seed: int = 0
    """Decides the initial weights and the order of the data."""
    deterministic: bool = False
    """Use deterministic algorithms only; slower."""
    trace_collectives: bool = False
    """Log a table of the collectives of the second step this process trains, and write collectives.json for it."""
    deterministic_warn_only: bool = False
    """With deterministic: warn where an operation has no deterministic version, instead of an error."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A run. Read by config.loader, written to the run's folder as config.toml."""

    job: Job = field(default_factory=Job)
    model: Model = field(default_factory=Model)
    training: Training = field(default_factory=Training)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    parallelism: Parallelism = field(default_factory=Parallelism)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    preemption: Preemption = field(default_factory=Preemption)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    metrics: Metrics = field(default_factory=Metrics)
    profiling: Profiling = field(default_factory=Profiling)
    comm: Comm = field(default_factory=Comm)
    validation: Validation = field(default_factory=Validation)
    fault_tolerance: FaultTolerance = field(default_factory=FaultTolerance)
    slurm: Slurm = field(default_factory=Slurm)
    debug: Debug = field(default_factory=Debug)

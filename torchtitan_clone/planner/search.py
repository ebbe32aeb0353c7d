"""Searches the mesh, the micro-batch, the schedule, recomputation and resharding with which a model trains fastest.

Every combination that the rules of a run allow is estimated: its memory first, then its time with the bubble of a
formula. The fastest of those that fit are timed with the real order of their schedule.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice, product
from operator import itemgetter
from typing import Literal

from torchtitan_clone.config import Config, ConfigError, Degrees, load_config
from torchtitan_clone.config.imports import import_modules
from torchtitan_clone.config.messages import toml_like
from torchtitan_clone.config.schema import ActivationCheckpoint, Parallelism
from torchtitan_clone.planner.hardware import Hardware
from torchtitan_clone.planner.memory_estimate import MemoryEstimate, estimate_memory
from torchtitan_clone.planner.time_model import StepTime, predict_step_time
from torchtitan_clone.planner.work import model_work, recompute_option, reshards
from torchtitan_clone.run.pipeline_rules import find_pipeline_errors
from torchtitan_clone.run.plan import RunPlan, plan_on_mesh
from torchtitan_clone.run.preflight import resolve
from torchtitan_clone.run.rules import find_run_errors

MICROBATCHES = (1, 2, 4, 8, 16)
RECOMPUTE = (
    ActivationCheckpoint(mode="none"),
    ActivationCheckpoint(mode="selective", selective_ac_option="op"),
    ActivationCheckpoint(mode="full"),
)
SHARDS = (8, 16, 32, 64, 128, 256)
"""Data-parallel ranks that share one replica of the weights, where there are several."""
PIPELINES = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
KEPT = (
    "context_parallel_rotate_method", "enable_async_tensor_parallel", "fsdp_prefetch_blocks", "fsdp_blocks_per_group",
    "pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers",
)  # fmt: skip
"""Options of [parallelism] that are not searched."""
USABLE_MEMORY = 0.9
"""Share of the memory that estimates may fill; the rest is for the allocator, kernels and communication."""
TIMED = 60
"""Meshes that are timed with the real order of their schedule."""


@dataclass(frozen=True, kw_only=True)
class SearchGoal:
    """What to plan for."""

    gpus: int
    hardware: Hardware
    tokens_per_step: int
    run_tokens: int

    @property
    def usable_gib(self) -> float:
        """Memory that the estimate of a rank may fill."""
        return USABLE_MEMORY * self.hardware.memory_gib


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A mesh with its options, and what is predicted of it."""

    plan: RunPlan
    memory: MemoryEstimate
    time: StepTime


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The result of a search."""

    best: Sequence[Candidate]
    tried: int
    """Number of meshes that the batch and the model divide into."""
    fitting: int


def search(plan: RunPlan, *, goal: SearchGoal, count: int = 10) -> SearchResult:
    """Returns the fastest meshes; ConfigError if none divides model and batch, or fits.

    `plan` gives the model, the sequence length and all options that are not searched.
    """
    rows, rest = divmod(rows_of_step(plan.config, tokens=goal.tokens_per_step), plan.num_replica_groups)
    if rest:
        rule = f"{plan.num_replica_groups} replica groups do not divide its sequences"
        raise ConfigError(f"{goal.tokens_per_step:,} tokens a step: {rule}; change it, or fault_tolerance.group_size.")
    fitting: list[tuple[float, RunPlan, MemoryEstimate]] = []
    others: list[tuple[float, RunPlan, MemoryEstimate]] = []
    for config in _configs(plan, gpus=goal.gpus, rows=rows, node_size=goal.hardware.node_size):
        each = plan_on_mesh(plan, config=config, world_size=goal.gpus, layer_costs=model_work(plan).costs)
        memory = estimate_memory(each)
        if memory.total <= goal.usable_gib * 2**30:
            quick = predict_step_time(each, hardware=goal.hardware, real_order=False)
            fitting.append((quick.seconds, each, memory))
        else:
            others.append((memory.total, each, memory))
    if not fitting and not others:
        rule = f"no mesh of {goal.gpus} devices divides the model and {rows} sequences a step"
        raise ConfigError(f"{rule}; change the number of devices, or of tokens a step.")
    fitting.sort(key=itemgetter(0))
    allowed = (each for each in fitting if not _broken_rules(each[1], goal=goal))
    timed = [
        Candidate(plan=each, memory=memory, time=predict_step_time(each, hardware=goal.hardware))
        for _, each, memory in islice(allowed, TIMED)
    ]
    if not timed and fitting:
        raise ConfigError(_broken_rules(fitting[0][1], goal=goal))
    if not timed:
        raise ConfigError(_nothing_fits(*min(others, key=itemgetter(0))[1:], goal=goal))
    timed.sort(key=lambda each: each.time.seconds)
    return SearchResult(best=timed[:count], tried=len(fitting) + len(others), fitting=len(fitting))


def rows_of_step(config: Config, *, tokens: int) -> int:
    """Returns the sequences of a step; ConfigError if they are not whole."""
    seq_len = config.training.seq_len
    rows, rest = divmod(tokens, seq_len)
    if rest or not rows:
        near = max(1, rows) * seq_len
        rule = f"must be a multiple of training.seq_len {seq_len}"
        raise ConfigError(f"{tokens:,} tokens a step: {rule}; pass for example {near:,}, or change it.")
    return rows


def _broken_rules(plan: RunPlan, *, goal: SearchGoal) -> list[str]:
    return find_run_errors(
        plan.config,
        world_size=goal.gpus,
        args=plan.model_args,
        tokenizer_vocab_size=None,
        device_type="cuda",
    )


def _nothing_fits(plan: RunPlan, memory: MemoryEstimate, *, goal: SearchGoal) -> str:
    needed, usable = memory.total / 2**30, goal.usable_gib
    return (
        f"no mesh of {goal.gpus} x {goal.hardware.name} fits the model: {describe_mesh_options(plan)} comes closest, "
        f"and needs {needed:,.1f} GiB, mostly {memory.largest}: {needed - usable:,.1f} GiB more than the "
        f"{usable:,.1f} GiB that are usable. Use more devices, or shorter sequences."
    )


def _divisors(number: int, *, most: int) -> list[int]:
    return [size for size in range(1, min(number, most) + 1) if number % size == 0]


def _configs(plan: RunPlan, *, gpus: int, rows: int, node_size: int) -> Iterator[Config]:
    """Yields the configuration of each mesh that divides model, batch and devices."""
    args = plan.model_args
    tensors = [tp for tp in _divisors(gpus, most=node_size) if args.n_heads % tp == 0 and args.kv_heads % tp == 0]
    longest = max(1, plan.config.training.seq_len // 4096)
    for pp, tp, cp in product(_divisors(gpus, most=args.n_layers), tensors, _divisors(gpus, most=min(16, longest))):
        data, rest = divmod(gpus, pp * tp * cp)
        if rest or rows % data or plan.config.training.seq_len % (2 * cp * tp):
            continue
        for replicas, experts in product(_replicas(data), _expert_degrees(plan, ranks=data * cp * tp)):
            if data // replicas * cp * tp % experts:
                continue
            degrees = Degrees(pp=pp, dp_replicate=replicas, dp_shard=data // replicas, cp=cp, tp=tp, ep=experts)
            yield from _configs_of_mesh(plan, degrees=degrees, rows=rows)


def _replicas(data: int) -> list[int]:
    """Returns the numbers of replicas that are tried: one, and those of some sizes of shards."""
    return [1, *(size for size in _divisors(data, most=data // 8)[1:] if data // size in SHARDS)]


def _expert_degrees(plan: RunPlan, *, ranks: int) -> list[int]:
    experts = plan.model_args.num_experts
    return [size for size in _divisors(experts, most=ranks) if ranks % size == 0] if experts else [1]


def _configs_of_mesh(plan: RunPlan, *, degrees: Degrees, rows: int) -> Iterator[Config]:
    """Yields the configurations of one mesh, with each micro-batch, schedule, recomputation and resharding."""
    local = rows // degrees.data
    schedules = PIPELINES if degrees.pp > 1 else ("1F1B",)
    reshards: tuple[Literal["default", "never"], ...] = ("default", "never") if degrees.pp == 1 else ("default",)
    for size, schedule, recompute, reshard in product(MICROBATCHES, schedules, RECOMPUTE, reshards):
        if local % size:
            continue
        base = plan.config
        parallelism = replace(
            base.parallelism,
            data_parallel_replicate_degree=degrees.dp_replicate,
            data_parallel_shard_degree=degrees.dp_shard,
            tensor_parallel_degree=degrees.tp,
            context_parallel_degree=degrees.cp,
            pipeline_parallel_degree=degrees.pp,
            expert_parallel_degree=degrees.ep,
            pipeline_parallel_schedule=schedule,
            pipeline_parallel_schedule_csv=None,
            pipeline_parallel_layers_per_stage=None,
            module_fqns_per_model_part=None,
            pipeline_parallel_microbatch_size=size if degrees.pp > 1 else 1,
            fsdp_reshard_after_forward=reshard,
            enable_async_tensor_parallel=base.parallelism.enable_async_tensor_parallel and degrees.tp > 1,
        )
        training = replace(
            base.training,
            global_batch_size=rows * plan.num_replica_groups,
            local_batch_size=local if degrees.pp > 1 else size,
        )
        config = replace(base, parallelism=parallelism, training=training, activation_checkpoint=recompute)
        args = plan.model_args
        if not find_pipeline_errors(config, n_layers=args.n_layers, tied_embeddings=args.tied_embeddings):
            yield config


def describe_mesh_options(plan: RunPlan) -> str:
    """Returns the mesh and its options in a few words."""
    sizes = vars(plan.degrees)
    mesh = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1 and axis != "ep") or "one rank"
    mesh += f", ep {plan.degrees.ep}" if plan.degrees.ep > 1 else ""
    options, training = plan.config.parallelism, plan.config.training
    size = options.pipeline_parallel_microbatch_size if plan.degrees.pp > 1 else training.local_batch_size
    words = [mesh, *([options.pipeline_parallel_schedule] if plan.degrees.pp > 1 else []), f"micro-batch {size}"]
    words += [f"recompute {recompute_option(plan.config)}"]
    stays = plan.degrees.pp == 1 and not reshards(plan.config, degrees=plan.degrees)
    words += ["weights stay gathered"] if stays else []
    return ", ".join(words)


def describe_result(result: SearchResult, *, goal: SearchGoal, file: Config, configured: Candidate | None) -> str:
    """Returns the best meshes as a table, and their lines of TOML after those of `file`, whose mesh is `configured`."""
    tokens = f"{goal.tokens_per_step:,} tokens a step, {goal.run_tokens:,} in all"
    lines = [
        f"{result.fitting:,} of {result.tried:,} meshes of {goal.gpus:,} x {goal.hardware.name} fit; {tokens}",
        f"{'':>4}{'GiB':>7}{'step s':>9}{'tokens/s/GPU':>14}{'MFU':>7}{'GPU hours':>12}  {'largest parts':44} mesh",
    ]
    for number, each in enumerate(result.best, 1):
        lines.append(f"{number:4}{_numbers(each, goal=goal)} {describe_mesh_options(each.plan)}")
    if configured is not None:
        lines.append(f"file{_numbers(configured, goal=goal)} {describe_mesh_options(configured.plan)}")
    for number, each in enumerate(result.best, 1):
        lines += [f"\n# {number}", _toml(each.plan.config, file=file)]
    return "\n".join(lines) + "\n"


def predict(plan: RunPlan, *, hardware: Hardware) -> Candidate:
    """Returns a plan with what is predicted of it."""
    return Candidate(plan=plan, memory=estimate_memory(plan), time=predict_step_time(plan, hardware=hardware))


def _numbers(each: Candidate, *, goal: SearchGoal) -> str:
    time = each.time
    hours = goal.run_tokens / time.tokens_per_second / 3600
    largest = sorted(time.parts, key=lambda name: -time.parts[name])[:3]
    parts = ", ".join(f"{name} {time.parts[name] / time.seconds:.0%}" for name in largest)
    mfu = f"{time.mfu:7.1%}" if time.mfu else f"{'-':>7}"
    speed = f"{time.seconds:9.3f}{time.tokens_per_second:14,.0f}{mfu}"
    return f"{each.memory.total / 2**30:7.1f}{speed}{hours:12,.0f}  {parts:44}"


def _toml(config: Config, *, file: Config) -> str:
    """Returns the options that the search chose, where they differ from the file or the defaults, as TOML."""
    blocks: list[str] = []
    for table in ("training", "parallelism", "activation_checkpoint"):
        chosen, given, default = (vars(getattr(each, table)) for each in (config, file, Config()))
        names = ("local_batch_size", "global_batch_size") if table == "training" else chosen
        pairs = [
            f"{name} = {toml_like(chosen[name])}" if chosen[name] is not None else f"# without {name}"
            for name in names
            if not given[name] == chosen[name] == default[name]
        ]
        blocks += ["\n".join([f"[{table}]", *pairs])] if pairs else []
    return "\n\n".join(blocks)


def describe_plans(argv: list[str], *, gpus: int, hardware: Hardware, tokens: int | None, count: int) -> str:
    """Returns the fastest meshes for a configuration as text; ConfigError for what is wrong with any option.

    `tokens` are those of a step (None: of the configuration, whose mesh then has to suit the devices).
    """
    file = load_config(argv)
    import_modules(file.job.imports)
    # Nothing is read: the folder of the tokenizer may be on another machine.
    config = replace(file, model=replace(file.model, hf_assets_path=None))
    if tokens is None:
        tokens = resolve(config, world_size=gpus, device_type="cuda").tokens_per_step
    rows = rows_of_step(config, tokens=tokens)
    config = replace(config, training=replace(config.training, global_batch_size=rows))
    configured = None
    with suppress(ConfigError):  # of a mesh that does not suit these devices
        configured = predict(resolve(config, world_size=gpus, device_type="cuda"), hardware=hardware)
    # Of one rank, for which later stages and frozen layers are not meant: each mesh is checked with them.
    training = replace(config.training, global_batch_size=-1, local_batch_size=1, freeze_schedule=[])
    alone = replace(config, parallelism=Parallelism(), training=training, data=replace(config.data, stages=[]))
    base = resolve(alone, world_size=1, device_type="cuda")
    kept = {name: getattr(config.parallelism, name) for name in KEPT}
    training = replace(base.config.training, freeze_schedule=config.training.freeze_schedule)
    options = replace(base.config, parallelism=replace(Parallelism(), **kept), training=training, data=config.data)
    base = replace(base, config=options)
    goal = SearchGoal(gpus=gpus, hardware=hardware, tokens_per_step=tokens, run_tokens=tokens * config.training.steps)
    result = search(base, goal=goal, count=count)
    return describe_result(result, goal=goal, file=file, configured=configured)

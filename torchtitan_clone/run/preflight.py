"""Everything that can be refused, refused before a process group starts or a folder is made."""

import os
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan_clone.checkpoint.commit import (
    NOTHING_DONE,
    Progress,
    committed_steps,
    expected_progress,
    finished_step,
    initial_folder,
)
from torchtitan_clone.config import (
    Config,
    ConfigError,
    Degrees,
    load_config,
    resolved_degrees,
    resolved_global_batch_size,
    run_folder,
    to_toml,
)
from torchtitan_clone.data import (
    Dataset,
    Loader,
    LoaderOptions,
    Tokenizer,
    ValidationLoader,
    build_tokenizer,
    build_train_loader,
    build_validation_loader,
    describe_source,
    open_dataset,
)
from torchtitan_clone.fault_tolerance.protocol import check_replicas
from torchtitan_clone.models import ModelSpec, find_model
from torchtitan_clone.observe.flops import training_flops_per_token
from torchtitan_clone.optim import build_schedule
from torchtitan_clone.parallel.context import local_tokens
from torchtitan_clone.parallel.mesh import batch_rank, context_rank, describe_mesh
from torchtitan_clone.parallel.runtime import Launch
from torchtitan_clone.parallel.stages import Stages, model_modules, resolved_stages, splits_backward
from torchtitan_clone.run.hub import InitialWeights, initial_weights_path, open_initial_weights
from torchtitan_clone.run.phases import phase_of_step
from torchtitan_clone.run.rules import ModelFacts, find_run_errors

CONFIG_FILE = "config.toml"
SPLITS_BACKWARD_SINCE = "2.13"
"""Version of torch; 2.11 was tried and fails."""

_SOURCE = ("dataset", "dataset_path", "text_key", "seq_len")


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What a run looks like: its model, its mesh, its batches. Needs no data."""

    config: Config
    folder: Path
    spec: ModelSpec
    model_args: Any
    tokenizer: Tokenizer
    degrees: Degrees
    stages: Stages
    pipeline: str
    global_batch_size: int
    first_step: int = 1
    """The first step that has this plan."""
    frozen_layers: int = 0
    """Blocks that do not learn, counted from the first; where there are some, the embedding does not either."""

    def at_step(self, step: int) -> "RunPlan":
        """What the run looks like in a step, as training.freeze_schedule says; asked of the run's first plan."""
        phase = phase_of_step(self.config, self.world_size, step=step)
        if phase.config is self.config:
            return self
        stages = resolved_stages(
            phase.config.parallelism, n_layers=self.model_args.n_layers, frozen_layers=phase.frozen_layers
        )
        return replace(
            self,
            config=phase.config,
            degrees=resolved_degrees(phase.config.parallelism, self.world_size),
            stages=stages,
            pipeline=_describe_pipeline(phase.config, stages=stages),
            first_step=phase.first_step,
            frozen_layers=phase.frozen_layers,
        )

    def later_phases(self) -> "list[RunPlan]":
        """What it looks like after each point of training.freeze_schedule."""
        return [self.at_step(freeze.step) for freeze in self.config.training.freeze_schedule]

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return self.degrees.data * self.degrees.pp * self.degrees.cp * self.degrees.tp

    @property
    def frozen_modules(self) -> tuple[str, ...]:
        """Names of the modules that do not learn."""
        return tuple(model_modules(self.model_args.n_layers)[: self.frozen_layers + 1]) if self.frozen_layers else ()

    @property
    def frozen_stages(self) -> int:
        """How many stages, counted from the first, hold nothing that learns."""
        frozen = set(self.frozen_modules)
        return next(index for index, modules in enumerate(self.stages.modules) if set(modules) - frozen)

    @property
    def records(self) -> Path:
        """Folder of what this replica group writes alone; the checkpoints are everyone's."""
        options = self.config.fault_tolerance
        return self.folder / f"replica-{options.replica_id}" if options.enable else self.folder

    @property
    def replica_groups(self) -> int:
        """Replica groups when all are alive."""
        return self.config.fault_tolerance.group_size if self.config.fault_tolerance.enable else 1

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step over all ranks."""
        return self.global_batch_size * self.config.training.seq_len

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """All parameters of the model by name, in its order and without values; a tied one once."""
        with torch.device("meta"):
            return dict(self.spec.build(self.model_args).named_parameters())

    @property
    def parameter_count(self) -> int:
        """Numbers in all parameters."""
        return sum(parameter.numel() for parameter in self.parameters.values())

    @property
    def flops_per_token(self) -> float:
        """FLOPs of forward and backward for one token; of frozen blocks forward only, a third."""
        args = self.model_args
        embedding = 0 if args.tied_embeddings else args.vocab_size * args.dim
        frozen_blocks = tuple(f"{name}." for name in self.frozen_modules[1:])
        frozen = sum(p.numel() for name, p in self.parameters.items() if name.startswith(frozen_blocks))
        whole = self._training_flops(self.parameter_count - embedding, n_layers=args.n_layers)
        return whole - self._training_flops(frozen, n_layers=self.frozen_layers) * 2 / 3

    def _training_flops(self, matmul_parameters: int, *, n_layers: int) -> float:
        return training_flops_per_token(
            matmul_parameters=matmul_parameters,
            n_layers=n_layers,
            n_heads=self.model_args.n_heads,
            head_dim=self.model_args.head_dim,
            seq_len=self.config.training.seq_len,
        )

    @property
    def overview(self) -> str:
        """The run in one line."""
        config, rows = self.config, self.global_batch_size
        return (
            f"{config.model.name} {config.model.flavor}, {self.parameter_count:,} parameters, "
            f"{config.training.steps:,} steps of {rows:,} rows x {config.training.seq_len:,} = "
            f"{self.tokens_per_step:,} tokens, in {self.folder}{self.pipeline and '; ' + self.pipeline}"
        )


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A run that may start: its plan, its data, and where it goes on from or which weights it starts with.

    Where it goes on from may still be an earlier step: digests are not checked yet.
    """

    plan: RunPlan
    dataset: Dataset
    loader: Loader
    validation_loader: ValidationLoader | None
    progress: Progress
    finished_step: int
    initial_weights: InitialWeights | None


def resolve(config: Config, *, world_size: int, device_type: str) -> RunPlan:
    """Resolves names and sizes; ConfigError with all that is wrong."""
    found: list[str] = []
    spec = find_model(config.model)
    model_args = spec.resolve_args(config.model)
    found += model_args.violations()
    tokenizer = build_tokenizer(config.model.hf_assets_path)
    found += find_run_errors(
        config,
        world_size=world_size,
        model=ModelFacts(
            max_seq_len=model_args.max_seq_len,
            vocab_size=model_args.vocab_size,
            heads={"n_heads": model_args.n_heads, "n_kv_heads": model_args.kv_heads},
            n_layers=model_args.n_layers,
            tied_embeddings=model_args.tied_embeddings,
        ),
        tokenizer_vocab_size=tokenizer.vocab_size,
        device_type=device_type,
    )
    if found:
        raise ConfigError(found)
    _check_torch(config)
    build_schedule(config.lr_scheduler, steps=config.training.steps)
    degrees = resolved_degrees(config.parallelism, world_size)
    stages = resolved_stages(config.parallelism, n_layers=model_args.n_layers)
    return RunPlan(
        config=config,
        folder=run_folder(config.job),
        spec=spec,
        model_args=model_args,
        tokenizer=tokenizer,
        degrees=degrees,
        stages=stages,
        pipeline=_describe_pipeline(config, stages=stages),
        global_batch_size=resolved_global_batch_size(config.training, degrees, config.fault_tolerance),
    )


def _check_torch(config: Config) -> None:
    """ConfigError for what the installed torch cannot do and a later one can."""
    if splits_backward(config.parallelism) and torch.__version__ < SPLITS_BACKWARD_SINCE:
        raise ConfigError(
            f"parallelism.pipeline_parallel_schedule: torch {torch.__version__} cannot compute gradients of inputs and "
            f"weights apart in a model with operations of its own; set it to 1F1B or Interleaved1F1B, or install torch "
            f"{SPLITS_BACKWARD_SINCE}"
        )


def _describe_pipeline(config: Config, *, stages: Stages) -> str:
    """One line about the pipeline, nothing where there is none."""
    if config.parallelism.pipeline_parallel_degree == 1:
        return ""
    from torchtitan_clone.parallel.pipeline import describe_pipeline

    return describe_pipeline(config.parallelism, stages=stages, rows=config.training.local_batch_size)


def summary(plan: RunPlan) -> str:
    """What --dry-run prints."""
    accumulation = plan.global_batch_size // (plan.degrees.data * plan.config.training.local_batch_size)
    return (
        f"{to_toml(plan.config)}\n"
        f"data              {describe_source(plan.config.training)}\n"
        f"mesh              {describe_mesh(plan.degrees)}\n"
        f"pipeline          {plan.pipeline or 'none'}\n"
        f"parameters        {plan.parameter_count:,}\n"
        f"FLOPs per token   {plan.flops_per_token:,.0f}\n"
        f"tokens per step   {plan.tokens_per_step:,} in {accumulation:,} micro-batches a rank\n"
        f"tokens of the run {plan.tokens_per_step * plan.config.training.steps:,}\n"
        f"run folder        {plan.folder}\n"
        f"{''.join(map(_describe_phase, plan.later_phases()))}"
    )


def _describe_phase(plan: RunPlan) -> str:
    return (
        f"from step {plan.first_step}\n"
        f"  frozen          {', '.join(plan.frozen_modules)}\n"
        f"  mesh            {describe_mesh(plan.degrees)}\n"
        f"  pipeline        {plan.pipeline or 'none'}\n"
        f"  FLOPs per token {plan.flops_per_token:,.0f}\n"
    )


def prepare(plan: RunPlan, *, launch: Launch) -> PreparedRun:
    """Opens the data and finds where the run goes on; ConfigError where the data or the run's folder do not fit."""
    config = plan.config
    check_replicas(config.fault_tolerance, lighthouse=os.environ.get("TORCHFT_LIGHTHOUSE"))
    _check_folder_can_be_written(plan.folder)
    checkpoints = plan.folder / config.checkpoint.folder
    steps = committed_steps(checkpoints)
    if steps:
        _check_folder_is_ours(plan)
        if config.checkpoint.create_seed_checkpoint:
            raise ConfigError(f"checkpoint.create_seed_checkpoint = true: {checkpoints} has checkpoints already")
    dataset = open_dataset(training=config.training, data=config.data, tokenizer=plan.tokenizer)
    progress = expected_progress(config.checkpoint, folder=checkpoints) or NOTHING_DONE
    first = plan.at_step(progress.step + 1)
    loader, validation_loader = open_loaders(first, dataset=dataset, rank=launch.rank)
    if progress.data:
        loader.load_state_dict(progress.data, allow_change=config.checkpoint.allow_data_change)
    return PreparedRun(
        plan=plan,
        dataset=dataset,
        loader=loader,
        validation_loader=validation_loader,
        progress=progress,
        finished_step=finished_step(checkpoints) if config.checkpoint.enable else 0,
        initial_weights=None if progress.step else _initial_weights(plan),
    )


def open_loaders(plan: RunPlan, *, dataset: Dataset, rank: int) -> tuple[Loader, ValidationLoader | None]:
    """What a rank of that plan reads its batches from, both at the start of the data."""
    config = plan.config
    options = LoaderOptions(
        seq_len=config.training.seq_len,
        document_masking=config.training.document_masking,
        rank=batch_rank(plan.degrees, rank=rank),
        num_ranks=plan.degrees.data,
        token_indices=tokens_of_rank(plan, rank=rank),
    )
    loader = build_train_loader(
        dataset,
        options=options,
        seed=config.debug.seed,
        global_batch_size=plan.global_batch_size,
        local_batch_size=config.training.local_batch_size,
        num_workers=config.data.num_workers,
        all_gather_object=_all_gather_object,
    )
    if not config.validation.enable:
        return loader, None
    rows = config.validation.local_batch_size * plan.degrees.data
    return loader, build_validation_loader(dataset, options=options, global_batch_size=rows)


def _initial_weights(plan: RunPlan) -> InitialWeights | None:
    """The weights that a new run starts with instead of fresh ones."""
    checkpoint = plan.config.checkpoint
    if not checkpoint.initial_load_in_hf:
        initial_folder(checkpoint)  # it is opened when all ranks are there
        return None
    path = initial_weights_path(checkpoint, plan.config.model)
    return open_initial_weights(path, spec=plan.spec, model_args=plan.model_args, parameters=plan.parameters)


def tokens_of_rank(plan: RunPlan, *, rank: int) -> Tensor | None:
    """Places in each row of the tokens this rank reads; None for all."""
    degree, parallelism = plan.degrees.cp, plan.config.parallelism
    if degree == 1:
        return None
    pieces = local_tokens(
        plan.config.training.seq_len,
        rank=context_rank(plan.degrees, rank=rank),
        degree=degree,
        method=parallelism.context_parallel_rotate_method,
    )
    return torch.cat([torch.arange(piece.start, piece.stop) for piece in pieces])


def _all_gather_object(value: object) -> list[object]:
    gathered: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def _check_folder_can_be_written(folder: Path) -> None:
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.exists(path))
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise ConfigError(f"job.dump_folder: nothing can be written to {folder} ({there}); choose another folder")


def _check_folder_is_ours(plan: RunPlan) -> None:
    """A folder with checkpoints belongs to the model and the data it was started with."""
    path = plan.records / CONFIG_FILE
    if not path.exists():
        return
    before, now = load_config([f"--job.config_file={path}"]), plan.config
    then = {f"model.args.{k}": v for k, v in asdict(find_model(before.model).resolve_args(before.model)).items()}
    today = {f"model.args.{k}": v for k, v in asdict(plan.model_args).items()}
    if not now.checkpoint.allow_data_change:
        then |= {f"training.{name}": getattr(before.training, name) for name in _SOURCE}
        today |= {f"training.{name}": getattr(now.training, name) for name in _SOURCE}
    then["model.name"], today["model.name"] = before.model.name, now.model.name
    changes = [f"{key} {then.get(key)} -> {today.get(key)}" for key in today if then.get(key) != today.get(key)]
    if changes:
        raise ConfigError(
            f"the run folder {plan.folder} holds checkpoints of another run: {', '.join(changes)}; "
            "choose another job.run_name, put the values back, or delete the folder"
        )

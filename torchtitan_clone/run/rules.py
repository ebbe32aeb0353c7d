"""Rules between the configuration, the mesh and the model, checked before any process group starts.

Each rule yields messages that name the value, the rule and the remedy. Rules within the tables are in config/checks.py.
"""

import math
from collections.abc import Iterator

from torchtitan_clone.config import Config, Degrees, resolved_degrees
from torchtitan_clone.config.checks import find_config_errors, find_range_errors
from torchtitan_clone.config.messages import either, nearest_divisors, nearest_multiples, shown
from torchtitan_clone.config.resolved import find_mesh_errors, hub_id
from torchtitan_clone.config.schema import Parallelism
from torchtitan_clone.config.schema_training import Training
from torchtitan_clone.config.stages import find_batch_errors, find_data_errors
from torchtitan_clone.models.decoder import ModelArgs
from torchtitan_clone.models.moe import MoEArgs
from torchtitan_clone.run.pipeline_rules import find_pipeline_errors
from torchtitan_clone.run.plan import Phase, phases, rows_and_timeline


def find_run_errors(
    config: Config, *, world_size: int, args: ModelArgs | None, tokenizer_vocab_size: int | None, device_type: str
) -> list[str]:
    """Returns one message for each broken rule, those within the tables included.

    `args` is None where the model has no valid arguments, `tokenizer_vocab_size` where no tokenizer is loaded.
    """
    errors = [*find_config_errors(config, device_type=device_type), *_streamed_validation(config)]
    if args is not None:
        errors += [*_model_limits(config, args, tokenizer_vocab_size=tokenizer_vocab_size), *_width(config, args)]
    if any(find_range_errors(config, at="")) or any(find_data_errors(config.data, training=config.training)):
        return errors  # the other rules compute with these values
    if args is None:
        return [*errors, *find_mesh_errors(config.parallelism, world_size)]
    mesh_errors = _mesh_errors(config, world_size=world_size, args=args) or [*_freeze_schedule(config, args)]
    if mesh_errors:
        return errors + mesh_errors
    for phase in phases(config, world_size):
        if phase.config is config:
            continue
        of_phase = _mesh_errors(phase.config, world_size=world_size, args=args)
        if phase.config.training.seq_len != config.training.seq_len:
            of_phase += _model_limits(phase.config, args, tokenizer_vocab_size=None)
        errors += [f"{describe_entry(phase)}: {message}" for message in of_phase]
    return [*errors, *_data_stages(config, world_size)]


def _streamed_validation(config: Config) -> Iterator[str]:
    """The held-out documents of a stream are found by reading all of it."""
    names = [source.dataset for source in config.data.sources] or [hub_id(config.training)]
    streamed = [name for name in names if name and hub_id(Training(dataset=name))]
    if config.validation.enable and config.validation.steps == -1 and streamed:
        rule = f"the documents of {streamed[0]} are streamed, and one pass over those held out reads all of them"
        yield f"validation.steps = -1: {rule}; set it to a number of batches, or validation.enable to false."


def describe_entry(phase: Phase) -> str:
    """Describes the entry of data.stages or training.freeze_schedule with which a phase begins, for errors."""
    is_stage = any(stage.first_step == phase.first_batch for stage in phase.config.data.stages)
    if not is_stage or phase.first_batch < phase.first_step:
        return f"training.freeze_schedule, with the options of its entry at step {phase.first_step}"
    frozen = f", and {phase.frozen_layers} layers frozen" if phase.frozen_layers else ""
    return f"data.stages, with the options of its entry at step {phase.first_batch}{frozen}"


def _data_stages(config: Config, world_size: int) -> Iterator[str]:
    """Stages that change the shape of a batch or the model need the state of all ranks to move together."""
    _, timeline = rows_and_timeline(config, world_size)
    if timeline is None:
        return
    if errors := [*find_batch_errors(config.data, timeline=timeline)]:
        yield from errors
        return
    end = timeline.first_sample(batch=timeline.batch_of_step(config.training.steps) + 1)
    if (tokens := max(end, timeline.stages[-1].first_sample) * max(stage.seq_len for stage in timeline.stages)) >> 62:
        yield f"training.steps = {config.training.steps}: the steps and stages have {tokens:.1e} tokens; lower them."
    changes = [phase for phase in phases(config, world_size) if phase.first_batch > 1]
    if changes and config.fault_tolerance.enable:
        rule = "a recovering replica group loads the state of the others, who may be in another stage by then"
        remedy = "let stages change weights only, or set fault_tolerance.enable to false"
        yield f"data.stages, first_step {changes[0].first_batch}: {rule}; {remedy}."
    has_sizes = any(stage.engine_options != timeline.base.engine_options for stage in timeline.stages)
    if has_sizes and any(freeze.local_batch_size for freeze in config.training.freeze_schedule):
        remedy = "set it in the entries of data.stages only"
        yield f"training.freeze_schedule: local_batch_size is set by data.stages too; {remedy}."


def _mesh_errors(config: Config, *, world_size: int, args: ModelArgs) -> list[str]:
    """Returns the broken rules of one mesh; a run has several where a freeze schedule changes it."""
    degrees = list(find_mesh_errors(config.parallelism, world_size))
    heads = args.heads
    errors: list[str] = []
    if not degrees:
        groups = config.fault_tolerance.group_size if config.fault_tolerance.enable else 1
        errors += _batch_size(config.training, resolved_degrees(config.parallelism, world_size), max(1, groups))
    return [
        *errors,
        *find_pipeline_errors(config, n_layers=args.n_layers, tied_embeddings=args.tied_embeddings),
        *degrees,
        *_tensor(config, heads),
        *_context(config, heads),
        *_recurrent(config, args),
        *_indexers(config, args),
        *_experts(config.parallelism, world_size, args),
        *_shards_of_experts(config, args),
        *_balancing(config, args),
        *_float8(config),
        *_cuda_graph(config, args, world_size=world_size),
    ]


def find_errors_of_teacher(config: Config, degrees: Degrees, args: ModelArgs) -> list[str]:
    """Returns the broken rules of a frozen model on the meshes of a run, in which `args` are those of the model."""
    errors: list[str] = []
    for phase in phases(config, degrees.world_size):
        of_phase = [*_tensor(phase.config, args.heads), *_context(phase.config, args.heads)]
        of_phase += [*_recurrent(phase.config, args), *_shards_of_experts(phase.config, args)]
        of_phase += [*_experts(phase.config.parallelism, degrees.world_size, args)] if args.num_experts else []
        if (seq_len := phase.config.training.seq_len) > args.max_seq_len:
            of_phase.append(f"it takes sequences of up to {args.max_seq_len} tokens, and training.seq_len is {seq_len}")
        errors += [error for error in of_phase if error not in errors]
    return errors


def _tensor(config: Config, heads: dict[str, int]) -> Iterator[str]:
    degree = config.parallelism.tensor_parallel_degree
    sizes = {} if config.parallelism.context_parallel_degree > 1 else {"training.seq_len": config.training.seq_len}
    sizes |= {f"model.args.{key}": size for key, size in heads.items()}
    for key, size in sizes.items():
        if size % degree:
            yield (
                f"parallelism.tensor_parallel_degree = {degree}: does not divide {key} {size}; set it to a divisor "
                f"({either(nearest_divisors(size, degree))}), or {key} to a multiple of it."
            )


def _experts(parallelism: Parallelism, world_size: int, args: ModelArgs) -> Iterator[str]:
    """The expert axis divides shard x context x tensor, and the experts of the model."""
    degree = parallelism.expert_parallel_degree
    if degree == 1:
        return
    option = f"parallelism.expert_parallel_degree = {degree}"
    if not args.num_experts:
        yield f"{option}: the model has no experts; set it to 1, or choose a model with experts."
        return
    if args.num_experts % degree:
        divisors = either(nearest_divisors(args.num_experts, degree))
        yield f"{option}: does not divide the model's {args.num_experts} experts; set it to a divisor ({divisors})."
    if any(find_mesh_errors(parallelism, world_size)):
        return
    degrees = resolved_degrees(parallelism, world_size)
    ranks = degrees.dp_shard * degrees.cp * degrees.tp
    if ranks % degree:
        divisors = either(nearest_divisors(ranks, degree))
        factors = f"shard {degrees.dp_shard} x context {degrees.cp} x tensor {degrees.tp} = {ranks}"
        yield f"{option}: does not divide {factors}; set it to a divisor ({divisors})."


def _shards_of_experts(config: Config, args: ModelArgs) -> Iterator[str]:
    """Without expert parallelism every tensor-parallel rank has a part of each expert."""
    moe: MoEArgs | None = getattr(args, "moe", None)
    degree = config.parallelism.tensor_parallel_degree
    unit = (4 if config.training.mixed_precision_param == "float32" else 8) * degree
    if moe is not None and config.parallelism.expert_parallel_degree == 1 and degree > 1 and moe.hidden_dim % unit:
        rule = f"tensor {degree} shards it, and grouped products need rows of a multiple of 16 bytes"
        remedy = f"set it to {either(nearest_multiples(unit, moe.hidden_dim))}, or use expert_parallel_degree"
        yield f"model.args.moe.hidden_dim = {moe.hidden_dim}: must be a multiple of {unit}, because {rule}; {remedy}."


def _balancing(config: Config, args: ModelArgs) -> Iterator[str]:
    """The options of routers need experts, and every replica group must have the same routers."""
    if config.debug.moe_force_load_balance and not args.num_experts:
        remedy = "set it to false, or choose a model with experts."
        yield f"debug.moe_force_load_balance = true: the model has no experts; {remedy}"
    moe: MoEArgs | None = getattr(args, "moe", None)
    options = config.fault_tolerance
    if moe is None or not options.enable or options.semi_sync_method is None:
        return
    for name in ("expert_bias", "batch_balance"):
        if value := getattr(moe, name):
            rule = "with fault_tolerance.semi_sync_method every replica group would keep a load of its own"
            yield f"model.args.moe.{name} = {shown(value)}: {rule}; leave one of the two out."


def _context(config: Config, heads: dict[str, int]) -> Iterator[str]:
    parallelism, seq_len = config.parallelism, config.training.seq_len
    degree, tensor = parallelism.context_parallel_degree, parallelism.tensor_parallel_degree
    method = parallelism.context_parallel_rotate_method
    if degree == 1:
        return
    unit = degree * math.lcm(tensor, 1 if method == "alltoall" else 2)
    if seq_len % unit:
        yield (
            f"parallelism.context_parallel_degree = {degree}: with the rotate method {method} and tensor {tensor}, "
            f"training.seq_len {seq_len} must be a multiple of {unit}; set it to "
            f"{either(nearest_multiples(unit, seq_len))}."
        )
    for key in ("n_heads", "n_kv_heads"):  # those of linear attention are not exchanged
        count = heads[key]
        if method == "alltoall" and count % tensor == 0 and count // tensor % degree:
            yield (
                f'parallelism.context_parallel_rotate_method = "alltoall": context {degree} x tensor {tensor} does not '
                f'divide model.args.{key} {count}; set it to "allgather" or "ring", which leave heads whole, or the '
                "degree to a divisor."
            )


def _recurrent(config: Config, args: ModelArgs) -> Iterator[str]:
    """Convolutions see tokens of one other piece of a row, indexers all keys."""
    parallelism, seq_len = config.parallelism, config.training.seq_len
    pieces = parallelism.context_parallel_degree * (
        1 if parallelism.context_parallel_rotate_method == "alltoall" else 2
    )
    seen = getattr(args, "linear_conv", 1) - 1
    if parallelism.context_parallel_degree > 1 and seq_len // pieces < seen:
        yield (
            f"training.seq_len = {seq_len}: convolutions see {seen} tokens before each, and one of {pieces} pieces of "
            f"a row has {seq_len // pieces}; set it to at least {seen * pieces}, or context_parallel_degree to 1."
        )
    method = parallelism.context_parallel_rotate_method
    if parallelism.context_parallel_degree > 1 and method != "allgather" and _selects_keys(args):
        rule = "indexers select among the keys of all ranks"
        yield f'parallelism.context_parallel_rotate_method = "{method}": {rule}; set it to "allgather".'


def _selects_keys(args: ModelArgs) -> bool:
    return any(kind.selected for kind in args.layer_kinds())


def _indexers(config: Config, args: ModelArgs) -> Iterator[str]:
    """What models with indexers cannot do."""
    if (threshold := config.optimizer.qk_clip) is not None and _selects_keys(args):
        rule = "the largest logits of attention to selected keys are not measured"
        yield f"optimizer.qk_clip = {threshold:g}: {rule}; remove it."
    if config.parallelism.pipeline_parallel_degree > 1 and getattr(args, "indexer_stage", None) == "warm-up":
        rule = "no gradient goes from stage to stage where only indexers are trained"
        yield f'model.args.indexer_stage = "warm-up": {rule}; set parallelism.pipeline_parallel_degree to 1.'


def _float8(config: Config) -> Iterator[str]:
    """Gradients of weights are products over the tokens that a rank has at once."""
    if not config.model.converters:
        return
    from torchtitan_clone.models.float8 import MULTIPLE

    degree, seq_len = config.parallelism.context_parallel_degree, config.training.seq_len
    if seq_len % (unit := MULTIPLE * degree):
        yield (
            f"training.seq_len = {seq_len}: products in float8 over the tokens of one of {degree} context-parallel "
            f"ranks need a multiple of {unit}; set it to {either(nearest_multiples(unit, seq_len))}, or "
            "model.converters to []."
        )


def _cuda_graph(config: Config, args: ModelArgs, *, world_size: int) -> Iterator[str]:
    """A graph has the same kernels on tensors of the same shapes in every step, and no collectives."""
    training = config.training
    if not config.compile.cuda_graph:
        return
    has_windows = any(kind.window or kind.chunk or kind.recurrent for kind in args.layer_kinds())
    reasons = {
        "training.document_masking to false": training.document_masking,
        "training.enable_cpu_offload to false": training.enable_cpu_offload,
        "model.converters to []": bool(config.model.converters),
        "the number of ranks to 1": world_size > 1,
        "fault_tolerance.enable to false": config.fault_tolerance.enable,
        "model.name to a family without experts, windows and linear attention": args.num_experts > 0 or has_windows,
    }
    if remedies := [remedy for remedy, is_needed in reasons.items() if is_needed]:
        rule = "a graph is for dense models on one GPU, in float32 or bfloat16, without masks of documents"
        yield f"compile.cuda_graph = true: {rule}; set {' and '.join(remedies)}, or compile.cuda_graph to false."


def _batch_size(training: Training, degrees: Degrees, groups: int) -> Iterator[str]:
    rows, local, ranks = training.global_batch_size, training.local_batch_size, degrees.data * groups
    at_once = local * ranks
    if rows == -1 or rows % at_once == 0:
        return
    remedy = f"set training.global_batch_size to {either(nearest_multiples(at_once, rows))}"
    if rows % ranks == 0:
        remedy += f", or training.local_batch_size to {either(nearest_divisors(rows // ranks, local))}"
    yield (
        f"training.global_batch_size = {rows}: not a multiple of training.local_batch_size {local} x data-parallel "
        f"degree {degrees.data}{f' x replica groups {groups}' if groups > 1 else ''} = {at_once}; {remedy}."
    )


def _width(config: Config, args: ModelArgs) -> Iterator[str]:
    """Weights in the Hugging Face format have no factors of scores and logits, and Muon has one rate for all widths."""
    if not args.mup_base_dim:
        return
    option, checkpoint = f"model.args.mup_base_dim = {args.mup_base_dim}", config.checkpoint
    if checkpoint.initial_load_in_hf or checkpoint.last_save_in_hf or checkpoint.hf_export_interval:
        rule = "the Hugging Face format has no model whose scores and logits are scaled by its width"
        yield f"{option}: {rule}; set it to 0, or neither import nor export weights in this format."
    kinds = {config.optimizer.name: config.optimizer.args} | {g.name: g.args for g in config.optimizer.groups if g.name}
    for name, given in kinds.items():
        if name == "Muon" and given.get("adjust_lr") != "spectral":
            yield f'{option}: the rate of Muon must not depend on the width; set its args.adjust_lr to "spectral".'
        elif name not in ("AdamW", "Adam", "Muon"):
            yield f'{option}: muP has no rates for optimizer "{name}"; choose AdamW or Muon, or set it to 0.'


def _model_limits(config: Config, args: ModelArgs, *, tokenizer_vocab_size: int | None) -> Iterator[str]:
    name = f"{config.model.name} {config.model.flavor}"
    if config.training.seq_len > args.max_seq_len:
        yield (
            f"training.seq_len = {config.training.seq_len}: {name} takes sequences of up to {args.max_seq_len} tokens; "
            f"set it to at most {args.max_seq_len}, or raise model.args.max_seq_len."
        )
    if tokenizer_vocab_size is not None and tokenizer_vocab_size > args.vocab_size:
        tokenizer = config.model.hf_assets_path or "this package"
        yield (
            f"model.args.vocab_size = {args.vocab_size}: the tokenizer of {tokenizer} has "
            f"{tokenizer_vocab_size} tokens; set it to at least {tokenizer_vocab_size}, or model.hf_assets_path to the "
            "model's own tokenizer."
        )


def _freeze_schedule(config: Config, args: ModelArgs) -> Iterator[str]:
    """Checks the entries against each other; every phase must obey all other rules too."""
    step, layers, degree = 0, 0, config.parallelism.pipeline_parallel_degree
    for freeze in config.training.freeze_schedule:
        point = f"training.freeze_schedule, step {freeze.step}"
        if freeze.step <= step:
            yield f"{point}: must be above {step}; list the steps in increasing order, from 1."
        if not layers < freeze.layers < args.n_layers:
            yield (
                f"{point}: layers = {freeze.layers} must be above {layers} and below model.args.n_layers "
                f"{args.n_layers}; each entry freezes more layers, and the last layer is always trained."
            )
        if (wanted := freeze.pipeline_parallel_degree) is not None:
            if degree % wanted:
                yield (
                    f"{point}: pipeline_parallel_degree = {wanted} does not divide the previous degree {degree}; "
                    "set it to a divisor, for example 1."
                )
                return
            degree = wanted
        step, layers = freeze.step, freeze.layers
    if config.training.freeze_schedule and config.fault_tolerance.enable:
        yield (
            "training.freeze_schedule: a recovering replica group loads tensors of the others, which may have another "
            "mesh by then; remove it, or set fault_tolerance.enable to false."
        )
    if config.training.freeze_schedule and args.tied_embeddings:
        yield (
            "training.freeze_schedule: freezes the embedding, which is also the weight of the output and must be "
            "trained; set model.args.tied_embeddings to false."
        )

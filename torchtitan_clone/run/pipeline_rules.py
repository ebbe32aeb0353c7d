"""Rules of pipelines: schedule, stages, the layers of each, and micro-batches. Those of other axes are in rules.py."""

from collections.abc import Iterator

from torchtitan_clone.config import Config
from torchtitan_clone.config.checks import find_unknown_schedule
from torchtitan_clone.config.messages import shown
from torchtitan_clone.config.schema import Parallelism
from torchtitan_clone.parallel.stages import SCHEDULES, model_modules, num_stages, read_schedule_file, splits_backward

_PIPELINE = "parallelism.pipeline_parallel_"


def find_pipeline_errors(config: Config, *, n_layers: int, tied_embeddings: bool) -> list[str]:
    """Returns one message for each broken rule; none without a pipeline."""
    parallelism = config.parallelism
    if parallelism.pipeline_parallel_degree == 1:
        return []
    # The later rules compute with what the earlier ones check.
    if unusable := [*find_pipeline_schedule_errors(parallelism)] or [*_num_stages(parallelism, n_layers)]:
        return unusable
    split = _stage_modules if parallelism.module_fqns_per_model_part else _stage_layers
    errors = [*_tied_stages(parallelism, tied_embeddings), *split(parallelism, n_layers), *_splits_backward(config)]
    stages = num_stages(parallelism, n_layers=n_layers)
    errors += _microbatches(parallelism, stages, "training.local_batch_size", config.training.local_batch_size)
    if config.validation.enable or config.evaluation.enable:
        errors += _microbatches(parallelism, stages, "validation.local_batch_size", config.validation.local_batch_size)
    return errors


def find_pipeline_schedule_errors(parallelism: Parallelism) -> Iterator[str]:
    """Yields a message if there is no such schedule, or if its file cannot be read or schedules other ranks."""
    path = parallelism.pipeline_parallel_schedule_csv
    ranks = parallelism.pipeline_parallel_degree
    yield from find_unknown_schedule(parallelism, known=SCHEDULES)
    if not path:
        return
    try:
        scheduled = 1 + max(read_schedule_file(path).ranks)
    except (OSError, ValueError) as error:
        yield f"{_PIPELINE}schedule_csv = {shown(path)}: cannot be read as a schedule: {error}; see the option's help."
        return
    if scheduled != ranks:
        yield (
            f'{_PIPELINE}schedule_csv = "{path}": schedules {scheduled} ranks, but {_PIPELINE}degree is {ranks}; '
            f"set the degree to {scheduled}."
        )


def _tied_stages(parallelism: Parallelism, tied_embeddings: bool) -> Iterator[str]:
    if tied_embeddings:
        yield (
            f"{_PIPELINE}degree = {parallelism.pipeline_parallel_degree}: the first stage holds the embedding and the "
            "last the output, so they cannot share a weight; set model.args.tied_embeddings to false, or the degree "
            "to 1."
        )


def _num_stages(parallelism: Parallelism, n_layers: int) -> Iterator[str]:
    """The schedule supports this number of stages."""
    if parallelism.pipeline_parallel_schedule_csv:
        stages = len(read_schedule_file(parallelism.pipeline_parallel_schedule_csv).ranks)
        named = parallelism.module_fqns_per_model_part
        if named is not None and len(named) != stages:
            yield (
                f"parallelism.module_fqns_per_model_part: has {len(named)} model parts, but the schedule file has "
                f"{stages} stages; make the numbers equal."
            )
        return
    ranks = parallelism.pipeline_parallel_degree
    stages = num_stages(parallelism, n_layers=n_layers)
    exactly = SCHEDULES[parallelism.pipeline_parallel_schedule].stages_per_rank
    if stages == exactly * ranks if exactly else stages and stages % ranks == 0:
        return
    wanted = f"{exactly * ranks}" if exactly else f"a multiple of {ranks}"
    option = "module_fqns_per_model_part" if parallelism.module_fqns_per_model_part is not None else (
        "pipeline_parallel_layers_per_stage"
    )  # fmt: skip
    yield (
        f"parallelism.{option}: gives {stages} stages; {parallelism.pipeline_parallel_schedule} on {ranks} ranks needs "
        f"{wanted}; change it or remove it."
    )


def _stage_layers(parallelism: Parallelism, n_layers: int) -> Iterator[str]:
    """Every stage has a module; the first and the last have one even without a layer."""
    stages = num_stages(parallelism, n_layers=n_layers)
    if n_layers < stages - 2:
        yield (
            f"{_PIPELINE}degree = {parallelism.pipeline_parallel_degree}: model.args.n_layers {n_layers} over {stages} "
            "stages leaves one without a layer; lower the degree or the number of stages per rank."
        )


def _stage_modules(parallelism: Parallelism, n_layers: int) -> Iterator[str]:
    parts = parallelism.module_fqns_per_model_part or []
    named, wanted = [name for part in parts for name in part], model_modules(n_layers)
    if named == wanted and all(parts):
        if parallelism.tensor_parallel_degree > 1 and parts[-1] == ["output"]:
            rule = "with tensor parallelism the norm leaves its tokens sharded to the output"
            yield f"parallelism.module_fqns_per_model_part: {rule}; list both in the last part."
        return
    unknown = [name for name in named if name not in wanted]
    missing = [name for name in wanted if name not in named]
    if unknown:
        what = f"the model has no {', '.join(unknown)}"
    elif missing:
        what = f"no model part has {', '.join(missing)}"
    else:
        what = "a model part is empty, or a module is repeated or out of order"
    yield (
        f"parallelism.module_fqns_per_model_part: {what}; list every module once, in the model's order: "
        f"tok_embeddings, layers.0 to layers.{n_layers - 1}, norm, output."
    )


def _splits_backward(config: Config) -> Iterator[str]:
    parallelism = config.parallelism
    if not splits_backward(parallelism):
        return
    schedule = parallelism.pipeline_parallel_schedule_csv or parallelism.pipeline_parallel_schedule
    recompute = config.activation_checkpoint
    if recompute.mode == "selective" and recompute.selective_ac_option == "op":
        yield (
            f'activation_checkpoint.selective_ac_option = "op": {schedule} computes gradients of inputs and of weights '
            'separately, and torch keeps what "op" saves for one backward; set it to a number, or '
            'activation_checkpoint.mode to "full" or "none".'
        )
    if parallelism.fsdp_reshard_after_forward == "always":
        yield (
            f'parallelism.fsdp_reshard_after_forward = "always": {schedule} computes gradients of weights separately, '
            'and torch loses those of weights that were freed in between; set it to "default" or "never".'
        )
    if config.compile.compiles_model:
        yield (
            f"compile.components: {schedule} computes gradients of inputs and weights separately, and a compiled "
            'block computes both at once; set compile.components to ["loss"], or the schedule to Interleaved1F1B.'
        )


def _microbatches(parallelism: Parallelism, stages: int, option: str, rows: int) -> Iterator[str]:
    """The sequences of a pass make as many micro-batches as the schedule needs."""
    size, ranks = parallelism.pipeline_parallel_microbatch_size, parallelism.pipeline_parallel_degree
    count, rest = divmod(rows, size)
    if rest:
        yield (
            f"{option} = {rows}: not a multiple of {_PIPELINE}microbatch_size {size}; set it to "
            f"{rows - rest + size}, or the micro-batch size to 1."
        )
        return
    if path := parallelism.pipeline_parallel_schedule_csv:
        wanted = read_schedule_file(path).microbatches
        if count != wanted:
            yield f"{option} = {rows}: makes {count} micro-batches, {path} runs {wanted}; set it to {wanted * size}."
        return
    name = parallelism.pipeline_parallel_schedule
    needs = SCHEDULES[name].microbatches
    if needs == "one a stage" and count < stages:
        yield (
            f"{option} = {rows}: makes {count} micro-batches of {size}, and {name} needs one for each of its {stages} "
            f"stages; set it to at least {stages * size}, or {_PIPELINE}schedule to GPipe."
        )
    rounds = max(1, count // ranks)
    if needs == "equal rounds" and count % rounds:
        yield (
            f"{option} = {rows}: makes {count} micro-batches of {size}, and {name} needs a multiple of its {rounds} "
            f"rounds; set it to {count // ranks * ranks * size} or {(count // ranks + 1) * ranks * size}."
        )

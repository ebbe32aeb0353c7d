"""Rules of pipeline parallelism, before any process group starts."""

from collections.abc import Iterator

from torchtitan_clone.config.pipeline import (
    SCHEDULES,
    model_modules,
    num_stages,
    read_schedule_file,
    splits_backward,
)
from torchtitan_clone.config.schema import Config, Parallelism

_OPTION = "parallelism.pipeline_parallel_"


def pipeline_violations(config: Config, *, n_layers: int, tied_embeddings: bool) -> list[str]:
    """One message for each broken rule; none where there is no pipeline."""
    parallelism = config.parallelism
    if parallelism.pipeline_parallel_degree == 1:
        return []
    # The later rules compute with what the earlier ones check.
    if unusable := [*_schedule(parallelism)] or [*_stages(parallelism, n_layers)]:
        return unusable
    split = _modules if parallelism.module_fqns_per_model_part else _layers
    found = [*_tied(parallelism, tied_embeddings), *split(parallelism, n_layers), *_splits_backward(config)]
    stages = num_stages(parallelism, n_layers=n_layers)
    found += _microbatches(parallelism, stages, "training.local_batch_size", config.training.local_batch_size)
    if config.validation.enable:
        found += _microbatches(parallelism, stages, "validation.local_batch_size", config.validation.local_batch_size)
    return found


def _schedule(parallelism: Parallelism) -> Iterator[str]:
    name, path = parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_schedule_csv
    ranks = parallelism.pipeline_parallel_degree
    if not path:
        if name not in SCHEDULES:
            yield f'{_OPTION}schedule = "{name}": no such schedule; known: {", ".join(SCHEDULES)}.'
        return
    try:
        found = 1 + max(read_schedule_file(path).ranks)
    except (OSError, ValueError) as error:
        yield f'{_OPTION}schedule_csv = "{path}": cannot be used: {error}; see the option\'s help.'
        return
    if found != ranks:
        yield (
            f'{_OPTION}schedule_csv = "{path}": gives work to {found} ranks, not to those of {_OPTION}degree '
            f"{ranks}; set the degree to {found}."
        )


def _tied(parallelism: Parallelism, tied_embeddings: bool) -> Iterator[str]:
    if tied_embeddings:
        yield (
            f"{_OPTION}degree = {parallelism.pipeline_parallel_degree}: the first stage holds the embedding and the "
            "last the output, so they cannot be one weight; set model.args.tied_embeddings to false or the degree to 1."
        )


def _stages(parallelism: Parallelism, n_layers: int) -> Iterator[str]:
    """The number of stages is what the schedule can place."""
    if parallelism.pipeline_parallel_schedule_csv:
        stages = len(read_schedule_file(parallelism.pipeline_parallel_schedule_csv).ranks)
        named = parallelism.module_fqns_per_model_part
        if named is not None and len(named) != stages:
            yield (
                f"parallelism.module_fqns_per_model_part: has {len(named)} parts, the schedule's file {stages} stages; "
                "make them as many."
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
        f"{wanted}; change it or leave it out."
    )


def _layers(parallelism: Parallelism, n_layers: int) -> Iterator[str]:
    """Every stage has work; the first and the last have some without a layer too."""
    stages = num_stages(parallelism, n_layers=n_layers)
    if n_layers < stages - 2:
        yield (
            f"{_OPTION}degree = {parallelism.pipeline_parallel_degree}: model.args.n_layers {n_layers} over {stages} "
            f"stages leaves one without a layer; set the degree or the stages a rank lower."
        )


def _modules(parallelism: Parallelism, n_layers: int) -> Iterator[str]:
    parts = parallelism.module_fqns_per_model_part or []
    named, wanted = [name for part in parts for name in part], model_modules(n_layers)
    if named == wanted and all(parts):
        return
    unknown = [name for name in named if name not in wanted]
    missing = [name for name in wanted if name not in named]
    if unknown:
        what = f"the model has no {', '.join(unknown)}"
    elif missing:
        what = f"no part has {', '.join(missing)}"
    else:
        what = "a part is empty, or a module stands twice or out of order"
    yield (
        f"parallelism.module_fqns_per_model_part: {what}; name every module once, in the model's order: "
        f"tok_embeddings, layers.0 to layers.{n_layers - 1}, norm, output."
    )


def _splits_backward(config: Config) -> Iterator[str]:
    parallelism, compile = config.parallelism, config.compile
    if not splits_backward(parallelism):
        return
    schedule = parallelism.pipeline_parallel_schedule_csv or parallelism.pipeline_parallel_schedule
    if parallelism.fsdp_reshard_after_forward == "always":
        yield (
            f'parallelism.fsdp_reshard_after_forward = "always": {schedule} computes gradients of weights apart, and '
            'torch loses those of weights that were freed in between; set it to "default" or "never".'
        )
    if compile.enable and "model" in compile.components:
        yield (
            f"compile.components: {schedule} computes gradients of inputs and weights apart, and a compiled block "
            'gives both at once; set compile.components to ["loss"], or the schedule to Interleaved1F1B.'
        )


def _microbatches(parallelism: Parallelism, stages: int, option: str, rows: int) -> Iterator[str]:
    """The rows of a pass make as many micro-batches as the schedule needs."""
    size, ranks = parallelism.pipeline_parallel_microbatch_size, parallelism.pipeline_parallel_degree
    count, rest = divmod(rows, size)
    if rest:
        yield (
            f"{option} = {rows}: not a multiple of {_OPTION}microbatch_size {size}; set it to "
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
            f"stages; set it to at least {stages * size}, or {_OPTION}schedule to GPipe."
        )
    rounds = max(1, count // ranks)
    if needs == "equal rounds" and count % rounds:
        yield (
            f"{option} = {rows}: makes {count} micro-batches of {size}, and {name} needs a multiple of its {rounds} "
            f"rounds; set it to {count // ranks * ranks * size} or {(count // ranks + 1) * ranks * size}."
        )

"""Evaluation while training, on the mesh of the run: log-likelihoods of the texts of all tasks."""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from torchtitan_clone.parallel.gradients import sum_over_ranks
from torchtitan_clone.parallel.mesh import batch_rank
from torchtitan_clone.run.engine import Engine
from torchtitan_clone.run.forward_backward import build_plan_forward_backward
from torchtitan_clone.run.loaders import tokens_of_rank
from torchtitan_clone.run.stopping import Timeouts
from torchtitan_clone.tools.evaluation_tasks import Task
from torchtitan_clone.tools.scoring import log_likelihoods, pack_texts, text_sums


@torch.no_grad()
def evaluate(
    engine: Engine, tasks: Sequence[Task], *, timeouts: Timeouts, stops: Callable[[], bool]
) -> dict[str, Mapping[str, float]] | None:
    """Returns the metrics of each task by its name; None if `stops` interrupted it. A collective."""
    plan = engine.plan
    texts = [text for task in tasks for text in task.texts]
    sums = text_sums(len(texts), vocab_size=plan.tokenizer.vocab_size, device=engine.device)
    forward = build_plan_forward_backward(
        engine.model_parts, plan=plan, mesh=engine.mesh, device=engine.device, source_sums=sums
    )
    size, ranks = plan.config.validation.local_batch_size, plan.degrees.data
    rows = pack_texts(texts, seq_len=plan.config.training.seq_len, multiple=size * ranks)
    indices = tokens_of_rank(plan, rank=dist.get_rank())
    for batch in rows.microbatches(size)[batch_rank(plan.degrees, rank=dist.get_rank()) :: ranks]:
        own = batch if indices is None else batch.select_tokens(indices)
        forward([own.to(engine.device)], num_targets=1)
        timeouts.beat()
        if stops():
            return None
    nats = iter(log_likelihoods(sums, sum_over_ranks(sums.own(counts=engine.mesh.is_loss_leader).tolist())))
    return {task.name: task.measure([next(nats) for _ in task.texts]) for task in tasks}

"""The most likely continuations of prompts, on the mesh of a run: each token takes a forward of all tokens before it.

There is no cache, because the tokens of a row may be on several ranks.
Legend: B rows, T tokens of a row, D model, V vocabulary, N tokens of all rows, S rows with a next token.
"""

from collections.abc import Callable, Sequence
from itertools import takewhile

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_clone.config import ConfigError
from torchtitan_clone.data import Tokenizer
from torchtitan_clone.data.packing import Batch
from torchtitan_clone.documents import is_unicode
from torchtitan_clone.ops import IGNORE_INDEX
from torchtitan_clone.ops.attention import BLOCK
from torchtitan_clone.ops.vocabulary import local_shards
from torchtitan_clone.parallel.gradients import sum_over_ranks
from torchtitan_clone.run.engine import Engine
from torchtitan_clone.run.forward_backward import build_plan_forward_backward
from torchtitan_clone.run.loaders import tokens_of_rank
from torchtitan_clone.run.plan import RunPlan
from torchtitan_clone.run.stopping import Timeouts


def encode_prompts(prompts: Sequence[str], *, tokenizer: Tokenizer, seq_len: int, new_tokens: int) -> list[list[int]]:
    """Returns the tokens of validation.prompts; ConfigError if one is empty, too long or not valid Unicode."""
    if wrong := [number for number, prompt in enumerate(prompts, 1) if not is_unicode(prompt)]:
        raise ConfigError(f"validation.prompts: prompt {wrong[0]} is not valid UTF-8; correct its bytes")
    encoded = tokenizer.encode_batch(prompts)
    problems = [f"validation.prompts: prompt {number} is empty" for number, ids in enumerate(encoded, 1) if not ids]
    problems += [
        f"validation.prompts: prompt {number} has {len(ids):,} tokens, and with validation.sample_tokens {new_tokens} "
        f"more than training.seq_len {seq_len:,}; shorten one of them"
        for number, ids in enumerate(encoded, 1)
        if len(ids) + new_tokens > seq_len
    ]
    if problems:
        raise ConfigError(problems)
    return encoded


class NextTokens:
    """A loss function that keeps the most likely token after each position with a target, whose group is its row."""

    def __init__(self, rows: int, *, device: torch.device) -> None:
        self.tokens_B = torch.zeros(rows, dtype=torch.int64, device=device)

    def __call__(self, hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor, groups_BT: Tensor) -> Tensor:
        hidden_BTD, weight_VD, vocabulary = local_shards(hidden_BTD, weight_VD)
        index_S = (targets_BT.flatten() != IGNORE_INDEX).nonzero()[:, 0]
        logits_SV = (hidden_BTD.flatten(0, 1)[index_S] @ weight_VD.T).float()
        best_S, column_S = logits_SV.nan_to_num(nan=-torch.inf).max(dim=-1)  # NaN is equal to no maximum
        largest_S = vocabulary.reduce_(best_S.clone(), dist.ReduceOp.MAX)
        # Of equally likely tokens the first, which several ranks may have.
        token_S = torch.where(best_S == largest_S, column_S + vocabulary.start, 1 << 40)
        self.tokens_B[groups_BT.flatten()[index_S]] = vocabulary.reduce_(token_S, dist.ReduceOp.MIN)
        return torch.zeros((), device=hidden_BTD.device)


@torch.no_grad()
def sample(
    engine: Engine, prompts: Sequence[Sequence[int]], *, timeouts: Timeouts, stops: Callable[[], bool]
) -> list[list[int]] | None:
    """Returns the tokens that continue each prompt, up to the end of the document; None if `stops` interrupted it.

    A collective. All data-parallel ranks compute the same rows.
    """
    plan, options = engine.plan, engine.plan.config.validation
    size, new_tokens = options.local_batch_size, options.sample_tokens
    length = _row_length(plan, tokens=max(map(len, prompts)) + new_tokens)
    indices = tokens_of_rank(plan, rank=dist.get_rank(), seq_len=length)
    rows = [[*prompt] for prompt in prompts]
    next_tokens = NextTokens(len(rows), device=engine.device)
    forward = build_plan_forward_backward(
        engine.model_parts, plan=plan, mesh=engine.mesh, device=engine.device, loss_fn=next_tokens
    )
    for _ in range(new_tokens):
        next_tokens.tokens_B.zero_()
        batch = _batch(rows, seq_len=length, multiple=size if plan.degrees.pp > 1 else 1)
        batch = batch if indices is None else batch.select_tokens(indices)
        forward([part.to(engine.device) for part in batch.microbatches(size)], num_targets=1)
        own = (next_tokens.tokens_B * engine.mesh.is_loss_leader).tolist()
        chosen = [round(total) // plan.degrees.data for total in sum_over_ranks(own)]
        for row, token in zip(rows, chosen, strict=True):
            row.append(token)
        timeouts.beat()
        if stops():
            return None
    found = [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]
    end_ids = plan.tokenizer.end_ids
    return [list(takewhile(lambda token: token not in end_ids, ids)) for ids in found]


def _row_length(plan: RunPlan, *, tokens: int) -> int:
    """Returns a length of rows for so many tokens that each rank has complete blocks of."""
    multiple = 2 * BLOCK * plan.degrees.cp * plan.degrees.tp
    return min(plan.config.training.seq_len, -(-tokens // multiple) * multiple)


def _batch(rows: Sequence[Sequence[int]], *, seq_len: int, multiple: int) -> Batch:
    """Returns rows of one document each, and empty ones; the last token of a row has a target, and its row as group."""
    shape = (len(rows) + -len(rows) % multiple, seq_len)
    tokens_BT, targets_BT = torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORE_INDEX)
    for number, row in enumerate(rows):
        tokens_BT[number, : len(row)] = torch.tensor(row)
        targets_BT[number, len(row) - 1] = 0
    return Batch(
        tokens_BT=tokens_BT,
        targets_BT=targets_BT,
        positions_BT=torch.arange(seq_len).repeat(shape[0], 1),
        documents_BT=torch.zeros(shape, dtype=torch.int32),
        num_targets=len(rows),
        groups_BT=torch.arange(shape[0])[:, None].repeat(1, seq_len),
    )

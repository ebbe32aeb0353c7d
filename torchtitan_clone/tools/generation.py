"""Generates text from a trained model in one process.

Legend: B rows, T tokens, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated

import torch
from torch import Tensor

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.checks import find_range_errors
from torchtitan_clone.config.schema_training import Range, Size
from torchtitan_clone.documents import DocumentError, is_unicode, read_regular
from torchtitan_clone.tools.kv_cache import LastToken, apply_kv_cache
from torchtitan_clone.tools.trained_model import TrainedModel


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen: the most likely one, or at random where a temperature is set."""

    max_new_tokens: Size = 64
    temperature: Annotated[float, Range(1e-6, 1e6)] | None = None
    """What logits are divided by."""
    top_k: Size | None = None
    """Choose among this many of the most likely tokens."""
    top_p: Annotated[float, Range(0.0, 1.0, above=True)] | None = None
    """Choose among the fewest of the most likely tokens whose probabilities sum to at least this."""
    seed: Annotated[int, Range(0, 2**31 - 1)] = 0
    batch_size: Size = 8
    """Prompts that are continued together."""

    def check(self) -> None:
        """ConfigError with every value that is not valid."""
        found = list(find_range_errors(self, at="--"))
        if self.temperature is None and (self.top_k, self.top_p) != (None, None):
            found.append("--top_k and --top_p require --temperature: without it, the most likely token is chosen")
        if found:
            raise ConfigError(found)


def read_prompts(file: Path) -> list[str]:
    """Returns the lines of a text file; ConfigError if it cannot be read."""
    try:
        lines = read_regular(file, follow_links=True).decode().removesuffix("\n").split("\n")
    except (OSError, DocumentError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompt_file={file} cannot be read as text: {error}") from None
    if lines == [""]:
        raise ConfigError(f"--prompt_file={file} is empty; write a prompt into each line")
    return [line.removesuffix("\r") for line in lines]


class Generator:
    """Continues prompts with one model; without `use_cache` every token computes all tokens before it again."""

    def __init__(
        self,
        trained: TrainedModel,
        *,
        sampling: Sampling,
        use_cache: bool = True,
        parse_special_tokens: bool = False,
    ) -> None:
        sampling.check()
        self._trained = trained
        self._prompt_tokenizer = trained.tokenizer
        if parse_special_tokens:
            self._prompt_tokenizer = trained.tokenizer.parsing_special_tokens(option="--parse_special_tokens")
        self._sampling = sampling
        # Modules of its own with the weights of the trained model, which stays usable for other things.
        shared = {id(tensor): tensor for tensor in (*trained.model.parameters(), *trained.model.buffers())}
        self._model = deepcopy(trained.model, memo=shared)
        self._cache = apply_kv_cache(self._model) if use_cache else None
        self._model.add_module("output", LastToken(self._model.get_submodule("output")))

    def encode(self, prompts: Sequence[str]) -> list[list[int]]:
        """Returns the tokens of each prompt; ConfigError for those that are empty, too long or not valid Unicode."""
        if wrong := [number for number, prompt in enumerate(prompts, start=1) if not is_unicode(prompt)]:
            raise ConfigError(f"prompt {wrong[0]} is not valid UTF-8; correct its bytes")
        encoded = self._prompt_tokenizer.encode_batch(prompts)
        limit, new = self._trained.args.max_seq_len, self._sampling.max_new_tokens
        problems = [f"prompt {number} is empty" for number, ids in enumerate(encoded, start=1) if not ids]
        problems += [
            f"prompt {number} has {len(ids):,} tokens, and with --max_new_tokens={new} more than the {limit:,} of the "
            "model's context (model.args.max_seq_len); shorten one of them"
            for number, ids in enumerate(encoded, start=1)
            if len(ids) + new > limit
        ]
        if problems:
            raise ConfigError(problems)
        return encoded

    def complete(self, encoded: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Yields the tokens that continue each of these prompts, without the one that ends the text."""
        batch_size = self._sampling.batch_size
        for first in range(0, len(encoded), batch_size):
            batch = encoded[first : first + batch_size]
            found: list[list[int]] = [[] for _ in batch]
            for step in self.stream(batch, first_prompt=first):
                for ids, token in zip(found, step, strict=True):
                    ids += [] if token is None else [token]
            yield from found

    def decode(self, ids: Sequence[int], *, after: Sequence[int] = ()) -> str:
        """Returns what tokens add to the text of those before; by itself it could lose the space at its start."""
        decode = self._trained.tokenizer.decode
        return decode([*after, *ids])[len(decode(after)) :]

    def stream_text(self, prompt: Sequence[int]) -> Iterator[str]:
        """Yields the text that continues one prompt, complete characters of it as they come."""
        ids = [*prompt]
        shown = len(self.decode(ids))
        for (token,) in self.stream([prompt]):
            ids += [] if token is None else [token]
            text = self.decode(ids)
            if not text.endswith("\ufffd"):  # otherwise the rest of a character follows
                yield text[shown:]
                shown = len(text)

    @torch.inference_mode()
    def stream(self, prompts: Sequence[Sequence[int]], *, first_prompt: int = 0) -> Iterator[list[int | None]]:
        """Yields the next token of each row, None for rows whose text has ended, until all have.

        Random choices depend on the seed and the number of the prompt, the first of which is `first_prompt`.
        """
        sampling, tokenizer = self._sampling, self._trained.tokenizer
        draws = [Random(f"{sampling.seed}/{first_prompt + row}") for row in range(len(prompts))]
        tokens_BT, padding_B1 = _left_padded(prompts, device=self._trained.device)
        if self._cache is not None:
            limit = tokens_BT.shape[1] + sampling.max_new_tokens
            self._cache.reset(limit=limit, is_padded=padding_B1 is not None)
        has_ended = [False] * len(prompts)
        for _ in range(sampling.max_new_tokens):
            logits_BV = self._next_logits(tokens_BT, padding_B1)[:, : tokenizer.vocab_size]
            next_B1 = choose(logits_BV, sampling=sampling, draws=draws)
            ids: list[int] = next_B1[:, 0].tolist()  # host sync
            has_ended = [ended or token in tokenizer.end_ids for ended, token in zip(has_ended, ids, strict=True)]
            if all(has_ended):
                return
            yield [None if ended else token for ended, token in zip(has_ended, ids, strict=True)]
            tokens_BT = torch.cat((tokens_BT, next_B1), dim=1)

    def _next_logits(self, tokens_BT: Tensor, padding_B1: Tensor | None) -> Tensor:
        """Returns the logits of the token after the last ones [B, V]."""
        start = self._cache.length if self._cache is not None else 0
        index_T = torch.arange(start, tokens_BT.shape[1], device=tokens_BT.device)
        # Padding is a document of its own, which no token of a prompt sees.
        documents_BT = None if start or padding_B1 is None else (index_T >= padding_B1).int()
        positions_BT = index_T.expand(len(tokens_BT), -1)
        if padding_B1 is not None:
            positions_BT = (positions_BT - padding_B1).clamp_min(0)
        logits_B1V = self._model(tokens_BT[:, start:], positions_BT=positions_BT, documents_BT=documents_BT)
        if self._cache is not None:
            self._cache.length = tokens_BT.shape[1]
        return logits_B1V[:, -1]


def _left_padded(prompts: Sequence[Sequence[int]], *, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Returns the tokens [B, T], and how many before each prompt are padding [B, 1]; None if none are."""
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    rows = [[0] * count + [*prompt] for count, prompt in zip(padding, prompts, strict=True)]
    return torch.tensor(rows, device=device), torch.tensor(padding, device=device)[:, None] if any(padding) else None


def choose(logits_BV: Tensor, *, sampling: Sampling, draws: Sequence[Random]) -> Tensor:
    """Returns a token of each row [B, 1]; each row draws one number from its generator.

    Source of top-p: arXiv 1904.09751.
    """
    if sampling.temperature is None:
        return logits_BV.argmax(dim=-1, keepdim=True)
    shares_BV, order_BV = (logits_BV.float() / sampling.temperature).softmax(dim=-1).sort(dim=-1, descending=True)
    if sampling.top_k is not None:
        shares_BV[:, sampling.top_k :] = 0.0
    if sampling.top_p is not None:
        sums_BV = shares_BV.cumsum(dim=-1)
        shares_BV = shares_BV.masked_fill(sums_BV - shares_BV >= sampling.top_p * sums_BV[:, -1:], 0.0)
    sums_BV = shares_BV.cumsum(dim=-1)
    drawn_B1 = torch.tensor([[draw.random()] for draw in draws], device=sums_BV.device)
    index_B1 = (sums_BV <= drawn_B1 * sums_BV[:, -1:]).sum(dim=-1, keepdim=True)
    # A number close to 1 is 1 in float32, after the last token that has a share.
    return order_BV.gather(1, torch.minimum(index_B1, (shares_BV > 0).sum(dim=-1, keepdim=True) - 1))

"""lm-evaluation-harness on a trained model, read without conversion; needs the extra "eval"."""

from collections.abc import Sequence

import torch
from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]

from torchtitan_clone.tools.generation import Generator, Sampling
from torchtitan_clone.tools.scoring import ScoredText, Scores, cut_text, pack_texts
from torchtitan_clone.tools.trained_model import TrainedModel

Request = tuple[tuple[str, str], list[int], list[int]]
"""Context and continuation, as texts and as tokens."""


class HarnessModel(TemplateLM):
    """A model of lm-evaluation-harness: log-likelihoods of packed texts, and greedy generation with a cache."""

    def __init__(self, trained: TrainedModel, *, rows: int = 8, seq_len: int | None = None) -> None:
        super().__init__()
        self._trained = trained
        self._rows = rows
        self._seq_len = min(seq_len or trained.args.max_seq_len, trained.args.max_seq_len)

    @property
    def eot_token_id(self) -> int:
        return self._trained.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        return self._trained.tokenizer.prefix_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        return self._trained.tokenizer.encode_batch([string], add_bos=add_special_tokens is not False)[0]

    def _loglikelihood_tokens(self, requests: Sequence[Request], **_: object) -> list[tuple[float, bool]]:
        texts = [self._text(context, continuation) for _, context, continuation in requests]
        return [(nats, not misses) for nats, misses in self._score(texts)]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-likelihood of each text, in stretches; the prefix token is before the first token."""
        totals: list[float] = []
        for (string,) in (request.args for request in requests):
            ids = [self.prefix_token_id, *self.tok_encode(string, add_special_tokens=False)]
            totals.append(sum(nats for nats, _ in self._score(cut_text(ids, seq_len=self._seq_len))))
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns the greedy continuations, up to the first of the texts that end them."""
        return [self._continue(context, **options) for context, options in (request.args for request in requests)]

    def _continue(self, context: str, *, until: str | Sequence[str] = (), max_gen_toks: int = 256, **_: object) -> str:
        until = [until] if isinstance(until, str) else until
        longest = self._trained.args.max_seq_len
        new_tokens = min(max_gen_toks, longest - 1)
        generator = Generator(self._trained, sampling=Sampling(max_new_tokens=new_tokens))
        text = ""
        for piece in generator.stream_text(self.tok_encode(context)[new_tokens - longest :]):
            text += piece
            if ends := [text.index(end) for end in until if end in text]:
                return text[: min(ends)]
        return text

    def _text(self, context: Sequence[int], continuation: Sequence[int]) -> ScoredText:
        """Returns the text with as much of the context as fits."""
        tokens = [*context, *continuation][-self._seq_len - 1 :]
        return ScoredText(tokens=tokens, first=max(1, len(tokens) - len(continuation)))

    @torch.inference_mode()
    def _score(self, texts: Sequence[ScoredText]) -> list[tuple[float, int]]:
        """Returns log-likelihood and number of tokens that are not the most likely ones, of each text."""
        trained = self._trained
        scores = Scores(len(texts), device=trained.device)
        seq_len = max((text.size for text in texts), default=1)
        for batch in pack_texts(texts, seq_len=seq_len).microbatches(self._rows):
            rows = batch.to(trained.device)
            trained.model(
                rows.tokens_BT, positions_BT=rows.positions_BT, documents_BT=rows.documents_BT,
                targets_BT=rows.targets_BT, groups_BT=rows.groups_BT, loss_fn=scores,
            )  # fmt: skip
        return list(zip(scores.nats.tolist(), map(int, scores.misses.tolist()), strict=True))

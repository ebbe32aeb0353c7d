"""Keys and values of earlier tokens, kept for generation: each step then computes one token of each row.

Rows are padded on the left, so that their newest tokens have one index. A layer with windows or chunks keeps as many
tokens as it can see, and overwrites the oldest. Latent attention keeps latents, and computes with those alone.
Linear attention keeps the state of its heads, and the tokens that its convolutions see. Experts keep nothing, and
compute one token in another way.

Legend: B batch, T tokens, D model, N heads, K kv heads, G queries of a kv head, H head dim, S tokens kept; L latent,
C dimensions of a head without positions, R those with rotary positions, V dimensions of a value; W tokens of a
convolution.
"""

from collections.abc import Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_clone.models.attention import DocumentMask
from torchtitan_clone.models.decoder import Decoder
from torchtitan_clone.models.delta_net import DeltaAttention, DeltaRule, ShortConvolution
from torchtitan_clone.models.mla import LatentAttention, Rotation
from torchtitan_clone.models.moe import Experts, MoE
from torchtitan_clone.models.sparse_latent import SparseLatentAttention
from torchtitan_clone.ops.attention import AttentionMask
from torchtitan_clone.ops.delta_rule import gated_delta_rule
from torchtitan_clone.ops.short_convolution import short_convolution
from torchtitan_clone.ops.sparse_attention import Index, index_scores, select_keys

Reach = int | None
"""Most tokens that a layer's tokens see, themselves included; None: all of their document."""


class CacheState:
    """What all layers have in common: the tokens before those of the next forward, and how many can be kept."""

    def __init__(self) -> None:
        self.length = 0
        self.limit = 0
        self.is_padded = False

    def reset(self, *, limit: int, is_padded: bool) -> None:
        """Forgets all tokens; `limit` is the number of tokens of the longest row, prompt and continuation."""
        self.length, self.limit, self.is_padded = 0, limit, is_padded

    def capacity(self, reach: Reach) -> int:
        """Returns the number of tokens that a layer keeps."""
        return self.limit if reach is None else min(reach, self.limit)


class CachedVectors:
    """Vectors of the newest tokens [B, K, S, H] of a layer, whose first `reserved` slots stay zero."""

    def __init__(self, state: CacheState, *, reach: Reach, reserved: int = 0) -> None:
        self._state = state
        self._reach = reach
        self._reserved = reserved
        self._slots = torch.empty(0)

    def fill(self, x_BKTH: Tensor) -> None:
        """Keeps the newest of the first tokens."""
        size, tokens = self._state.capacity(self._reach), x_BKTH.shape[2]
        shape = (*x_BKTH.shape[:2], self._reserved + size, x_BKTH.shape[3])
        self._slots = torch.zeros(shape, dtype=x_BKTH.dtype, device=x_BKTH.device)
        kept = range(max(0, tokens - size), tokens)
        slots = self._reserved + torch.arange(kept.start, kept.stop, device=x_BKTH.device) % size
        self._slots[:, :, slots] = x_BKTH[:, :, kept.start :]

    def append(self, x_BKH: Tensor) -> Tensor:
        """Adds one token, and returns all that are kept, in the order of CacheMask."""
        size, length = self._state.capacity(self._reach), self._state.length
        self._slots[:, :, self._reserved + length % size] = x_BKH
        return self._slots[:, :, : self._reserved + min(length + 1, size)]


class CacheMask(nn.Module):
    """Mask of the tokens that are kept for the next one; of the first tokens, what `mask` returns."""

    def __init__(self, mask: DocumentMask, *, state: CacheState):
        super().__init__()
        self._mask = mask
        self._state = state

    def forward(
        self, documents_BT: Tensor | None, positions_BT: Tensor, *, window: Reach = None, chunk: Reach = None,
        recurrent: bool = False, dtype: torch.dtype = torch.float32,
    ) -> AttentionMask:  # fmt: skip
        """Returns which of the tokens kept each row's next token sees [B, 1, 1, S]; None: all."""
        state = self._state
        if not state.length:
            options = {"window": window, "chunk": chunk, "recurrent": recurrent, "dtype": dtype}
            return self._mask(documents_BT, positions_BT, **options)
        if not state.is_padded and (chunk is None or state.limit <= chunk):
            return None  # a window keeps no others
        size = state.capacity(window or chunk)
        index_S = torch.arange(min(state.length + 1, size), device=positions_BT.device)
        seen_B1 = positions_BT % chunk + 1 if chunk else positions_BT + 1
        seen_B1 = seen_B1 if window is None else seen_B1.clamp_max(window)
        return ((state.length - index_S) % size < seen_B1)[:, None, None]


def attend(
    q_BKGH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask: Tensor | None, *, scale: float | None = None
) -> Tensor:
    """Returns attention [B, K, G, H] of one token: the queries of a kv head are rows of one product."""
    return F.scaled_dot_product_attention(q_BKGH, k_BKSH, v_BKSH, attn_mask=mask, scale=scale)


class CachedCore(nn.Module):
    """CoreAttention over the tokens kept and the next one."""

    def __init__(self, core: nn.Module, *, state: CacheState, reach: Reach, has_sinks: bool):
        super().__init__()
        self._core = core
        self._state = state
        self._reach = reach
        # A sink is a key of zero with a score of its own, and a value of zero.
        self._keys, self._values = (CachedVectors(state, reach=reach, reserved=int(has_sinks)) for _ in range(2))
        self._scores = torch.empty(0)  # what is added to those of the slots [1, K, G, 1 + S]

    def forward(
        self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, mask: AttentionMask, sinks_N: Tensor | None = None
    ) -> Tensor:
        if not self._state.length:
            self._keys.fill(k_BTKH.transpose(1, 2))
            self._values.fill(v_BTKH.transpose(1, 2))
            if sinks_N is not None:
                sinks_KG1 = sinks_N.to(q_BTNH.dtype).view(k_BTKH.shape[2], -1, 1)
                self._scores = F.pad(sinks_KG1, (0, self._state.capacity(self._reach)))[None]
            return self._core(q_BTNH, k_BTKH, v_BTKH, mask, sinks_N)
        k_BKSH, v_BKSH = self._keys.append(k_BTKH[:, 0]), self._values.append(v_BTKH[:, 0])
        q_BKGH = q_BTNH[:, 0].unflatten(1, (k_BKSH.shape[1], -1))
        assert mask is None or isinstance(mask, Tensor)
        if sinks_N is not None:
            scores = self._scores[..., : k_BKSH.shape[2]]
            mask = scores if mask is None else scores.masked_fill(F.pad(~mask, (1, 0)), -torch.inf)
        return attend(q_BKGH, k_BKSH, v_BKSH, mask).flatten(1, 2)[:, None]


class CachedLatentAttention(nn.Module):
    """LatentAttention that keeps L + R numbers of a token instead of the keys and values of all heads.

    Products with `wkv_b` move to queries and results, so that attention is over latents. Source: arXiv 2405.04434.
    """

    def __init__(self, attention: LatentAttention, *, state: CacheState, reach: Reach):
        super().__init__()
        self._attention = attention
        self._state = state
        self._store = CachedVectors(state, reach=reach)

    def forward(self, x_BTD: Tensor, rope: Rotation, mask: AttentionMask) -> Tensor:
        attention, q_BTL = self._attention, self._attention.query_latent(x_BTD)
        q_BTNH, (latent_BTL, key_BT1R) = attention.queries(q_BTL, rope), attention.latents(x_BTD, rope)
        given, mask = self.select(x_BTD, q_BTL, rope, mask)
        kept_BT = torch.cat((latent_BTL, key_BT1R[:, :, 0]), dim=-1)
        if not self._state.length:
            self._store.fill(kept_BT[:, None])
            return attention.attend(q_BTNH, latent_BTL, key_BT1R, mask, *given)
        kept_B1S, sizes = self._store.append(kept_BT), attention.sizes
        weight_N = attention.wkv_b.weight.unflatten(0, (q_BTNH.shape[2], -1))
        k_NCL, v_NVL = weight_N.split((sizes.nope, sizes.value), dim=1)
        q_NBC, q_NBR = q_BTNH[:, 0].transpose(0, 1).split((sizes.nope, sizes.rope), dim=-1)
        q_B1N = torch.cat((q_NBC @ k_NCL, q_NBR), dim=-1).transpose(0, 1)[:, None]
        assert mask is None or isinstance(mask, Tensor)
        out_B1N = attend(q_B1N, kept_B1S, kept_B1S, mask, scale=sizes.qk**-0.5)
        out_NBL = out_B1N[:, 0, :, : sizes.kv_latent].transpose(0, 1)
        return attention.wo((out_NBL @ v_NVL.transpose(1, 2)).transpose(0, 1).flatten(1)[:, None])

    def select(
        self, _x: Tensor, _latent: Tensor, _rope: Rotation, mask: AttentionMask
    ) -> tuple[Sequence[Index], AttentionMask]:
        """Returns what attention to the first tokens gets besides, and the mask of the next one."""
        return (), mask


class CachedSparseAttention(CachedLatentAttention):
    """SparseLatentAttention that keeps the indexer's keys too."""

    def __init__(self, attention: SparseLatentAttention, *, state: CacheState, reach: Reach):
        super().__init__(attention, state=state, reach=reach)
        self._indexer, self._top_k = attention.indexer, attention.core.top_k
        self._keys = CachedVectors(state, reach=reach)

    def select(
        self, x_BTD: Tensor, q_BTL: Tensor, rope: Rotation, mask: AttentionMask
    ) -> tuple[Sequence[Index], AttentionMask]:
        q_BTMI, k_BTI, weights_BTM = index = self._indexer(x_BTD, q_BTL, rope)
        if not self._state.length:
            self._keys.fill(k_BTI[:, None])
            return (index,), mask
        scores_B1S = index_scores((q_BTMI, self._keys.append(k_BTI)[:, 0], weights_BTM))
        assert mask is None or isinstance(mask, Tensor)
        visible_B1S = torch.ones_like(scores_B1S, dtype=torch.bool) if mask is None else mask[:, 0]
        return (index,), select_keys(scores_B1S, visible_B1S, top_k=self._top_k)[:, None]


class CachedConvolution(nn.Module):
    """ShortConvolution that keeps the W - 1 tokens before the next one."""

    def __init__(self, convolution: ShortConvolution, *, state: CacheState):
        super().__init__()
        self._convolution = convolution
        self._state = state
        self._kept = torch.empty(0)  # [B, W - 1, *]

    def forward(self, x_BTC: Tensor, starts_BT: Tensor | None) -> Tensor:
        weight_CW = self._convolution.weight
        if self._state.length:
            out_BTC = short_convolution(x_BTC, weight_CW, None, self._kept)
            self._kept = torch.cat((self._kept, x_BTC), dim=1)[:, 1:]
            return out_BTC
        count, tokens = weight_CW.shape[1] - 1, x_BTC.shape[1]
        self._kept = F.pad(x_BTC, (0, 0, count, 0))[:, tokens:]
        if starts_BT is not None:  # those of padding
            index_W = torch.arange(tokens - count, tokens, device=x_BTC.device)
            self._kept = self._kept.masked_fill((index_W < starts_BT[:, -1:])[..., None], 0.0)
        return self._convolution(x_BTC, starts_BT)


class CachedDeltaRule(DeltaRule):
    """DeltaRule that keeps the state after the newest token."""

    def __init__(self, *, state: CacheState):
        super().__init__()
        self._state = state
        self._kept: Tensor | None = None

    def forward(
        self, q_BTHK: Tensor, k_BTHK: Tensor, v_BTNV: Tensor, decay_BTN: Tensor, beta_BTN: Tensor,
        starts_BT: Tensor | None,
    ) -> Tensor:  # fmt: skip
        tensors = q_BTHK, k_BTHK, v_BTNV, decay_BTN, beta_BTN
        if self._state.length:
            out_BTNV, self._kept, _ = gated_delta_rule(*tensors, None, self._kept, chunk=1)
        else:
            out_BTNV, self._kept, _ = gated_delta_rule(*tensors, starts_BT)
        return out_BTNV


class ChosenExperts(nn.Module):
    """Experts whose weights are read for the next tokens only where one of these chose them.

    For CPUs, whose grouped products make a call for every expert, and where a host sync costs nothing.
    """

    def __init__(self, experts: Experts, *, state: CacheState):
        super().__init__()
        self._experts = experts
        self._state = state

    def forward(self, x_BTD: Tensor, scores_BTK: Tensor, experts_BTK: Tensor) -> Tensor:
        experts = self._experts
        if not self._state.length:
            return experts(x_BTD, scores_BTK, experts_BTK)
        chosen = experts_BTK.flatten().tolist()
        order = sorted(range(len(chosen)), key=chosen.__getitem__)
        groups = [(expert, len(list(same))) for expert, same in groupby(chosen[row] for row in order)]
        tokens = torch.tensor([row // experts_BTK.shape[2] for row in order])
        scores = scores_BTK.flatten()[order, None]
        rows = x_BTD[tokens, 0]
        rows = (rows * scores).to(rows.dtype) if experts.score_inputs else rows
        rows = experts.activate(
            _products(rows, experts.w1, experts.w1_bias, groups), _products(rows, experts.w3, experts.w3_bias, groups)
        )
        results = _products(rows, experts.w2, experts.w2_bias, groups)
        results = results.float() if experts.score_inputs else results * scores
        out_BD = torch.zeros_like(x_BTD[:, 0], dtype=results.dtype).index_add_(0, tokens, results)
        return out_BD.to(x_BTD.dtype)[:, None]


def _products(rows: Tensor, weight: Tensor, bias: Tensor | None, groups: Sequence[tuple[int, int]]) -> Tensor:
    """Returns the products of rows that are sorted by expert; `groups` are experts and their numbers of rows."""
    parts = zip(groups, rows.split([count for _, count in groups]), strict=True)
    return torch.cat([F.linear(part, weight[e], None if bias is None else bias[e]) for (e, _), part in parts])


class LastToken(nn.Module):
    """Logits [B, 1, V] of the last token only."""

    def __init__(self, output: nn.Module):
        super().__init__()
        self._output = output

    def forward(self, hidden_BTD: Tensor, *given: object) -> Tensor:
        return self._output(hidden_BTD[:, -1:], *given)


def apply_kv_cache(model: Decoder) -> CacheState:
    """Replaces attention, masks and experts of a model on one device in place, so that it keeps what it has seen.

    The first forward after a reset of the state gets the prompts, each later one a token of each row; the caller adds
    the tokens of each forward to `length`.
    """
    state = CacheState()
    model.add_module("attention_mask", CacheMask(model.attention_mask, state=state))
    for kind, block in zip(model.args.layer_kinds(), model.layers.children(), strict=True):
        reach = kind.window or kind.chunk
        attention = block.get_submodule("attention")
        if isinstance(attention, SparseLatentAttention):
            block.attention = CachedSparseAttention(attention, state=state, reach=reach)
        elif isinstance(attention, LatentAttention):
            block.attention = CachedLatentAttention(attention, state=state, reach=reach)
        elif isinstance(attention, DeltaAttention):
            attention.add_module("core", CachedDeltaRule(state=state))
            for name in ("q_conv", "k_conv", "v_conv"):
                attention.add_module(name, CachedConvolution(getattr(attention, name), state=state))
        else:
            has_sinks = getattr(attention, "sinks", None) is not None
            attention.core = CachedCore(attention.get_submodule("core"), state=state, reach=reach, has_sinks=has_sinks)
        feed_forward = block.get_submodule("feed_forward")
        if isinstance(feed_forward, MoE) and feed_forward.experts.w1.device.type == "cpu":
            feed_forward.add_module("experts", ChosenExperts(feed_forward.experts, state=state))
    return state

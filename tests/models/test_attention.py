"""Attention within documents, and the block mask of flex attention."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.ops.dense_attention import dense, distance, inputs, result_and_gradients
from torchtitan_clone.models.attention import CoreAttention, DocumentMask
from torchtitan_clone.models.layer_kinds import LayerKind
from torchtitan_clone.models.llama3.model import Llama3Args, build
from torchtitan_clone.models.rope import QueryScale, RopeArgs
from torchtitan_clone.ops.attention import BLOCK, block_mask
from torchtitan_clone.parallel.stragglers import CollectiveTimer
from torchtitan_clone.planner.collective_trace import CollectiveTrace

ARGS = Llama3Args(dim=64, n_layers=3, n_heads=4, vocab_size=97, multiple_of=16, rope_theta=10000.0, max_seq_len=256)


@dataclass(frozen=True, kw_only=True)
class MixedArgs(Llama3Args):
    """Llama with a given kind for each layer."""

    kinds: list[LayerKind]

    def layer_kinds(self):
        return self.kinds


def test_documents_in_one_row_are_computed_as_separate_rows():
    torch.manual_seed(0)
    model = build(replace(ARGS, n_kv_heads=2))
    lengths = [5, 1, 30, 12]
    tokens = torch.randint(0, ARGS.vocab_size, (1, sum(lengths)))
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = model(tokens, positions_BT=positions, documents_BT=documents)
    separate = [model(row, positions_BT=torch.arange(row.shape[1])[None]) for row in tokens.split(lengths, dim=1)]
    torch.testing.assert_close(packed, torch.cat(separate, dim=1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("T", "window"), [(128, None), (640, None), (1000, None), (640, 1), (1000, 200)])
def test_the_block_mask_is_that_of_all_pairs_of_tokens(T, window):
    torch.manual_seed(T)
    # Documents of one token to many blocks, and one row that is a single document.
    documents_BT = (torch.rand(4, T) < torch.tensor([0.5, 0.02, 0.004, 0.0])[:, None]).cumsum(1)

    def allowed(b, _head, q, kv):
        near = True if window is None else q - kv < window
        return (q >= kv) & (documents_BT[b, q] == documents_BT[b, kv]) & near

    expected = create_block_mask(allowed, B=4, H=None, Q_LEN=T, KV_LEN=T, device="cpu")
    found = block_mask(DocumentMask()(documents_BT, documents_BT, window=window))  # on the CPU it returns the starts
    assert torch.equal(found.to_dense(), expected.to_dense())
    if T % BLOCK == 0:  # else torch calls a full block partial, because it lacks the queries behind the end
        assert torch.equal(found.full_kv_num_blocks, expected.full_kv_num_blocks)
        assert torch.equal(found.kv_num_blocks, expected.kv_num_blocks)
    q, k, v = torch.randn(3, 4, 2, T, 16)
    assert torch.equal(flex_attention(q, k, v, block_mask=found), flex_attention(q, k, v, block_mask=expected))


LIMITS = [{}, {"window": 50}, {"chunk": 90}]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("document_length", [None, 60])
def test_sinks_of_flex_attention_equal_dense_attention(document_length, limits):
    """FlexAttention as in a compiled block; on the CPU it has no backward."""
    *qkv, _, documents = inputs(256, document_length=document_length)
    starts = DocumentMask()(documents, qkv[0][..., 0, 0], **limits)
    mask = block_mask(torch.zeros(2, 256, dtype=torch.int32) if starts is None else starts)
    core = torch.compile(CoreAttention(), backend="aot_eager", fullgraph=True)
    sinks = torch.randn(8)
    assert distance(core(*qkv, mask, sinks), dense(*qkv, documents, sinks, **limits)) < 1e-6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("document_length", [None, 60])
def test_sinks_on_cuda_equal_dense_attention(document_length, limits):
    *qkv, grad, documents = inputs(512, document_length=document_length)
    sinks, core = torch.randn(8), CoreAttention()
    on_gpu = [x.cuda() for x in (*qkv, sinks, grad)]
    mask = DocumentMask()(None if documents is None else documents.cuda(), on_gpu[0][..., 0, 0], **limits)
    found = result_and_gradients(lambda q, k, v, s: core(q, k, v, mask, s), *on_gpu)
    expected = result_and_gradients(lambda q, k, v, s: dense(q, k, v, documents, s, **limits), *qkv, sinks, grad)
    assert max(distance(x.cpu(), right) for x, right in zip(found, expected, strict=True)) < 1e-5


def test_layers_of_several_kinds_compute_documents_as_separate_rows():
    """Windows, and chunks that start with each document."""
    torch.manual_seed(0)
    kinds = [LayerKind(positions=RopeArgs(dim=16, theta=1e4), window=7), LayerKind(positions=None, chunk=5),
             LayerKind(positions=QueryScale(floor=4))]  # fmt: skip
    model = build(MixedArgs(**{**vars(ARGS), "kinds": kinds}))
    lengths = [5, 1, 30, 12]
    tokens = torch.randint(0, ARGS.vocab_size, (1, sum(lengths)))
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = model(tokens, positions_BT=positions, documents_BT=documents)
    separate = [model(row, positions_BT=torch.arange(row.shape[1])[None]) for row in tokens.split(lengths, dim=1)]
    torch.testing.assert_close(packed, torch.cat(separate, dim=1), rtol=1e-5, atol=1e-5)
    plain = build(ARGS)
    plain.load_state_dict(model.state_dict())
    other = plain(tokens, positions_BT=positions, documents_BT=documents)
    assert (other - packed).abs().max() > 0.01


@pytest.mark.parametrize("is_traced", [True, False])
def test_flex_attention_is_compiled_where_collectives_are_traced_or_timed(is_traced):
    """Its operator has no rule for other dispatch modes."""
    query, key, value = (torch.randn(1, 200, 2, 16) for _ in range(3))
    mode = CollectiveTrace({}) if is_traced else CollectiveTimer(torch.device("cpu"), group_axes={})
    with torch.compiler.set_stance("force_eager" if is_traced else "default"), mode:
        found = CoreAttention()(query, key, value, block_mask(torch.zeros(1, 200, dtype=torch.int32)))
    torch.testing.assert_close(found, CoreAttention()(query, key, value, None))

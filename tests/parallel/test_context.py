"""Context parallelism, also that of head_exchange.py, against one device: attention, losses, memory, messages.

Gradients of whole runs are those of one device in tests/parallel/test_parity.py.
"""

import itertools
import json
from functools import cache

import pytest
import torch
import torch.distributed as dist

from tests.marks import needs_door
from tests.ops.dense_attention import dense, distance, inputs, result_and_gradients
from tests.support.harness import run_ranks
from tests.support.runs import losses, make_corpus, options, rows, train
from torchtitan_clone.models.attention import CoreAttention, DocumentMask
from torchtitan_clone.ops.attention import KERNELS, use_kernels
from torchtitan_clone.ops.kernels import CPU
from torchtitan_clone.parallel.context import (
    KeyExchange,
    LocalStarts,
    context_attention,
    context_attention_backward,
)
from torchtitan_clone.parallel.head_exchange import CompleteRows, HeadExchange
from torchtitan_clone.parallel.mesh import local_tokens

METHODS = ["allgather", "alltoall", "ring"]
BY_KERNEL = {} if CPU is None else {"allgather by kernel": "allgather", "ring by kernel": "ring"}


# What limits attention besides documents; every layer of a kind has one of them.
REACHES = {"": {}, "window": {"window": 37}, "chunk": {"chunk": 100}}


def exchanged(method, documents, positions, *, group, **reach):
    """Returns this rank's attention by a method, for its shard of q, k and v, and the sinks of all heads."""
    split = {"rank": group.rank(), "degree": group.size(), "method": BY_KERNEL.get(method, method)}
    if method in BY_KERNEL:
        starts = LocalStarts(**split)(documents, positions, **reach)
        options = "cpu", BY_KERNEL[method], group.group_name
        return lambda *x: context_attention(*x[:3], starts, x[3] if x[3:] else None, *options)[0]
    if method == "alltoall":
        core = HeadExchange(CoreAttention(), group=group)
        build_mask = CompleteRows(DocumentMask(), degree=group.size())
    else:
        core, build_mask = KeyExchange(group_name=group.group_name, exchange=method), LocalStarts(**split)
    mask = build_mask(documents, positions, **reach)
    return lambda q, k, v, *sinks: core(q, k, v, mask, *sinks)


@cache
def dense_attention(T, document_length, name, has_sinks):
    """Returns random inputs, sinks if there are any, and what dense attention makes of them, with the gradients."""
    *qkv, grad, documents = inputs(T, document_length=document_length)
    sinks = [torch.randn(8)] if has_sinks else []
    reach = REACHES[name]
    right = result_and_gradients(lambda *x: dense(*x[:3], documents, *x[3:], **reach), *qkv, *sinks, grad)
    return (*qkv, grad, documents), sinks, right


def attention_distances(cases):
    """Returns the largest distances of result and of gradients on this rank from dense attention, for each case."""
    dist.init_process_group("gloo")
    group, found = dist.group.WORLD, []
    for method, *case in cases:
        T, _, name, _ = case
        (*qkv, grad, documents), sinks, right = dense_attention(*case)
        reach = REACHES[name]
        pieces = local_tokens(T, rank=group.rank(), degree=group.size(), method=BY_KERNEL.get(method, method))
        own = torch.cat([torch.arange(piece.start, piece.stop) for piece in pieces])
        attention = exchanged(method, documents, own.expand(2, -1), group=group, **reach)
        got = result_and_gradients(attention, *(x[:, own] for x in qkv), *sinks, grad[:, own])
        for total in got[4:]:  # each rank has a share of the gradients of sinks
            dist.all_reduce(total)
        distances = list(map(distance, got, [*(x[:, own] for x in right[:4]), *right[4:]]))
        found.append((distances[0], max(distances[1:])))
    return found


def test_every_exchange_equals_dense_attention():
    methods = [*METHODS, *BY_KERNEL]
    cases = list(itertools.product(methods, [64, 1200], [None, 20, 900], [""], [False]))
    cases += itertools.product(methods, [320], [None, 90], REACHES, [True])
    cases += itertools.product(methods, [320], [90], ["window"], [False])
    for found in run_ranks(attention_distances, 4, cases):
        wrong = {case: error for case, error in zip(cases, found, strict=True) if max(error) > 1e-6}
        assert not wrong


def errors_in_bf16(methods):
    """Returns for each method the error of result and of gradients on this rank, over that of rounding them once."""
    dist.init_process_group("gloo")
    group, found = dist.group.WORLD, []
    *low, documents = inputs(640, document_length=200, dtype=torch.bfloat16)
    exact = result_and_gradients(lambda *x: dense(*x, documents), *(x.double() for x in low))
    for method in methods:
        pieces = local_tokens(640, rank=group.rank(), degree=group.size(), method=BY_KERNEL.get(method, method))
        own = torch.cat([torch.arange(piece.start, piece.stop) for piece in pieces])
        attention = exchanged(method, documents, own.expand(2, -1), group=group)
        got = result_and_gradients(attention, *(x[:, own] for x in low))
        rights = [right[:, own] for right in exact]
        pairs = zip(got, rights, strict=True)
        found.append([distance(x, right) / distance(right.bfloat16(), right) for x, right in pairs])
    return found


@needs_door("cpu")
def test_results_and_gradients_of_bfloat16_are_summed_in_fp32():
    """Errors are 1.00 to 1.21; rounding each rank's share makes them 1.25 (result), 1.8 (keys) and 1.7 (values)."""
    for of_methods in run_ranks(errors_in_bf16, 4, list(BY_KERNEL)):
        for result, _, of_keys, of_values in of_methods:
            assert max(result, of_values) < 1.02
            assert of_keys < 1.3


def kernels_of_training():
    """Returns whether an exchange of keys has the bits of the kernel after use_kernels(), and whether before."""
    dist.init_process_group("gloo")
    group, found = dist.group.WORLD, []
    *qkv, grad, _ = inputs(64, document_length=None)

    def by_kernel(*qkv):
        return context_attention(*qkv, None, None, "cpu", "ring", group.group_name)[0]

    for trained in (True, False):
        core = KeyExchange(group_name=group.group_name, exchange="ring")
        if trained:
            use_kernels(core)
        got = result_and_gradients(lambda *x, core=core: core(*x, None), *qkv, grad)
        found.append(all(map(torch.equal, got, result_and_gradients(by_kernel, *qkv, grad))))
    return found


def check_operators():
    """Checks that operators return the strides that they promise to a compiler, of rows and tokens in both orders."""
    dist.init_process_group("gloo")
    *rows_first, grad, _ = inputs(64, document_length=None)
    tokens_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in rows_first]
    kernels = KERNELS
    for qkv, kernel, exchange in itertools.product((rows_first, tokens_first), kernels, ("allgather", "ring")):
        options = kernel, exchange, dist.group.WORLD.group_name
        torch.library.opcheck(context_attention, (*qkv, None, None, *options), test_utils="test_faketensor")
        saved = (*qkv, None, *context_attention(*qkv, None, None, *options))
        torch.library.opcheck(context_attention_backward, (grad, *saved, *options), test_utils="test_faketensor")


def test_operators_return_what_they_promise():
    run_ranks(check_operators, 2)


@needs_door("cpu")
def test_training_attends_by_kernels_as_one_rank_does():
    in_eager = CPU.has_faster_attention(torch.float32, head_dim=32, in_eager=True)
    assert run_ranks(kernels_of_training, 2) == [[in_eager, False]] * 2


@pytest.mark.parametrize("degree", [1, 2, 3, 8])
@pytest.mark.parametrize("method", METHODS)
def test_ranks_share_every_token_and_the_work(degree, method):
    pieces_of_ranks = [local_tokens(48, rank=rank, degree=degree, method=method) for rank in range(degree)]
    tokens = [[index for piece in pieces for index in piece] for pieces in pieces_of_ranks]
    assert sorted(itertools.chain(*tokens)) == list(range(48))
    if method != "alltoall":
        assert len({sum(indices) for indices in tokens}) == 1


CP = "parallelism__context_parallel_degree"
METHOD, ROWS = "parallelism__context_parallel_rotate_method", "training__local_batch_size"
MODE = "activation_checkpoint__mode"
SPLIT_HEADS = {"model__args__n_kv_heads": 4}


def saved_bytes(argv):
    """Returns the bytes that the forward up to the loss keeps for backward on this rank, without weights."""
    from torchtitan_clone.config import load_config
    from torchtitan_clone.parallel.mesh import build_mesh
    from torchtitan_clone.parallel.runtime import Launch, process_group
    from torchtitan_clone.run import preflight
    from torchtitan_clone.run.loaders import open_loaders
    from torchtitan_clone.run.model_parts import build_model_parts

    config, launch, cpu = load_config(argv), Launch.from_environment(), torch.device("cpu")
    plan = preflight.resolve(config, world_size=launch.world_size, device_type="cpu")
    dataset = preflight.prepare(plan, launch=launch).dataset
    loader, _ = open_loaders(plan, dataset=dataset, rank=launch.rank)
    batch = next(loader)
    with process_group(config.comm, launch=launch, device=cpu):
        (model,) = build_model_parts(plan, mesh=build_mesh(plan.degrees, loss_rank=0, device_type="cpu"), device=cpu)
        storages = {}

        def keep(tensor):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(
                batch.tokens_BT,
                positions_BT=batch.positions_BT,
                documents_BT=batch.documents_BT,
                targets_BT=batch.targets_BT,
                loss_fn=lambda hidden, _weight, _targets: hidden.sum(),
            )
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        return sum(size for pointer, size in storages.items() if pointer not in weights)


@pytest.mark.parametrize("method", METHODS)
def test_activations_fall_with_the_degree(corpus, tmp_path, method):
    def measured(degree):
        argv = options(
            corpus, tmp_path, **{CP: degree, METHOD: method, MODE: "none", **SPLIT_HEADS},
            training__seq_len=512, training__global_batch_size=2, training__local_batch_size=2,
            parallelism__fsdp_reshard_after_forward="never",
        )  # fmt: skip
        return max(run_ranks(saved_bytes, degree, argv))

    unsharded, (layers, batch, tokens, dim) = measured(1), (2, 2, 512, 64)
    # What leaves the attention of some heads is another tensor than what the projection of all heads reads.
    exchanged = layers * batch * tokens * dim * 4 if method == "alltoall" else 0
    for degree in (2, 4):
        assert measured(degree) == pytest.approx((unsharded + exchanged) / degree, rel=0.05)


def test_losses_equal_those_of_one_device_in_fp32_and_in_bf16(corpus, tmp_path):
    changes = {"validation__enable": True, "validation__freq": 2, "validation__steps": 2, "training__steps": 4}
    for name, world_size, parallel in (("one", 1, {}), ("split", 2, {CP: 2, METHOD: "ring"})):
        argv = options(corpus, tmp_path / name, **changes, **parallel)
        code, output = train(argv, world_size=world_size, log_folder=tmp_path / name)
        assert code == 0, output
    for name in ("loss", "validation_loss"):
        one, split = ([row[name] for row in rows(tmp_path / run) if name in row] for run in ("one", "split"))
        assert split == pytest.approx(one, rel=1e-5)
        assert one
    argv = options(corpus, tmp_path / "bf16", **changes, **{CP: 2, "training__mixed_precision_param": "bfloat16"})
    code, output = train(argv, world_size=2, log_folder=tmp_path / "bf16")
    assert code == 0, output
    assert losses(tmp_path / "bf16") == pytest.approx(losses(tmp_path / "one"), rel=5e-3)


@pytest.mark.many_ranks
def test_a_sequence_of_32k_tokens_runs_on_four_ranks(tmp_path):
    """Documents of tens of thousands of tokens; all scores of one head would be 4 GiB."""
    argv = options(
        make_corpus(tmp_path / "text"), tmp_path, **{CP: 4, METHOD: "ring"}, training__seq_len=32768,
        training__local_batch_size=1, training__global_batch_size=1, training__steps=1, lr_scheduler__warmup_steps=1,
        model__args__max_seq_len=32768, model__args__n_layers=1, model__args__dim=32, model__args__n_heads=2,
        model__args__n_kv_heads=1, checkpoint__enable=False,
    )  # fmt: skip
    code, output = train(argv, world_size=4, log_folder=tmp_path)
    assert code == 0, output
    (row,) = (row for row in rows(tmp_path) if "loss" in row)
    assert 7 < row["loss"] < 9
    assert row["memory_gib"] < 0.75


@pytest.mark.many_ranks
@pytest.mark.parametrize("method", METHODS)
@needs_door("planner")
def test_each_method_sends_only_what_it_must(corpus, tmp_path, method):
    """Compares the bytes over the context axis in one step of one micro-batch with what the method has to send."""
    # Beside a data axis, because torch gives axes of the same ranks one group.
    changes = {CP: 2, METHOD: method, MODE: "none", ROWS: 4, "training__steps": 2, **SPLIT_HEADS}
    changes |= {"debug__trace_collectives": True, "checkpoint__enable": False}
    argv = options(corpus, tmp_path, **changes)
    code, output = train(argv, world_size=4, log_folder=tmp_path)
    assert code == 0, output
    calls = json.loads((tmp_path / "run" / "collectives.rank0.json").read_text())
    found = {}
    for call in calls:
        if call["axis"] == "cp":
            assert not call["implicit"]
            found[call["collective"]] = found.get(call["collective"], 0) + call["bytes"]
    layers, tensor = 2, 4 * 4 * (64 // 2) * 64
    expected = {
        # Keys and values of all ranks forward and again backward, their gradients back once.
        "allgather": {"all_gather": layers * 2 * 2 * 2 * tensor, "reduce_scatter": layers * 2 * 2 * tensor},
        # Queries, keys, values and the result, forward and backward.
        "alltoall": {"all_to_all": layers * 2 * 4 * tensor},
        # The same, but those of the other rank only. An exchange sends and receives; simulated runs are of a GPU.
        "ring": {"send": layers * 3 * 2 * tensor},
    }[method]
    assert found == expected
    # A simulated run predicts the same bytes.
    code, text = train([*argv, "--comm.mode=fake_backend"], log_folder=tmp_path, env={"WORLD_SIZE": "4"})
    assert code == 0, text
    simulated = [line.split() for line in text.splitlines() if line.startswith("cp ")]
    for collective, size in found.items():
        mebibytes = sum(float(fields[-1]) for fields in simulated if fields[1] == collective)
        assert mebibytes == pytest.approx(size / 2**20, abs=0.02)

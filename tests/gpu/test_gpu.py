"""What only a GPU can show; scripts/gpu_suite.sh runs these tests. One process, one device."""

import json
import signal

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.peer_programs import Work, options_of
from tests.marks import needs_door
from tests.ops.dense_attention import dense, distance, inputs, result_and_gradients
from tests.support.cluster import Cluster, committed_once
from tests.support.faults import Fault
from tests.support.runs import Ranks, losses, options, rows, train, wait_for_step
from tests.support.trainers import open_trainer
from torchtitan_clone.checkpoint.save import save_thread
from torchtitan_clone.config.schema_training import Optimizer
from torchtitan_clone.models.attention import CoreAttention, DocumentMask
from torchtitan_clone.ops.attention import OnHost, visible_starts
from torchtitan_clone.ops.blockwise_attention import document_attention
from torchtitan_clone.ops.cross_entropy import build_loss
from torchtitan_clone.optim import build_optimizer
from torchtitan_clone.parallel.gradients import gradient_norm
from torchtitan_clone.torch_compat import foreach_norms, init_fake_process_group

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

GPU = {"CUDA_VISIBLE_DEVICES": "0"}


def test_fp32_losses_are_those_of_the_cpu(corpus, tmp_path):
    for name, env in (("cpu", None), ("gpu", GPU)):
        code, output = train(options(corpus, tmp_path / name), log_folder=tmp_path, env=env)
        assert code == 0, output
    assert list(losses(tmp_path / "gpu").values()) == pytest.approx(list(losses(tmp_path / "cpu").values()), rel=1e-4)


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_state_in_bfloat16_has_the_bits_of_the_cpu(name):
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(1000, 300, generator=generator)
    weights = [torch.nn.Parameter(value.clone()), torch.nn.Parameter(value.cuda())]
    settings = Optimizer(name=name, args={"state_dtype": "bfloat16"})
    containers = [build_optimizer(settings, named_parameters={"w": weight}) for weight in weights]
    for _ in range(5):
        gradient = torch.randn(value.shape, generator=generator)
        for weight, container in zip(weights, containers, strict=True):
            weight.grad = gradient.to(weight.device)
            container.step(factor=0.5)
    on_cpu, on_gpu = (container.state_dict() for container in containers)
    assert torch.equal(weights[0], weights[1].cpu())
    assert all(torch.equal(value, on_gpu[key].cpu()) for key, value in on_cpu.items())


@pytest.mark.parametrize("masking", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
def test_bf16_follows_fp32(corpus, tmp_path, masking, compiled):
    common = {"training__document_masking": masking, "training__steps": 30, "training__seq_len": 128}
    exact = options(corpus, tmp_path / "exact", **common)
    fast = options(
        corpus, tmp_path / "fast", training__mixed_precision_param="bfloat16", compile__enable=compiled, **common
    )
    for argv in (exact, fast):
        code, output = train(argv, log_folder=tmp_path, env=GPU, timeout=300)
        assert code == 0, output
    expected, found = losses(tmp_path / "exact"), losses(tmp_path / "fast")
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=0.02)
    assert "mfu_percent" in rows(tmp_path / "fast")[0]
    assert "attention: by FlashAttention" in output


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_attention_within_documents_is_that_in_float64(window, has_sinks):
    """FlashAttention without a window, FlexAttention with one."""
    *qkv, grad, documents = inputs(1000, document_length=150)
    sinks = [torch.randn(8)] if has_sinks else []
    exact = [x.double() for x in (*qkv, *sinks, grad)]
    right = result_and_gradients(lambda q, k, v, *s: dense(q, k, v, documents, *s, window=window), *exact)
    mask = DocumentMask()(OnHost(documents), torch.empty(2, 1000).cuda(), window=window, dtype=torch.bfloat16)
    core = torch.compile(CoreAttention(), fullgraph=True)
    for attention in (CoreAttention(), core):
        on_gpu = [x.bfloat16().cuda() for x in (*qkv, *sinks, grad)]
        found = result_and_gradients(lambda q, k, v, *s, of=attention: of(q, k, v, mask, *s), *on_gpu)
        assert max(distance(x.cpu(), y) for x, y in zip(found, right, strict=True)) < 2e-2


def test_attention_with_rotated_keys_does_not_wait_for_the_gpu():
    *tensors, documents = inputs(4096, document_length=300)
    on_gpu = [x.bfloat16().cuda() for x in tensors]
    for limits in ({}, {"window": 100}):
        starts = visible_starts(documents, like=documents, **{"window": None, "chunk": None, **limits})
        result_and_gradients(lambda *x, s=starts: document_attention(*x, s)[0], *on_gpu)  # compiles and allocates
        torch.cuda.set_sync_debug_mode("error")
        try:
            result_and_gradients(lambda *x, s=starts: document_attention(*x, s)[0], *on_gpu)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_resume_is_bitwise(corpus, tmp_path):
    def run(name):
        changes = {"debug__deterministic": True, "training__steps": 60, "checkpoint__interval": 10}
        return options(corpus, tmp_path / name, **changes)

    assert train(run("uninterrupted"), log_folder=tmp_path, env=GPU)[0] == 0
    killed = Ranks(run("killed"), world_size=1, log_folder=tmp_path, env=GPU)
    wait_for_step(tmp_path / "killed", 15)
    killed.signal(signal.SIGKILL)
    killed.join()
    code, output = train(run("killed"), log_folder=tmp_path, env=GPU)
    assert code == 0, output
    assert losses(tmp_path / "killed") == losses(tmp_path / "uninterrupted")


@pytest.mark.parametrize(
    "changes",
    [
        {"training__enable_cpu_offload": True},
        {"activation_checkpoint__mode": "selective", "activation_checkpoint__selective_ac_option": "op"},
        {"activation_checkpoint__mode": "full"},
    ],
    ids=["offload", "selective op", "full"],
)
def test_options_do_not_change_losses(corpus, tmp_path, changes):
    for name, more in (("plain", {}), ("changed", changes)):
        code, output = train(options(corpus, tmp_path / name, **more), log_folder=tmp_path, env=GPU)
        assert code == 0, output
    expected = losses(tmp_path / "plain")
    assert list(losses(tmp_path / "changed").values()) == pytest.approx(list(expected.values()), rel=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"debug__deterministic": True},
        {"compile__enable": True, "training__mixed_precision_param": "bfloat16"},
        {"training__local_batch_size": 1, "training__mixed_precision_param": "bfloat16"},
        {"activation_checkpoint__mode": "selective", "activation_checkpoint__selective_ac_option": "op"},
    ],
    ids=["deterministic", "compiled", "micro-batches", "selective op"],
)
def test_a_graph_computes_the_same(corpus, tmp_path, changes):
    common = {"training__document_masking": False, **changes}
    for name in ("plain", "graph"):
        argv = options(corpus, tmp_path / name, compile__cuda_graph=name == "graph", **common)
        code, output = train(argv, log_folder=tmp_path, env=GPU, timeout=300)
        assert code == 0, output
    tolerance = 0 if "debug__deterministic" in changes else 1e-4  # without, kernels add in any order
    assert losses(tmp_path / "graph") == pytest.approx(losses(tmp_path / "plain"), rel=tolerance, abs=0)


def test_a_step_with_a_graph_launches_few_kernels(tmp_path):
    launches = []
    for graph in (False, True):
        work = Work(size="tiny", dtype="bfloat16", device="cuda", graph=graph)
        with open_trainer(options_of(work, str(tmp_path / f"{graph}"))) as trainer:
            for step in range(1, 5):
                trainer.train_step(step)
            with torch.profiler.profile() as profile:
                trainer.train_step(5)
        names = [event.name for event in profile.events()]
        launches.append(sum("LaunchKernel" in name for name in names))
        assert sum("GraphLaunch" in name for name in names) == graph
    assert launches[1] < launches[0] / 2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_thread_of_saves_uses_the_gpu_of_its_rank():
    with torch.cuda.device(1):
        thread = save_thread()
    assert thread.submit(torch.cuda.current_device).result(timeout=10) == 1


def test_traces_and_memory_snapshots_are_written(corpus, tmp_path):
    profiling = {
        "profiling__enable_profiling": True,
        "profiling__profile_freq": 5,
        "profiling__enable_memory_snapshot": True,
    }
    code, output = train(options(corpus, tmp_path, **profiling), log_folder=tmp_path, env=GPU)
    assert code == 0, output
    traces = list((tmp_path / "run" / "profile_traces").rglob("*.json*"))
    assert traces
    assert "traceEvents" in json.loads(traces[0].read_text())
    assert list((tmp_path / "run" / "memory_snapshot").rglob("*.pickle"))


@needs_door("torchft")
def test_a_replica_group_that_is_killed_heals_from_the_other(corpus, tmp_path):
    """Both on one device, which NCCL does not allow: gradients travel through gloo."""
    pytest.importorskip("torchft")
    faults = [Fault(kind="kill", place="all_reduce", step=15, group=1)]
    with Cluster(corpus, tmp_path, groups=2, training__global_batch_size=12, training__steps=60, pace=0.5) as cluster:
        cluster.env.update(GPU)
        cluster.start_all(faults=faults).watch_over(timeout=300)
        assert "healed from another replica group: step" in cluster.log_of(1)
        assert {rank: len(found) for rank, found in cluster.digests().items()} == {0: 1}
        assert committed_once(cluster.records(), steps=60, rows=12) == []


def test_norms_in_fp32_are_those_in_float64():
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=generator).cuda() for size in (7, 4096, 50_000_000)]
    low, high = (foreach_norms(tensors, dtype=dtype).double() for dtype in (torch.float32, torch.float64))
    assert ((low - high) / high).abs().max() < 1e-6


@pytest.mark.parametrize("backend", [None, "inductor"])
def test_the_loss_in_bf16_follows_fp32_without_a_host_sync(backend):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 1024, 256, generator=generator).bfloat16().cuda().requires_grad_()
    weight = (torch.randn(8192, 256, generator=generator) / 16).bfloat16().cuda().requires_grad_()
    targets = torch.randint(0, 8192, (2, 1024), generator=generator).cuda()
    logits = (hidden.float() @ weight.float().T).flatten(0, 1)
    expected = torch.autograd.grad(F.cross_entropy(logits, targets.flatten(), reduction="sum"), (hidden, weight))
    loss_fn = build_loss(chunk_tokens=256, compile_backend=backend)
    loss_fn(hidden, weight, targets)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = torch.autograd.grad(loss_fn(hidden, weight, targets), (hidden, weight))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for ours, exact in zip(found, expected, strict=True):
        assert (ours - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_norms_and_clipped_updates_do_not_wait_for_the_device(name, dtype):
    """Nor differ from those of a CPU; a kernel of this package updates the matrix, torch's the vector."""
    optimizers = {}
    for device in ("cpu", "cuda"):
        shapes = {"a.weight": (2048, 2048), "b.weight": (7,)}
        parameters = {key: torch.nn.Parameter(torch.ones(shape, device=device)) for key, shape in shapes.items()}
        settings = Optimizer(name=name, lr=0.5, weight_decay=0.1)
        optimizers[device] = parameters, build_optimizer(settings, named_parameters=parameters)
    init_fake_process_group(rank=0, world_size=1)
    try:
        for gradient, mode in ((1.0, "default"), (2.0, "error")):  # the first step compiles and allocates
            for device, (parameters, optimizer) in optimizers.items():
                for parameter in parameters.values():
                    parameter.grad_dtype = None
                    kept = dtype if device == "cuda" else torch.float32
                    parameter.grad = torch.full_like(parameter, gradient, dtype=kept)
                torch.cuda.set_sync_debug_mode(mode if device == "cuda" else "default")
                norm = gradient_norm(parameters.values(), ranks=1)
                optimizer.step(factor=0.25)
            torch.cuda.set_sync_debug_mode("default")
    finally:
        torch.cuda.set_sync_debug_mode("default")
        dist.destroy_process_group()
    assert norm.item() == pytest.approx(2 * (2048 * 2048 + 7) ** 0.5)
    (expected, on_cpu), (found, on_gpu) = optimizers["cpu"], optimizers["cuda"]
    for key, parameter in expected.items():
        torch.testing.assert_close(found[key].detach().cpu(), parameter.detach())
    for key, value in on_cpu.state_dict().items():
        torch.testing.assert_close(on_gpu.state_dict()[key].cpu(), value)

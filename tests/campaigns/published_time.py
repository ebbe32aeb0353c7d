"""Published speeds of training runs with their complete configuration, for tests/campaigns/planner.py.

Every row is resolved as a run of this project. Where another program does something that has no option here, the row
takes the nearest: a distributed optimizer is FSDP whose weights stay gathered, fused kernels are a compiled model.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

NODE = 8


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published speed: tokens per second and device, or model TFLOP/s per device."""

    source: str
    hardware: str
    gpus: int
    options: dict[str, object] = field(default_factory=dict[str, object])
    tokens_per_second: float = 0.0
    tflops: float = 0.0


P = "parallelism."
COMPILED = {"compile.enable": True, "training.document_masking": False}
EAGER = {"training.document_masking": False}
FLOAT8 = COMPILED | {"model.converters": ["float8"]}
FULL = {"activation_checkpoint.mode": "full"}
PER_OPERATION = {"activation_checkpoint.selective_ac_option": "op"}
NONE = {"activation_checkpoint.mode": "none"}
ASYNC = {P + "enable_async_tensor_parallel": True}
GATHERED = {P + "fsdp_reshard_after_forward": "never"}


def llama(flavor: str, *, rows: int, seq_len: int = 8192, tp: int = 1, pp: int = 1, cp: int = 1) -> dict[str, object]:
    """Returns the options of a Llama 3 with `rows` sequences a rank and pass."""
    return {
        "model.flavor": flavor, "model.args.max_seq_len": 262144, "training.seq_len": seq_len,
        "training.local_batch_size": rows, P + "tensor_parallel_degree": tp, P + "pipeline_parallel_degree": pp,
        P + "context_parallel_degree": cp,
    }  # fmt: skip


def torchtitan() -> Iterator[Row]:
    """Yields the rows of torchtitan v0.2.2, benchmarks/*.md."""
    source = "torchtitan benchmarks/llama3_h100_202412_torchtitan.md, table "
    for table, gpus, speeds in (("1", 8, (5762, 6667, 8532)), ("3", 128, (5605, 6514, 8380))):
        for options, speed in zip((EAGER, COMPILED, FLOAT8), speeds, strict=True):
            yield titan(source + table, gpus, speed, llama("8B", rows=2) | PER_OPERATION | options)
    for cp, speed in ((1, 3890), (2, 2540), (4, 1071), (8, 548)):
        yield titan(source + "2", 8, speed, llama("8B", rows=1, seq_len=cp * 32768, cp=cp) | FULL | FLOAT8)
    for options, speed in (({}, 829), (ASYNC, 876)):
        yield titan(source + "4", 256, speed, llama("70B", rows=16, tp=8) | FULL | FLOAT8 | options)
    # 8 micro-batches, the default then: experimental.pipeline_parallel_microbatches.
    of_405b = FULL | FLOAT8 | ASYNC
    for schedule, speed in (("1F1B", 100), ("Interleaved1F1B", 128)):
        more = {P + "pipeline_parallel_schedule": schedule, P + "pipeline_parallel_microbatch_size": 4}
        yield titan(source + "5", 512, speed, llama("405B", rows=32, tp=8, pp=8) | of_405b | more)
    for cp, speed in ((1, 76), (2, 47), (4, 31), (8, 16)):
        yield titan(source + "6", 512, speed, llama("405B", rows=8, seq_len=cp * 32768, tp=8, pp=8, cp=cp) | of_405b)
    source = "torchtitan benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md"
    for model, gpus, speeds in (
        (llama("70B", rows=16, tp=8) | FULL, 256, (597.3, 652.4, 809.8, 942.4)),
        (llama("8B", rows=12, tp=8) | PER_OPERATION, 64, (4378, 4809.4, 5078.1, 5570.1)),
    ):
        kinds = (COMPILED, COMPILED | ASYNC, FLOAT8, FLOAT8 | ASYNC)
        for options, speed in zip(kinds, speeds, strict=True):
            yield titan(source, gpus, speed, model | options)
    source = "torchtitan benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md"
    for gpus, speed in ((32, 10938), (64, 10753)):
        options = llama("8B", rows=2) | PER_OPERATION | FLOAT8
        yield Row(source=source, hardware="h200", gpus=gpus, options=options, tokens_per_second=speed)


def titan(source: str, gpus: int, speed: float, options: dict[str, object]) -> Row:
    return Row(source=source, hardware="h100-500w", gpus=gpus, options=options, tokens_per_second=speed)


def megatron() -> Iterator[Row]:
    """Yields the rows of Megatron-LM's weak scaling up to 1,024 devices: README.md, images/model_table.png.

    GPT with an MLP of 4 x hidden size, here a gated one of 8/3; micro-batches are not published, here of all
    4 sequences of a rank, or of one in a pipeline.
    """
    shapes = (
        (16, 2048, 24, 1, 1, 408.8), (32, 4096, 30, 2, 1, 465.9), (48, 6144, 32, 4, 1, 489.1),
        (56, 7168, 48, 8, 1, 459.6), (64, 8192, 84, 8, 2, 419.7),
    )  # fmt: skip
    for heads, dim, layers, tp, pp, tflops in shapes:
        rows = 8 if pp > 1 else 4
        args = {"dim": dim, "n_layers": layers, "n_heads": heads, "n_kv_heads": heads, "multiple_of": 64}
        args |= {"vocab_size": 131072, "ffn_dim_multiplier": 1.0}
        options = llama("8B", rows=rows, seq_len=4096, tp=tp, pp=pp) | GATHERED | NONE | COMPILED
        options |= {f"model.args.{key}": value for key, value in args.items()}
        options |= {"training.global_batch_size": 192 if pp == 1 else 384} | (ASYNC if tp > 1 else {})
        yield Row(
            source="Megatron-LM README.md, images/model_table.png", hardware="h100", gpus=48 * tp * pp,
            options=options, tflops=tflops,
        )  # fmt: skip


def bridge() -> Iterator[Row]:
    """Yields dense H100 rows of Megatron-Bridge in float8: docs/performance-summary-archive.md, container 25.11.

    Recomputation as in scripts/performance/configs of v0.2.0.
    """
    source = "Megatron-Bridge docs/performance-summary-archive.md, 25.11"
    interleaved = {P + "pipeline_parallel_schedule": "Interleaved1F1B", P + "pipeline_parallel_layers_per_stage": 2}
    equal = {P + f"pipeline_parallel_{end}_stage_less_layers": 0 for end in ("first", "last")}
    shapes = (
        (8, llama("8B", rows=1) | {"training.global_batch_size": 128}, 14451),
        (64, llama("70B", rows=64, tp=4, pp=8) | interleaved | equal | ASYNC | GATHERED, 1602),
        (1024, llama("405B", rows=64, tp=8, pp=8, cp=2) | interleaved | ASYNC | GATHERED, 292),
    )
    for gpus, options, speed in shapes:
        yield Row(source=source, hardware="h100", gpus=gpus, options=options | NONE | FLOAT8, tokens_per_second=speed)


def automodel() -> Iterator[Row]:
    """Yields H100 rows of NeMo AutoModel in bf16: docs/performance-summary.mdx, recomputation as in its files."""
    source = "NeMo AutoModel docs/performance-summary.mdx and examples/llm_benchmark"
    deepseek = {
        "model.name": "deepseek_v3", "model.flavor": "671B", "training.seq_len": 4096, "training.local_batch_size": 8,
        P + "pipeline_parallel_degree": 4, P + "expert_parallel_degree": 64,
        P + "pipeline_parallel_layers_per_stage": 2,
        P + "pipeline_parallel_schedule": "Interleaved1F1B",
    } | FULL  # fmt: skip
    qwen = {"model.name": "qwen3_moe", "model.flavor": "30B-A3B", "training.local_batch_size": 4} | FULL
    oss = {"model.name": "gpt_oss", "model.flavor": "20b", "training.local_batch_size": 2} | NONE
    of_8 = {"training.seq_len": 4096, P + "expert_parallel_degree": 8, P + "fsdp_reshard_after_forward": "never"}
    shapes = (
        (256, deepseek | {"training.global_batch_size": 512}, 1002),
        (1024, deepseek | {"training.global_batch_size": 8192}, 865),
        (8, qwen | of_8 | {"training.global_batch_size": 512}, 12040),
        (8, oss | of_8 | {"training.global_batch_size": 256}, 13058),
        (64, llama("70B", rows=1, cp=2) | FULL | {"training.global_batch_size": 128}, 866.77),
    )
    for gpus, options, speed in shapes:
        yield Row(source=source, hardware="h100", gpus=gpus, options=options | COMPILED, tokens_per_second=speed)


NANOTRON_MODELS = {
    # Layers, hidden size and hidden size of the MLP: scripts/scaling_benchmarks.py; all have as many KV heads as heads.
    "1.34B": (16, 2048, 32, 8192, True), "3.57B": (28, 3072, 32, 8192, True), "8.86B": (32, 4096, 32, 14336, False),
    "80B": (80, 8192, 64, 28672, False),
}  # fmt: skip
NANOTRON = """
64 1.34B 128 2 2 1 2  5.25 | 64 3.57B 128 4 1 1 2 10.49 | 64 8.86B 128 4 1 1 2 18.69 | 64 80B 32 16 1 4 2 17.79
32 1.34B 64 4 1 1 4 23.20 | 32 3.57B 64 4 1 1 4 26.77 | 32 8.86B 32 8 1 1 8 32.71 | 32 80B 4 4 16 64 1 30.75
16 1.34B 64 2 1 1 4 29.46 | 16 3.57B 32 4 1 1 8 34.59 | 16 8.86B 16 8 1 2 8 36.33 | 16 80B 1 4 32 256 1 34.29
8 1.34B 32 1 2 8 1 32.47 | 8 3.57B 32 1 2 8 1 35.53 | 8 8.86B 32 1 2 8 1 39.50 | 8 80B 1 4 16 256 1 30.65
4 1.34B 16 1 2 16 1 38.38 | 4 3.57B 16 1 2 8 2 40.39 | 4 8.86B 16 1 2 16 1 43.31 | 4 80B 1 8 4 256 1 14.76
2 1.34B 8 1 2 32 1 41.59 | 2 3.57B 8 1 2 16 2 43.77 | 2 8.86B 4 4 1 16 4 43.94
1 1.34B 4 1 2 16 4 44.32 | 1 3.57B 4 1 2 32 2 46.68 | 1 8.86B 2 1 4 128 1 45.22
"""
"""Nodes, model, data, tensor, pipeline, micro-batches, their sequences, MFU in percent of 989 TFLOP/s."""


def nanotron() -> Iterator[Row]:
    """Yields the best configurations of nanotron v0.5: docs/benchmark_summary.svg, 4,096 tokens, vocabulary 131,072."""
    for text in NANOTRON.replace("\n", "|").split("|"):
        if not text.strip():
            continue
        nodes, model, *numbers, mfu = text.split()
        dp, tp, pp, passes, size = map(int, numbers)
        layers, dim, heads, hidden, tied = NANOTRON_MODELS[model]
        options = {
            "model.name": "qwen3", "model.flavor": "8B", "training.seq_len": 4096,
            P + "tensor_parallel_degree": tp, P + "pipeline_parallel_degree": pp,
            "training.local_batch_size": size * passes if pp > 1 else size,
            P + "pipeline_parallel_schedule": "1F1B" if passes >= pp else "GPipe",
            P + "pipeline_parallel_microbatch_size": size, "training.global_batch_size": dp * passes * size,
        }  # fmt: skip
        args = {"n_layers": layers, "dim": dim, "n_heads": heads, "n_kv_heads": heads, "hidden_dim": hidden}
        args |= {"head_dim": dim // heads, "vocab_size": 131072, "tied_embeddings": tied and pp == 1}
        options |= {f"model.args.{key}": value for key, value in args.items()}
        yield Row(
            source="nanotron docs/benchmark_summary.svg", hardware="h100", gpus=NODE * int(nodes),
            options=options | GATHERED | NONE | COMPILED, tflops=float(mfu) / 100 * 989,
        )  # fmt: skip


ROWS = [*torchtitan(), *megatron(), *bridge(), *automodel(), *nanotron()]

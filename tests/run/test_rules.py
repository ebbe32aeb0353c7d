"""One broken rule gives exactly one message, with the remedy for these values."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan_clone.config import (
    Config,
    load_config,
)
from torchtitan_clone.models.layer_kinds import LayerKind
from torchtitan_clone.models.moe import MoEArgs
from torchtitan_clone.run.rules import find_run_errors

FACTS: dict[str, Any] = {
    "world_size": 8,
    "max_seq_len": 4096,
    "vocab_size": 2048,
    "tokenizer_vocab_size": 2048,
    "heads": {"n_heads": 8, "n_kv_heads": 4},
    "n_layers": 6,
    "tied_embeddings": False,
    "device_type": "cpu",
}


def find_errors(config: Config, **facts: Any) -> list[str]:
    """Checks a configuration against these facts of the model, the tokenizer and the machine."""
    heads = facts.pop("heads")
    kinds = [LayerKind(positions=None, window=facts.pop("window", None))]
    names = ("max_seq_len", "vocab_size", "n_layers", "tied_embeddings")
    args = SimpleNamespace(
        n_heads=heads["n_heads"],
        kv_heads=heads.get("n_kv_heads", heads["n_heads"]),
        heads={"n_kv_heads": heads["n_heads"], **heads},
        num_experts=facts.pop("num_experts", 0),
        moe=facts.pop("moe", None),
        linear_conv=facts.pop("linear_conv", 1),
        mup_base_dim=0,
        layer_kinds=lambda: kinds,
        **{name: facts.pop(name) for name in names},
    )
    return find_run_errors(config, args=args, **facts)


def test_heads_of_linear_attention_are_not_exchanged() -> None:
    config = load_config([f"{CONTEXT}_degree=4", f"{CONTEXT}_rotate_method=alltoall"])
    heads = {"n_heads": 8, "n_kv_heads": 4, "linear_key_heads": 2, "linear_value_heads": 6}
    assert find_errors(config, **FACTS | {"heads": heads, "linear_conv": 4}) == []


def test_the_defaults_break_no_rule() -> None:
    assert find_errors(Config(), **FACTS) == []
    assert find_errors(Config(), **FACTS | {"tokenizer_vocab_size": None, "world_size": 1}) == []


REPLICATE, SHARD = "--parallelism.data_parallel_replicate_degree", "--parallelism.data_parallel_shard_degree"
CONTEXT, TENSOR = "--parallelism.context_parallel", "--parallelism.tensor_parallel_degree"

PIPELINE = "--parallelism.pipeline_parallel"
PARTS = "--parallelism.module_fqns_per_model_part"


def pipeline(degree: int, schedule: str, *others: str) -> list[str]:
    return [f"{PIPELINE}_degree={degree}", f"{PIPELINE}_schedule={schedule}", *others]


FT = "--fault_tolerance"
FREEZE = "--training.freeze_schedule"
STREAMED = '--data.sources=[{name = "a", path = "a"}, {name = "b", dataset = "c4"}]'

EXPERT = "--parallelism.expert_parallel_degree"
STAGE_AND_FREEZE = pipeline(
    4,
    "1F1B",
    "--training.seq_len=256",
    "--training.local_batch_size=4",
    "--training.global_batch_size=16",
    "--data.stages=[{first_step = 5, seq_len = 1024, global_batch_size = 4, local_batch_size = 1}]",
    f"{FREEZE}=[{{step = 4, layers = 2, pipeline_parallel_degree = 1}}]",
)
RULES = [
    (
        [*STAGE_AND_FREEZE, "--data.skip_steps=[[2, 3]]"],  # so that step 3 has batch 5, and nothing frozen
        {"world_size": 4},
        "data.stages, with the options of its entry at step 5: training.local_batch_size = 1: makes 1 micro-batches",
    ),
    (
        [
            "--data.stages=[{first_step = 1, seq_len = 1024, local_batch_size = 8, global_batch_size = 64}]",
            f"{FREEZE}=[{{step = 5, layers = 1, local_batch_size = 4}}]",
        ],
        {},
        "training.freeze_schedule: local_batch_size is set by data.stages too",
    ),
    (
        ["--model.converters=['float8']", f"{CONTEXT}_degree=2", "--training.seq_len=1000"],
        {},
        "training.seq_len = 1000: products in float8 over the tokens of one of 2 context-parallel ranks need a "
        "multiple of 32; set it to 992 or 1024",
    ),
    (
        ["--compile.cuda_graph"],
        {},
        "compile.cuda_graph = true: a graph is for dense models on one GPU, in float32 or bfloat16, without masks of "
        "documents; set training.document_masking to false and the number of ranks to 1, or compile.cuda_graph to "
        "false.",
    ),
    (
        ["--compile.cuda_graph", "--training.document_masking=false", "--training.enable_cpu_offload"],
        {"world_size": 1},
        "documents; set training.enable_cpu_offload to false, or compile.cuda_graph to false.",
    ),
    (
        ["--compile.cuda_graph", "--training.document_masking=false"],
        {"world_size": 1, "window": 128},
        "documents; set model.name to a family without experts, windows and linear attention, or compile.cuda_graph to "
        "false.",
    ),
    ([f"{EXPERT}=2"], {}, "expert_parallel_degree = 2: the model has no experts; set it to 1"),
    (
        [f"{TENSOR}=2", "--training.mixed_precision_param=bfloat16"],
        {"num_experts": 8, "moe": MoEArgs(hidden_dim=1000)},
        "model.args.moe.hidden_dim = 1000: must be a multiple of 16, because tensor 2 shards it, and grouped products "
        "need rows of a multiple of 16 bytes; set it to 992 or 1008, or use expert_parallel_degree",
    ),
    (
        pipeline(2, "1F1B", f"{TENSOR}=2", f'{PARTS}=[["tok_embeddings", "layers.0", "norm"], ["output"]]'),
        {"n_layers": 1},
        "with tensor parallelism the norm leaves its tokens sharded to the output; list both in the last part",
    ),
    (
        ["--training.seq_len=2048", "--data.stages=[{first_step = 9, seq_len = 32768, local_batch_size = 1}]"],
        {"world_size": 1, "max_seq_len": 1 << 20},
        "data.stages, first_step 9: seq_len = 32768: global_batch_size: 8 sequences of 2048 tokens are no whole number "
        "of sequences of 32768; set global_batch_size of the stage.",
    ),
    (
        ["--debug.moe_force_load_balance"],
        {},
        "moe_force_load_balance = true: the model has no experts; set it to false",
    ),
    (
        [f"{FT}.enable", f"{FT}.group_size=2", f"{FT}.semi_sync_method=diloco", "--training.steps=1000"],
        {"num_experts": 8, "moe": MoEArgs(expert_bias=True)},
        "model.args.moe.expert_bias = true: with fault_tolerance.semi_sync_method every replica group",
    ),
    (
        [f"{EXPERT}=4"],
        {"num_experts": 6},
        "= 4: does not divide the model's 6 experts; set it to a divisor (1, 2, 3 or 6)",
    ),
    (
        [f"{EXPERT}=8", f"{REPLICATE}=2"],
        {"num_experts": 64},
        "= 8: does not divide shard 4 x context 1 x tensor 1 = 4; set it to a divisor (1, 2 or 4)",
    ),
    ([f"{FREEZE}=[{{step = 0, layers = 1}}]"], {}, "step 0: step = 0 must be from 1 to 1,000,000,000,000."),
    ([f"{FREEZE}=[{{step = 5, layers = 1}}, {{step = 5, layers = 2}}]"], {}, "step 5: must be above 5"),
    ([f"{FREEZE}=[{{step = 5, layers = 2}}, {{step = 9, layers = 2}}]"], {}, "layers = 2 must be above 2 and below"),
    ([f"{FREEZE}=[{{step = 5, layers = 8}}]"], {"n_layers": 8}, "layers = 8 must be above 0 and below model.args"),
    (
        [f"{FREEZE}=[{{step = 5, layers = 1}}]"],
        {"tied_embeddings": True},
        "freezes the embedding, which is also the weight of the output",
    ),
    (
        [f"{FREEZE}=[{{step = 5, layers = 1}}]", f"{FT}.enable", f"{FT}.group_size=2"],
        {},
        "a recovering replica group loads tensors of the others",
    ),
    (
        [f"{FREEZE}=[{{step = 5, layers = 1, local_batch_size = 0}}]"],
        {},
        "local_batch_size = 0 must be from 1 to 1,000,000,000.",
    ),
    (
        pipeline(4, "1F1B", f"{FREEZE}=[{{step = 5, layers = 1, pipeline_parallel_degree = 3}}]"),
        {},
        "step 5: pipeline_parallel_degree = 3 does not divide the previous degree 4; set it to a divisor",
    ),
    (
        pipeline(4, "1F1B", f"{FREEZE}=[{{step = 5, layers = 1, pipeline_parallel_degree = 1}}]"),
        {},
        "training.freeze_schedule, with the options of its entry at step 5: training.global_batch_size = 16: not a "
        "multiple of training.local_batch_size 8 x data-parallel degree 8 = 64; set training.global_batch_size to 64, "
        "or training.local_batch_size to 1 or 2.",
    ),
    (
        pipeline(4, "1F1B", f"{FREEZE}=[{{step = 5, layers = 1, local_batch_size = 2}}]"),
        {"world_size": 4},
        "with the options of its entry at step 5: training.local_batch_size = 2: makes 2 micro-batches of 1, and "
        "1F1B needs",
    ),
    (
        [f"{FT}.enable", f"{FT}.group_size=3", "--training.global_batch_size=64"],
        {},
        "training.global_batch_size = 64: not a multiple of training.local_batch_size 8 x data-parallel degree 8 x "
        "replica groups 3 = 192; set training.global_batch_size to 192.",
    ),
    (
        [f"{REPLICATE}=3"],
        {},
        "parallelism: replicate 3 does not divide WORLD_SIZE 8; set parallelism.data_parallel_replicate_degree to "
        "1, 2, 4 or 8, or launch 6 or 9 ranks.",
    ),
    (
        [f"{SHARD}=16"],
        {},
        "parallelism: shard 16 is not WORLD_SIZE 8; set parallelism.data_parallel_shard_degree to 8 or -1, or "
        "launch 16 ranks.",
    ),
    (
        [f"{REPLICATE}=2", f"{SHARD}=3"],
        {},
        "parallelism: replicate 2 x shard 3 = 6 is not WORLD_SIZE 8; set parallelism.data_parallel_shard_degree to "
        "4 or -1, or launch 6 ranks.",
    ),
    ([f"{SHARD}=1"], {"world_size": 4}, "shard 1 is not WORLD_SIZE 4; set parallelism.data_parallel_shard_degree to 4"),
    ([f"{REPLICATE}=4"], {"world_size": 1}, "or launch 4 ranks"),
    (
        ["--parallelism.tensor_parallel_degree=8"],
        {},
        "parallelism.tensor_parallel_degree = 8: does not divide model.args.n_kv_heads 4; set it to a divisor "
        "(1, 2 or 4), ",
    ),
    (
        ["--parallelism.tensor_parallel_degree=4", "--training.seq_len=6"],
        {},
        "parallelism.tensor_parallel_degree = 4: does not divide training.seq_len 6; set it to a divisor "
        "(1, 2, 3 or 6)",
    ),
    (
        pipeline(2, "1F1BB"),
        {},
        'pipeline_parallel_schedule = "1F1BB": no such schedule (did you mean "1F1B"?); known: GPipe, ',
    ),
    (pipeline(2, "1F1B"), {"tied_embeddings": True}, "set model.args.tied_embeddings to false, or the degree to 1"),
    (
        pipeline(4, "1F1B", "--training.local_batch_size=3"),
        {},
        "training.local_batch_size = 3: makes 3 micro-batches of 1, and 1F1B needs one for each of its 4 stages; set "
        "it to at least 4, or parallelism.pipeline_parallel_schedule to GPipe.",
    ),
    (
        pipeline(2, "DualPipeV", f"{PIPELINE}_microbatch_size=4"),
        {},
        "training.local_batch_size = 8: makes 2 micro-batches of 4, and DualPipeV needs one for each of its 4 stages; "
        "set it to at least 16",
    ),
    (
        ["--validation.enable", "--training.dataset=org/name"],
        {},
        "validation.steps = -1: the documents of org/name are streamed, and one pass over those held out reads all of "
        "them; set it to a number of batches, or validation.enable to false.",
    ),
    (["--validation.enable", STREAMED], {}, "validation.steps = -1: the documents of c4 are streamed"),
    (
        pipeline(2, "1F1B", "--validation.enable", "--validation.local_batch_size=1"),
        {},
        "validation.local_batch_size = 1: makes 1 micro-batches of 1, and 1F1B needs one for each of its 2 stages",
    ),
    (
        pipeline(2, "Interleaved1F1B", "--training.local_batch_size=5"),
        {},
        "makes 5 micro-batches of 1, and Interleaved1F1B needs a multiple of its 2 rounds; set it to 4 or 6.",
    ),
    (
        pipeline(2, "GPipe", f"{PIPELINE}_microbatch_size=3"),
        {},
        "training.local_batch_size = 8: not a multiple of parallelism.pipeline_parallel_microbatch_size 3; set it to 9",
    ),
    (
        pipeline(8, "1F1B"),
        {"n_layers": 5},
        "parallelism.pipeline_parallel_degree = 8: model.args.n_layers 5 over 8 stages leaves one without a layer; ",
    ),
    (
        pipeline(2, "1F1B", f"{PIPELINE}_layers_per_stage=2"),
        {},
        "parallelism.pipeline_parallel_layers_per_stage: gives 4 stages; 1F1B on 2 ranks needs 2; change it",
    ),
    (
        pipeline(2, "ZBVZeroBubble", f"{PIPELINE}_layers_per_stage=1"),
        {},
        "parallelism.pipeline_parallel_layers_per_stage: gives 8 stages; ZBVZeroBubble on 2 ranks needs 4; change it",
    ),
    (
        pipeline(2, "LoopedBFS", f"{PIPELINE}_layers_per_stage=3"),
        {},
        "gives 3 stages; LoopedBFS on 2 ranks needs a multiple of 2; change it or remove it.",
    ),
    (
        pipeline(2, "1F1B", f'{PARTS}=[["tok_embeddings", "layers.0"], ["layer.1", "norm", "output"]]'),
        {"n_layers": 2},
        "parallelism.module_fqns_per_model_part: the model has no layer.1; list every module once, in the model's "
        "order: tok_embeddings, layers.0 to layers.1, norm, output.",
    ),
    (
        pipeline(2, "1F1B", f'{PARTS}=[["tok_embeddings", "layers.0"], ["norm", "output"]]'),
        {"n_layers": 2},
        "module_fqns_per_model_part: no model part has layers.1; list",
    ),
    (
        pipeline(2, "1F1B", f'{PARTS}=[["tok_embeddings", "layers.1"], ["layers.0", "norm", "output"]]'),
        {"n_layers": 2},
        "a model part is empty, or a module is repeated or out of order; list",
    ),
    (
        pipeline(2, "1F1B", f'{PARTS}=[["tok_embeddings"], ["layers.0"], ["norm", "output"]]'),
        {"n_layers": 1},
        "parallelism.module_fqns_per_model_part: gives 3 stages; 1F1B on 2 ranks needs 2",
    ),
    (pipeline(2, "LoopedBFS", f"{PARTS}=[]"), {}, "module_fqns_per_model_part: gives 0 stages; LoopedBFS on 2 ranks"),
    (
        pipeline(2, "DualPipeV", '--parallelism.fsdp_reshard_after_forward="always"'),
        {},
        "DualPipeV computes gradients of weights separately, and torch loses those of weights that were "
        "freed in between; "
        'set it to "default" or "never".',
    ),
    (
        pipeline(
            2,
            "ZBVZeroBubble",
            "--activation_checkpoint.mode=selective",
            "--activation_checkpoint.selective_ac_option=op",
        ),
        {},
        'selective_ac_option = "op": ZBVZeroBubble computes gradients of inputs and of weights separately, and torch',
    ),
    (
        pipeline(2, "ZBVZeroBubble", "--compile.enable"),
        {},
        'a compiled block computes both at once; set compile.components to ["loss"]',
    ),
    (
        [f"{PIPELINE}_degree=2", f"{PIPELINE}_schedule_csv=nowhere.csv"],
        {},
        'schedule_csv = "nowhere.csv": cannot be read as a schedule: [Errno 2] No such file',
    ),
    (
        [f"{CONTEXT}_degree=4", "--training.seq_len=100"],
        {},
        "with the rotate method allgather and tensor 1, training.seq_len 100 must be a multiple of 8; set it to 96 or "
        "104.",
    ),
    (
        [f"{CONTEXT}_degree=4", f"{CONTEXT}_rotate_method=ring", "--training.seq_len=4", f"{TENSOR}=2"],
        {},
        "with the rotate method ring and tensor 2, training.seq_len 4 must be a multiple of 8; set it to 8.",
    ),
    (
        [f"{CONTEXT}_degree=2", f"{CONTEXT}_rotate_method=alltoall", "--training.seq_len=12", f"{TENSOR}=4"],
        {"heads": {"n_heads": 8}},
        "training.seq_len 12 must be a multiple of 8; set it to 8 or 16.",
    ),
    (
        [f"{CONTEXT}_degree=4", f"{CONTEXT}_rotate_method=alltoall", f"{TENSOR}=2"],
        {},
        'parallelism.context_parallel_rotate_method = "alltoall": context 4 x tensor 2 does not divide '
        'model.args.n_kv_heads 4; set it to "allgather" or "ring"',
    ),
    (
        [f"{CONTEXT}_degree=4", "--training.seq_len=16"],
        {"linear_conv": 4},
        "training.seq_len = 16: convolutions see 3 tokens before each, and one of 8 pieces of a row has 2; set it to "
        "at least 24, or context_parallel_degree to 1.",
    ),
    (
        ["--training.global_batch_size=80", "--training.local_batch_size=4"],
        {},
        "training.global_batch_size = 80: not a multiple of training.local_batch_size 4 x data-parallel degree 8 = 32; "
        "set training.global_batch_size to 64 or 96, or training.local_batch_size to 1, 2, 5 or 10.",
    ),
    (["--training.global_batch_size=12"], {}, "set training.global_batch_size to 64."),
    (["--training.seq_len=8192"], {}, "llama3 debugmodel takes sequences of up to 4096 tokens; set it to at most 4096"),
    ([], {"tokenizer_vocab_size": 3000}, "model.args.vocab_size = 2048: the tokenizer of this package has 3000 tokens"),
]


@pytest.mark.parametrize(
    ("text", "others", "fragment"),
    [
        ("0F0,0B0\n1F0,1B0\n2F0,2B0\n", ["--training.local_batch_size=1"], "schedules 3 ranks, but"),
        ("0F0,0B0\n2F0,2B0\n", [], "cannot be read as a schedule: its stages are [0, 2], not 0, 1, 2 and so on"),
        ("0F0,0B0\n1F0,1B0\n", [], "makes 8 micro-batches, "),
        (
            "0F0,0B0\n1F0,1B0\n",
            ["--training.local_batch_size=1", f'{PARTS}=[["tok_embeddings"], ["layers.0"], ["norm", "output"]]'],
            "has 3 model parts, but the schedule file has 2 stages",
        ),
        (
            "0F0,0I0,0W0\n1F0,1I0,1W0\n",
            ["--training.local_batch_size=1", '--parallelism.fsdp_reshard_after_forward="always"'],
            "torch loses those of weights",
        ),
    ],
)
def test_rules_of_a_schedule_file(tmp_path: Path, text: str, others: list[str], fragment: str) -> None:
    file = tmp_path / "schedule.csv"
    file.write_text(text)
    argv = [f"{PIPELINE}_degree=2", f"{PIPELINE}_schedule_csv={file}", *others]
    (message,) = find_errors(load_config(argv), **FACTS | {"n_layers": 1})
    assert fragment in message


@pytest.mark.parametrize(("argv", "facts", "fragment"), RULES)
def test_rules(argv: list[str], facts: dict[str, Any], fragment: str) -> None:
    (message,) = find_errors(load_config(argv), **FACTS | facts)
    assert fragment in message


ALLOWED = [
    (STAGE_AND_FREEZE, {"world_size": 4}),
    (
        pipeline(
            4, "1F1B", f"{SHARD}=2", f"{FREEZE}=[{{step=5, layers=1, pipeline_parallel_degree=2, local_batch_size=4}}]"
        ),
        {},
    ),
    ([f"{REPLICATE}=2", f"{SHARD}=4"], {}),
    (["--training.global_batch_size=128"], {}),
    ([f"{CONTEXT}_degree=4", f"{CONTEXT}_rotate_method=alltoall", "--training.seq_len=100"], {}),
    ([f"{CONTEXT}_degree=8", f"{CONTEXT}_rotate_method=ring"], {}),
    ([*pipeline(2, "Interleaved1F1B"), "--compile.enable", '--parallelism.fsdp_reshard_after_forward="always"'], {}),
    ([*pipeline(2, "DualPipeV"), "--compile.enable", '--compile.components=["loss"]'], {}),
    (pipeline(2, "1F1B", f'{PARTS}=[["tok_embeddings", "layers.0"], ["norm", "output"]]'), {"n_layers": 1}),
    (pipeline(1, "unknown", f"{PIPELINE}_microbatch_size=3"), {"tied_embeddings": True}),
    (["--validation.enable", "--validation.steps=1", STREAMED], {}),
    (["--validation.enable", "--training.dataset=org/name", "--training.dataset_path=x"], {}),
    ([STREAMED], {}),
]


@pytest.mark.parametrize(("argv", "facts"), ALLOWED)
def test_what_no_rule_forbids(argv: list[str], facts: dict[str, Any]) -> None:
    assert find_errors(load_config(argv), **FACTS | facts) == []


def test_remedies_over_several_degrees() -> None:
    config = load_config(["--parallelism.tensor_parallel_degree=4", "--parallelism.pipeline_parallel_degree=2"])
    found = find_errors(config, **FACTS | {"world_size": 12})
    assert found[-1] == (
        "parallelism: tensor 4 x pipeline 2 = 8 does not divide WORLD_SIZE 12; set parallelism.tensor_parallel_degree "
        "to 1, 2, 3 or 6 or parallelism.pipeline_parallel_degree to 1 or 3, or launch 8 or 16 ranks."
    )


def test_all_broken_rules_at_once() -> None:
    argv = ["--training.steps=0", "--optimizer.lr=0", "--profiling.enable_memory_snapshot", "--training.seq_len=8192"]
    assert len(find_errors(load_config(argv), **FACTS)) == 4

"""Compares the predicted memory of steps with that of real runs: on CPU growth of max RSS, on CUDA what is reserved.

    python tests/campaigns/memory.py
    python tests/campaigns/memory.py --device=cuda

Each configuration runs in processes of its own. The growth of max RSS is from after the imports and the start of the
process group to the end of two steps; that of the rank with most is compared. On CPU there is no caching allocator:
predicted are the live tensors of the fullest rank, plus what the same steps of a tiny model grow by, which are pages of
libraries and their state. Tensors are allocated by malloc, and what is freed goes back to the kernel, as
MALLOC_MMAP_THRESHOLD_ is set to 64 KiB; in the region that training uses, free blocks between others come on top.
"""

import argparse
import os
import resource
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a clone without being installed

import torch

from benchmarks.turns import processor_name
from tests.support.harness import run_ranks
from tests.support.teachers import write_teacher
from torchtitan_clone.config import load_config
from torchtitan_clone.parallel.runtime import Launch, pick_device, process_group
from torchtitan_clone.planner.simulate import fake_batch
from torchtitan_clone.planner.step_memory import predict_step_memory
from torchtitan_clone.run import preflight
from torchtitan_clone.run.engine import build_engine
from torchtitan_clone.run.plan import RunPlan

STEPS = 2
NONE = {"activation_checkpoint.mode": "none"}
FULL = {"activation_checkpoint.mode": "full"}
PER_OP = {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"}
FP32 = {"training.mixed_precision_param": "float32"}
BF16 = {"training.mixed_precision_param": "bfloat16"}
Options = Mapping[str, object]
CPU_RUNS: dict[str, tuple[int, Options]] = {
    "fp32, none": (1, {**FP32, **NONE}),
    "bf16, selective per operation": (1, {**BF16, **PER_OP}),
    "fp32, full": (1, {**FP32, **FULL}),
    "fp32, selective, shard 2": (2, {**FP32, **PER_OP}),
    "fp32, none, tensor 2": (2, {**FP32, **NONE, "parallelism.tensor_parallel_degree": 2}),
    "fp32, none, pipeline 2": (2, {**FP32, **NONE, "parallelism.pipeline_parallel_degree": 2}),
    "fp32, none, distilled": (1, {**FP32, **NONE}),
    "fp32, none, distilled, shard 2": (2, {**FP32, **NONE}),
    "fp32, none, distilled, pipeline 2": (2, {**FP32, **NONE, "parallelism.pipeline_parallel_degree": 2}),
}
"""Those that are distilled have a teacher of the same sizes."""
CPU_SIZES = {
    "model.args.dim": 512, "model.args.n_layers": 8, "model.args.n_heads": 8, "training.local_batch_size": 4,
    "training.seq_len": 256,
}  # fmt: skip
TINY = {
    "model.args.dim": 64, "model.args.n_layers": 2, "model.args.n_heads": 8, "training.local_batch_size": 2,
    "training.seq_len": 16,
}  # fmt: skip
FAMILIES: dict[str, Options] = {
    "llama3": {},
    **{name: {"debug.moe_force_load_balance": "true"} for name in ("qwen3_moe", "deepseek_v3", "gpt_oss")},
}
GPU_RUNS: dict[str, tuple[int, Options]] = {
    f"{family}, {mode}": (1, {"model.name": family, **options, **BF16, **recomputation})
    for family, options in FAMILIES.items()
    for mode, recomputation in (("none", NONE), ("selective per operation", PER_OP), ("full", FULL))
}
GPU_SIZES = {"training.local_batch_size": 64, "training.seq_len": 2048}


def with_teacher(sizes: Options, folder: str) -> Options:
    """Returns the sizes with the option that names a teacher of them, which is written into the folder first."""
    own = Path(tempfile.mkdtemp(dir=folder))
    args = {name.replace(".", "__"): value for name, value in sizes.items() if name.startswith("model.args.")}
    return {**sizes, "distillation.teacher_path": write_teacher(own / "teacher", own, **args)}


def plan_of(options: Options, *, world_size: int, device_type: str) -> RunPlan:
    """Returns the plan of a run."""
    argv = [f"--{key}={value}" for key, value in options.items()]
    return preflight.resolve(load_config(argv), world_size=world_size, device_type=device_type)


def run_steps(options: Options, device_type: str) -> int:
    """Returns the bytes by which max RSS grows on this rank, or on CUDA those that torch reserves."""
    launch = Launch.from_environment()
    device = pick_device(launch)
    plan = plan_of(options, world_size=launch.world_size, device_type=device_type)
    training = plan.config.training
    with process_group(plan.config.comm, launch=launch, device=device):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        engine = build_engine(plan, device=device)
        for step in range(1, STEPS + 1):
            engine.begin_step(step)
            batch = fake_batch(plan).to(device)
            engine.forward_backward([batch], num_targets=training.local_batch_size * training.seq_len)
            engine.gradient_norm()
            engine.optimizer.step(factor=0.5)
            engine.optimizer.zero_grad()
        if device_type == "cuda":
            return torch.cuda.max_memory_reserved()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - pages * resource.getpagesize()


def main() -> int:
    """Prints a row for each configuration, and how many are within 10 %."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", default="", help="configurations with this text in their name")
    parser.add_argument("--layers", type=int, default=8)
    choices = parser.parse_args()
    is_cpu = choices.device == "cpu"
    visible = {} if is_cpu else {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}
    runs, sizes = (CPU_RUNS, CPU_SIZES) if is_cpu else (GPU_RUNS, GPU_SIZES)
    os.environ |= {"ALLOCATOR": "default", "MALLOC_MMAP_THRESHOLD_": str(2**16)}
    print(f"{processor_name()}, torch {torch.__version__}" if is_cpu else torch.cuda.get_device_name())
    print(f"MiB {'':30}{'measured':>10}{'tensors':>10}{'libraries':>11}{'error':>8}")
    errors, folder = [], tempfile.TemporaryDirectory()
    for name, (world_size, options) in runs.items():
        if choices.only not in name:
            continue

        def measured(sizes: Options, world_size: int = world_size, options: Options = options) -> float:
            argv = ({**sizes, **options}, choices.device)
            return max(run_ranks(run_steps, world_size, *argv, env=visible, timeout=300)) / 2**20

        own, tiny = {**sizes, "model.args.n_layers": choices.layers}, TINY
        if "distilled" in name:
            own, tiny = with_teacher(own, folder.name), with_teacher(TINY, folder.name)
        grown, libraries = measured(own), measured(tiny) if is_cpu else 0.0
        plan = plan_of({**own, **options}, world_size=world_size, device_type=choices.device)
        tensors = max(memory.total for memory in predict_step_memory(plan, device_type=choices.device)) / 2**20
        error = (tensors + libraries) / grown - 1
        errors.append(abs(error))
        print(f"{name:34}{grown:10,.0f}{tensors:10,.0f}{libraries:11,.0f}{error:+8.1%}", flush=True)
    print(f"within 10 %: {sum(error <= 0.1 for error in errors)} of {len(errors)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A run keeps the kernels of its first start: real processes, with and without a compiler of C++."""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.marks import needs_door
from tests.support.runs import losses, options, train
from torchtitan_clone.config import ConfigError, load_config
from torchtitan_clone.config.schema import Comm
from torchtitan_clone.network import LOOPBACK, serve_store
from torchtitan_clone.parallel.runtime import Launch, process_group
from torchtitan_clone.run.kernel_record import settle_kernels
from torchtitan_clone.run.preflight import resolve
from torchtitan_clone.tools.trained_model import open_trained_model


def weights_of(folder):
    """Returns the weights of a run's newest checkpoint, by name."""
    model = open_trained_model(folder / "run", dtype=torch.float32, device=torch.device("cpu")).model
    return dict(model.state_dict())


@needs_door("cpu")
def test_a_start_that_can_compile_computes_as_the_first_that_could_not(corpus, tmp_path):
    def start(name, steps, **env):
        argv = options(corpus, tmp_path / name, training__steps=steps, lr_scheduler__total_steps=4)
        code, text = train(argv, log_folder=tmp_path, env=env)
        assert code == 0, text
        return json.loads((tmp_path / name / "run" / "kernels.json").read_text()), text

    without = {"CXX": "false", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    none = {"libraries": [], "attention": "torch"}
    assert start("whole", 4, **without)[0] == none
    assert start("parts", 2, **without)[0] == none
    recorded, text = start("parts", 4)
    assert recorded == none
    names = start("other", 4)[0]["libraries"]
    whole, parts, other = (weights_of(tmp_path / name) for name in ("whole", "parts", "other"))
    assert all(torch.equal(parts[name], whole[name]) for name in whole)
    # Else the equality would say nothing.
    assert any(not torch.equal(other[name], whole[name]) for name in whole) == bool(names)
    assert ("kernels of this package: none, as in the run's first start" in text) == bool(names)


def test_a_run_that_moves_to_a_gpu_needs_no_kernels_of_a_cpu(corpus, tmp_path, monkeypatch):
    plan = resolve(load_config(options(corpus, tmp_path)), world_size=1, device_type="cuda")
    plan.output_folder.mkdir(parents=True)
    (plan.output_folder / "kernels.json").write_text('["a kernel of another machine"]')
    with process_group(Comm(), launch=Launch(rank=0, local_rank=0, world_size=1), device=torch.device("cpu")):
        settle_kernels(plan, rank=0, device=torch.device("cuda"), resumes=True)
        with pytest.raises(
            ConfigError, match=r"kernels\.json: the run was trained with the kernels a kernel of another"
        ):
            settle_kernels(plan, rank=0, device=torch.device("cpu"), resumes=True)
        monkeypatch.setenv("TORCHTITAN_CLONE_CPU", "0")
        with pytest.raises(ConfigError, match=r"closes the package torchtitan_clone\.cpu; unset it, or delete"):
            settle_kernels(plan, rank=0, device=torch.device("cpu"), resumes=True)


@needs_door("cpu")
def test_a_start_that_lacks_the_kernels_of_the_run_says_so(corpus, tmp_path):
    argv = [
        options(corpus, tmp_path, training__steps=steps, lr_scheduler__total_steps=4, training__seq_len=256)
        for steps in (2, 4)
    ]
    assert train(argv[0], log_folder=tmp_path)[0] == 0
    file = tmp_path / "run" / "kernels.json"
    if not json.loads(file.read_text())["libraries"]:
        pytest.skip("this processor uses torch's kernels")
    without = {"CXX": "false", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    code, text = train(argv[1], log_folder=tmp_path, env=without)
    assert code == 2
    assert f"{file}: the run was trained with the kernels cpp" in text
    file.write_text('["cpp"]')  # as version 0.2 wrote it
    code, text = train(argv[1], log_folder=tmp_path, env=without)
    assert code == 2
    assert f"{file}: the run was trained with the kernels cpp" in text
    file.write_text('["cpp"')
    code, text = train(argv[1], log_folder=tmp_path)
    assert code == 2
    assert f"{file} is damaged" in text
    file.unlink()
    assert train(argv[1], log_folder=tmp_path, env=without)[0] == 0


@needs_door("cpu")
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="needs a processor with AVX-512")
def test_ranks_with_unlike_processors_agree_on_attention(corpus, tmp_path):
    """Heads of 24 features fit the vectors of a rank with 8 floats, and not those of one with 16.

    Ranks that chose each for themselves would receive keys in different collectives.
    """
    store = serve_store(LOOPBACK)
    folders = {capability: tmp_path / str(capability) for capability in (None, "avx2")}
    for capability, folder in folders.items():
        argv = options(
            corpus, folder, training__steps=2, parallelism__context_parallel_degree=2, model__args__dim=96,
            comm__init_timeout_seconds=60, checkpoint__enable=False,
        )  # fmt: skip
        if capability is None:
            assert train(argv, world_size=2, log_folder=tmp_path)[0] == 0
            continue
        command, common = [sys.executable, "-m", "torchtitan_clone.train", *argv], {
            **os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        unlike = ({}, {"ATEN_CPU_CAPABILITY": capability})
        ranks = [
            subprocess.Popen(command, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank), **env})
            for rank, env in enumerate(unlike)
        ]
        try:
            assert [rank.wait(120) for rank in ranks] == [0, 0]
        finally:
            for rank in ranks:
                rank.kill()
    found = [list(losses(folder).values()) for folder in folders.values()]
    assert len(found[0]) == 2
    assert found[1] == pytest.approx(found[0], rel=1e-5)

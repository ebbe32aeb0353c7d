"""Settings of the process: random numbers by axis, timeouts, compiled code, and the wait for all ranks."""

import getpass
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.harness import run_ranks
from tests.support.runs import options, redirect_output
from tests.support.trainers import open_trainer
from torchtitan_clone.config import ConfigError, load_config
from torchtitan_clone.config.schema import Comm, Compile, Debug
from torchtitan_clone.data import open_dataset
from torchtitan_clone.ops.compile_cache import PACKAGE, set_compile_cache
from torchtitan_clone.parallel.runtime import (
    Launch,
    apply_debug_options,
    process_group,
    set_timeout,
    set_up_compile,
    wait_for_all_ranks,
)
from torchtitan_clone.run.preflight import resolve
from torchtitan_clone.torch_compat import group_timeout, process_groups
from torchtitan_clone.train import _options_that_must_match

CPU = torch.device("cpu")
CACHE = "TORCHINDUCTOR_CACHE_DIR"


def compile_cache_of(argv: list[str]) -> str | None:
    """Returns where torch.compile keeps its results in a run, after its engine was built."""
    with open_trainer(argv):
        return os.environ.get(CACHE)


def compile_cache() -> str | None:
    set_compile_cache("eager")
    return os.environ.get(CACHE)


COMPILE = """
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torchtitan_clone.ops.compile_cache import set_compile_cache
set_compile_cache("inductor")
CppPythonBindingsCodeCache.load_pybinding(["float*"], "#include <torch/csrc/inductor/cpp_prefix.h>")
"""


def test_compiled_code_is_kept_in_the_users_cache_folder(corpus, tmp_path):
    compiled = options(corpus, tmp_path, compile__enable=True, compile__backend="eager")
    user = {"XDG_CACHE_HOME": str(tmp_path)}
    (found,) = run_ranks(compile_cache_of, 1, compiled, env=user)
    assert Path(found).parent == tmp_path / "torchtitan_clone" / "inductor"
    mine = str(tmp_path / "mine")
    assert run_ranks(compile_cache, 1, env={**user, CACHE: mine}) == [mine]


def compile_cache_with(components: list[str]) -> str:
    set_up_compile(Compile(enable=True, components=components, backend="eager"), device_type="cpu")
    return os.environ.get(CACHE, "")


@pytest.mark.parametrize("components", [["model"], ["loss"]])
def test_a_cpu_sets_up_the_compiler_for_the_model_only(tmp_path, components):
    """It does not compile the loss."""
    (found,) = run_ranks(compile_cache_with, 1, components, env={"XDG_CACHE_HOME": str(tmp_path)})
    assert (str(tmp_path) in found) == (components == ["model"])


def test_precompiled_headers_are_kept_with_the_code(tmp_path):
    """Not where other users could put theirs, but with the code in $TORCHINDUCTOR_CACHE_DIR."""
    temporary, compiler = tmp_path / "tmp", tmp_path / "g++"
    temporary.mkdir()
    compiler.write_text(
        '#!/bin/sh\necho g++ 13.1\nwhile [ $# -gt 0 ]; do [ "$1" = -o ] && echo nothing > "$2"; shift; done\n'
    )
    compiler.chmod(0o755)
    environment = {"XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(temporary), "CXX": str(compiler)}
    environment = {**os.environ, **environment, CACHE: str(tmp_path / "mine")}
    result = subprocess.run(
        [sys.executable, "-c", COMPILE], check=False, capture_output=True, text=True, env=environment
    )
    assert "file too short" in result.stderr  # what the compiler wrote is no library
    (header,) = tmp_path.glob("**/*.gch")
    assert header.parent == tmp_path / "mine" / "precompiled_headers"
    assert not list(temporary.glob("**/precompiled_headers"))


STRANGE = """
import os
from torchtitan_clone.ops.compile_cache import set_compile_cache
set_compile_cache("inductor")
from torch._inductor import codecache, config
print(os.environ["TORCHINDUCTOR_CACHE_DIR"], codecache._HEADER_DIR, config.cpp.cxx[1])
"""


@pytest.mark.parametrize("chosen", ["tmp/torchinductor_{user}", "strange"])
def test_no_cache_of_code_is_where_others_could_have_made_it(tmp_path, chosen):
    """With a home that cannot be written, torch's default among temporary files, and another folder of theirs."""
    temporary, strange = tmp_path / "tmp", tmp_path / chosen.format(user=getpass.getuser())
    for folder in (temporary, strange):
        folder.mkdir()
    strange.chmod(0o777)
    (tmp_path / "file").touch()
    environment = {"XDG_CACHE_HOME": str(tmp_path / "file"), "TMPDIR": str(temporary), CACHE: str(strange)}
    command = [sys.executable, "-c", STRANGE]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | environment)
    own = temporary / f"torchtitan_clone-{os.geteuid()}" / "inductor"
    assert [path for path in done.stdout.split() if not Path(path).is_relative_to(own)] == []
    assert not list(strange.iterdir())


OPERATOR = """
import torch
import torch._inductor.config

@torch.library.custom_op("tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x

twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, grad: FACTOR * grad)

def main():
    from torch._dynamo.utils import counters
    from torchtitan_clone.ops.compile_cache import set_compile_cache
    torch._inductor.config.cpp_cache_precompile_headers = False  # takes 8 s
    set_compile_cache("inductor")
    x = torch.zeros(9, requires_grad=True)
    torch.compile(lambda x: twice(x).exp().sum())(x).backward()
    print(x.grad[0].item(), counters["aot_autograd"]["autograd_cache_hit"])
"""


def test_the_cache_is_that_of_the_package_and_the_processor(tmp_path):
    code = (
        "import os, sys, torch; from torchtitan_clone.ops.compile_cache import set_compile_cache; "
        "set_compile_cache('eager'); "
        f"print(torch.compiler.config.cache_key_tag, os.environ['{CACHE}'])"
    )
    copy = tmp_path / "copy" / "torchtitan_clone"
    shutil.copytree(PACKAGE, copy)

    def tag_and_folder(**environment: str) -> list[str]:
        environment = {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(copy.parent), **environment}
        environment = {name: value for name, value in os.environ.items() if name != CACHE} | environment
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, cwd=tmp_path)
        return done.stdout.split()

    tag, folder = tag_and_folder(TORCH_COMPILE_CACHE_KEY_TAG="mine")
    assert tag.startswith("mine")
    other_tag, other_folder = tag_and_folder(TORCH_COMPILE_CACHE_KEY_TAG="mine", ATEN_CPU_CAPABILITY="default")
    assert (other_tag != tag, other_folder != folder) == (True, True)
    with (copy / "ops" / "layers.py").open("a") as file:
        file.write("\n")
    changed_tag, same_folder = tag_and_folder(TORCH_COMPILE_CACHE_KEY_TAG="mine")
    assert (changed_tag != tag, same_folder) == (True, folder)


@pytest.mark.slow
def test_compiled_code_is_that_of_the_package_and_the_processor(tmp_path):
    """Code in the cache calls the backward that operators had, and has instructions of a processor."""
    copy = tmp_path / "copy" / "torchtitan_clone"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))

    def gradient_and_hits(*, factor: float, **environment: str) -> str:
        (copy / "operator_of_test.py").write_text(OPERATOR.replace("FACTOR", str(factor)))
        command = [sys.executable, "-c", "from torchtitan_clone.operator_of_test import main; main()"]
        environment = {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(copy.parent), **environment}
        environment = {name: value for name, value in os.environ.items() if name != CACHE} | environment
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert gradient_and_hits(factor=2.0) == "2.0 0"
    assert gradient_and_hits(factor=2.0) == "2.0 1"
    assert gradient_and_hits(factor=2.0, ATEN_CPU_CAPABILITY="default") == "2.0 0"
    assert gradient_and_hits(factor=3.0) == "3.0 0"
    # As a crash of the machine leaves them.
    libraries = [path for pattern in ("**/*.so", "**/*.o") for path in (tmp_path / "torchtitan_clone").glob(pattern)]
    assert libraries
    for library in libraries:
        library.write_bytes(b"")
    assert gradient_and_hits(factor=3.0).startswith("3.0")
    assert gradient_and_hits(factor=3.0) == "3.0 1"


def twice_with_a_break(x):
    torch._dynamo.graph_break()
    return 2 * x


def compile_with_explanations(log):
    redirect_output(log)
    apply_debug_options(Debug(explain_compile=True), launch=Launch.from_environment(), tensor_degree=1)
    compiled = torch.compile(twice_with_a_break, backend="eager")
    for x in (torch.ones(2), torch.ones(2, dtype=torch.float64)):
        compiled(x)


def test_graph_breaks_and_recompilations_are_logged_with_their_reasons(tmp_path):
    run_ranks(compile_with_explanations, 1, tmp_path / "log")
    text = (tmp_path / "log").read_text()
    assert "Graph break" in text
    assert "graph_break()" in text
    assert "Recompiling function" in text
    assert "dtype mismatch. expected Float, actual Double" in text


def numbers_and_timeouts(argv):
    """Returns random numbers of this rank, and the timeouts of all process groups after set_timeout(7)."""
    with open_trainer(argv):
        set_timeout(7)
        timeouts = [group_timeout(group, device=CPU).seconds for group in process_groups()]
        return torch.rand(4).tolist(), timeouts


@pytest.mark.many_ranks
def test_ranks_with_equal_tokens_draw_equal_numbers_and_no_others(corpus, tmp_path):
    """As dropout needs: equal over tensor, which shares tokens; different over data, context and pipeline."""
    for axes, is_equal in (
        ({"tensor_parallel_degree": 2, "data_parallel_shard_degree": 2}, True),
        ({"context_parallel_degree": 2, "data_parallel_replicate_degree": 2}, False),
        ({"pipeline_parallel_degree": 2, "data_parallel_shard_degree": 2}, False),
    ):
        changes = {f"parallelism__{name}": degree for name, degree in axes.items()}
        numbers, timeouts = zip(*run_ranks(numbers_and_timeouts, 4, options(corpus, tmp_path, **changes)), strict=True)
        assert len({tuple(drawn) for drawn in numbers}) == (2 if is_equal else 4), axes
        assert (numbers[0] == numbers[1], numbers[2] == numbers[3]) == (is_equal, is_equal)
        assert all(len(found) > 1 and set(found) == {7} for found in timeouts)


@pytest.fixture
def wait_outcomes(monkeypatch):
    """Runs wait_for_all_ranks() with these options at a launcher's store; returns the outcome of each rank."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    def outcome(rank, options):
        launch = Launch(rank=rank, local_rank=0, world_size=2)
        try:
            return wait_for_all_ranks(
                Comm(init_timeout_seconds=2), launch=launch, options=options, is_stop_wanted=lambda: False
            )
        except (ConfigError, TimeoutError) as error:
            return str(error)

    def run(*options):
        with ThreadPoolExecutor(len(options)) as ranks:
            return list(ranks.map(outcome, range(len(options)), options))

    yield run
    del store


def test_nodes_with_the_same_options_start(wait_outcomes):
    assert wait_outcomes(["a = 1", "b = 2"], ["a = 1", "b = 2"]) == [True, True]


def test_ranks_that_an_agent_starts_again_wait_for_each_other(wait_outcomes, monkeypatch):
    """The agent keeps its store, with what the ranks wrote when they were started before."""
    assert wait_outcomes(["a = 1"], ["a = 1"]) == [True, True]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert wait_outcomes(["a = 2"], ["a = 2"]) == [True, True]


def test_all_nodes_report_options_that_differ(wait_outcomes):
    one, other = wait_outcomes(["a = 1", "b = 2"], ["a = 1", "b = 3"])
    assert all("the nodes were started with different options" in said for said in (one, other))
    assert ("b = 2 here" in one) != ("b = 3 here" in other)
    assert "a = 1" not in one + other


def lines_to_compare(corpus, tmp_path, *, device_type="cpu", **changes):
    config = load_config(options(corpus, tmp_path, **changes))
    plan = resolve(config, world_size=1, device_type=device_type)
    data = {"training": config.training, "data": config.data, "tokenizer": plan.tokenizer, "mixture": plan.mixture}
    return _options_that_must_match(plan, dataset=open_dataset(**data))


def test_nodes_compare_whether_their_cpus_exchange_messages_by_this_package(corpus, tmp_path, monkeypatch):
    """Those that do connect to each other; without the comparison they would wait for the others."""
    monkeypatch.delenv("TORCHTITAN_CLONE_CPU", raising=False)
    before = lines_to_compare(corpus, tmp_path)
    monkeypatch.setenv("TORCHTITAN_CLONE_CPU", "0")
    (line,) = set(lines_to_compare(corpus, tmp_path)) - set(before)
    assert line == "the package torchtitan_clone.cpu = closed"


def test_nodes_compare_what_decides_the_data_but_not_where_it_is(corpus, tmp_path):
    """The same text elsewhere is the same data; other text at the same place is not."""
    copy = shutil.copytree(corpus, tmp_path / "copy")
    before = lines_to_compare(corpus, tmp_path)
    for same in ({"data__num_workers": 1}, {"data__cache_folder": tmp_path}, {"training__dataset_path": copy}):
        assert lines_to_compare(corpus, tmp_path, **same) == before
    for name, value in (("max_bad_rows", 3), ("held_out_fraction", 0.2), ("skip_steps", [[1, 2]])):
        other = lines_to_compare(corpus, tmp_path, **{f"data__{name}": value})
        assert any(line.startswith(f"data.{name} = ") for line in set(other) - set(before))
    assert "type of the device = cuda" in lines_to_compare(corpus, tmp_path, device_type="cuda")
    assert "type of the device = cpu" in before
    sources = [f'[{{name = "web", path = "{path}"}}]' for path in (corpus, copy)]
    one, two = (lines_to_compare(corpus, tmp_path, data__sources=each, training__dataset_path=None) for each in sources)
    assert one == two
    (copy / "more.txt").write_text("other text")
    changed = lines_to_compare(corpus, tmp_path, data__sources=sources[1], training__dataset_path=None)
    (line,) = set(changed) - set(one)
    assert line.startswith("data.sources, name web: the fingerprint of the data = ")


def test_timeout_says_how_many_ranks_came(wait_outcomes):
    assert wait_outcomes(["a = 1"]) == ["1 of 2 ranks came within comm.init_timeout_seconds = 2"]


def test_one_process_needs_no_rendezvous_in_any_environment(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")  # as in every Slurm job
    monkeypatch.delenv("RANK", raising=False)
    with process_group(Comm(), launch=Launch(rank=0, local_rank=0, world_size=1), device=CPU):
        assert dist.get_world_size() == 1


@pytest.mark.parametrize(
    ("local_rank", "complaint"),
    [("1", r"\$LOCAL_RANK = 1: must be below 1, the number of GPUs"), (None, r"\$LOCAL_RANK too")],
)
def test_each_process_needs_a_gpu_of_its_own(monkeypatch, local_rank, complaint):
    """On a machine of one GPU, which torch reports here."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    names = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "LOCAL_RANK": local_rank}
    for name, value in names.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=complaint):
        Launch.from_environment().check_peers()

"""No value of an option, and no environment variable, gives a traceback, a hang or a half-made run.

Attacks torchtitan_clone/config/schema.py, torchtitan_clone/config/reader.py, torchtitan_clone/config/environment.py
and torchtitan_clone/run/preflight.py.
"""

import os
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.harness import run_ranks
from tests.support.runs import options, redirect_output, train
from torchtitan_clone.config import ConfigError, read_config, to_toml
from torchtitan_clone.config.checks import find_config_errors
from torchtitan_clone.config.messages import SHOWN_PROBLEMS, toml_like
from torchtitan_clone.config.reader import TABLES
from torchtitan_clone.run import preflight
from torchtitan_clone.run.describe import describe_run
from torchtitan_clone.train import main

INTEGERS = [
    "0",
    "1",
    "-1",
    "-2",
    "7",
    str(10**9),
    str(10**12),
    *(str(sign * 2**n) for n in (31, 63, 70) for sign in (1, -1)),
]
INTEGERS += ["9" * 5000, "0x" + "f" * 5000, "1_000"]
FLOATS = ["0.0", "-0.0", "1e-320", "1.0", "-1.5", "1e14", "1e308", "1e400", "inf", "-inf", "nan", *INTEGERS]
TEXTS = [
    "",
    ".",
    "..",
    "/",
    "../../evil",
    "x" * 300,
    "x" * 70_000,
    "a\nb",
    "\x1b[31m",
    "\udcff",
    "é中🙂",
    "s3://bucket/x",
]
TEXTS += ["/proc/nowhere", "/dev/null/x", "'", '"', "$(reboot)", "org/name", "none", "-1"]
NESTED = [
    "[" * 100_000,
    "{a=" * 100_000,
    "[" * 300 + "]" * 300,
    "[]",
    "{}",
    "[[]]",
    "[1]",
    "[{}]",
    "[{a = 1}]",
    "{a = 1}",
]
ANYTHING = ["", "true", "1", "1.5", '"a"', "1979-05-27", "nan", *NESTED]


def extremes(annotation: Any) -> list[str]:
    """Returns extreme values of a type, as written on the command line."""
    kinds = {int: INTEGERS, float: FLOATS, str: [*TEXTS, *map(toml_like, TEXTS[:-3])], bool: ["true", "false", "2"]}
    found = [value for kind in {annotation, *get_args(annotation)} for value in kinds.get(kind, [])]
    if get_origin(annotation) is Literal:
        found = [*map(str, get_args(annotation)), "", "nothing"]
    if get_origin(annotation) is list:
        items = extremes(get_args(annotation)[0])
        found = [f"[{item}]" for item in items if len(item) < 1000]
        found += [f"[{toml_like('x')}, {toml_like('layers.999999')}]", "[" + "1," * 5000 + "]"]
    if hasattr(annotation, "__dataclass_fields__"):
        found = list(_extreme_tables(annotation))
    return found


def _extreme_tables(cls: type) -> Iterator[str]:
    """Yields inline tables with one extreme value each."""
    hints = get_type_hints(cls)
    usual = {
        field.name: "1" if hints[field.name] is int else '"*"' for field in fields(cls) if field.default is MISSING
    }
    for key, hint in hints.items():
        for value in extremes(hint):
            if len(value) < 6000:
                pairs = usual | {key: value if value in FLOATS else toml_like(value)}
                yield f"{{{', '.join(f'{name} = {text}' for name, text in pairs.items())}}}"


SIZES = ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "max_seq_len", "multiple_of", "hidden_dim")
FACTORS = ("norm_eps", "rope_theta", "ffn_dim_multiplier", "rope_scaling.factor")
OPTIONS = {f"{table}.{key}": [*extremes(hint), *ANYTHING] for table in TABLES for key, hint in TABLES[table].items()}
OPTIONS |= {f"model.args.{key}": INTEGERS for key in SIZES} | {f"model.args.{key}": FLOATS for key in FACTORS}


def text_of(refusal: ConfigError) -> str:
    """Returns the message; asserts that it is short and cannot forge a line."""
    text = str(refusal)
    assert len(text.splitlines()) in (1, 1 + len(refusal.messages), 2 + SHOWN_PROBLEMS)
    assert "".join(text.splitlines()).isprintable()
    assert len(text) < 25_000
    return text


def dry_run(argv: list[str], *, world_size: int = 1) -> str:
    """Does what `--dry-run` does; returns the printed text, or the errors."""
    try:
        loaded = read_config(argv)
        plan = preflight.resolve(
            loaded.config, world_size=world_size, device_type="cpu", problems=loaded.problems, looks_for_data=True
        )
        preflight.check_start(plan)
        return describe_run(plan, device_type="cpu")
    except ConfigError as refusal:
        return text_of(refusal)


@pytest.mark.timeout(120)
@settings(max_examples=100, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_extreme_values_of_any_two_options(data: st.DataObject, corpus: Path, tmp_path: Path) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(OPTIONS)), min_size=1, max_size=2, unique=True))
    chosen = [f"--{name}={data.draw(st.sampled_from(OPTIONS[name]))}" for name in names]
    text = dry_run([*options(corpus, tmp_path), *chosen])
    text.encode()
    assert not [path for path in tmp_path.iterdir() if path.name != "cache"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("table", TABLES)
def test_every_extreme_value_of_every_option(corpus: Path, tmp_path: Path, table: str) -> None:
    """One at a time, as far as the configuration's own rules."""
    for name in (name for name in OPTIONS if name.startswith(f"{table}.")):
        for value in OPTIONS[name]:
            argv = [*options(corpus, tmp_path), f"--{name}={value}"]
            try:
                config = read_config(argv).config
            except ConfigError as refusal:
                text_of(refusal)
                continue
            find_config_errors(config, device_type="cpu")
            to_toml(config).encode()


BEFORE_TORCH = {
    "RANK=-1": '$RANK = "-1": must be an integer from 0 to',
    "RANK=1e3": '$RANK = "1e3"',
    "RANK=" + "9" * 5000: "$RANK = ",
}
WITH_TORCH = {
    "WORLD_SIZE=abc": '$WORLD_SIZE = "abc": must be an integer from 1 to',
    "WORLD_SIZE=0": '$WORLD_SIZE = "0"',
    "WORLD_SIZE=1000000000": '$WORLD_SIZE = "1000000000"',
    "LOCAL_RANK=1": '$LOCAL_RANK = "1": must be an integer from 0 to 0',
    "MASTER_PORT=http": '$MASTER_PORT = "http"',
    "LOCAL_WORLD_SIZE=-3": '$LOCAL_WORLD_SIZE = "-3"',
    "WORLD_SIZE=2": "$RANK and $WORLD_SIZE need $MASTER_ADDR, $MASTER_PORT too",
}
TOO_LARGE = {
    "--model.args.dim=1000000000": "model.args.dim = 1000000000: must be from 1 to 1,048,576.",
    "--model.args.dim=524288": "model.args: weights, gradients and optimizer state need at least",
    "--training.local_batch_size=1000000000": "training.local_batch_size = 1000000000: the inputs of the layers need",
    "--validation.local_batch_size=1000000000": "validation.local_batch_size = 1000000000: the input of one",
    "--training.global_batch_size=1000000000": "training.global_batch_size = 1000000000: the tokens of one step need",
    "--training.steps=9223372036854775808": "training.steps: an integer has more than 64 bits",
    "--comm.init_timeout_seconds=100000000000000": "must be from 1 to 2,000,000.",
    "--debug.seed=1180591620717411303424": "debug.seed: an integer has more than 64 bits",
    "--job.dump_folder=/proc/runs": 'nothing can be written to "/proc/runs/run" (No such file or directory: /proc)',
    "--training.dataset_path=": 'training.dataset_path = "": an empty path is the current folder; set it to "."',
    "--data.cache_folder=": 'data.cache_folder = "": an empty path is the current folder; set it to "."',
    "--data.sources=[{name='a', path=''}]": 'data.sources, name "a": path = "": an empty path is the current folder',
    f"--job.dump_folder=/tmp/{'x' * 300}": "a path has at most 4,095 bytes, and each name in it 255; shorten it",
    "--job.dump_folder=runs\nin": 'job.dump_folder = "runs\\nin": must not contain a line break; choose another',
}


def start_with_each(argv: list[str], cases: list[tuple[str, str]], log: Path) -> list[tuple[int, str]]:
    """Starts training once per case, in this process, with the case's variable or option; returns codes and output."""
    found = []
    for name, value in cases:
        added = [] if name.isupper() else [f"{name}={value}"]
        before = dict(os.environ)
        os.environ |= {name: value} if name.isupper() else {}
        if name == "WORLD_SIZE":
            os.environ.pop("MASTER_ADDR"), os.environ.pop("MASTER_PORT")
        redirect_output(log)
        found.append((main([*argv, *added]), log.read_text()))
        os.environ.clear()
        os.environ |= before
    return found


@pytest.mark.timeout(120)
def test_starts_that_cannot_work_are_refused_before_anything_is_allocated(corpus: Path, tmp_path: Path) -> None:
    argv = options(corpus, tmp_path / "runs", validation__enable=True, training__global_batch_size=None)
    expected = BEFORE_TORCH | WITH_TORCH | TOO_LARGE
    cases = [(name, value) for name, _, value in (case.partition("=") for case in expected)]
    ((found),) = run_ranks(start_with_each, 1, argv, cases, tmp_path / "log")
    for (case, fragment), (code, output) in zip(expected.items(), found, strict=True):
        assert (code, "Traceback" in output, output.count("error: ")) == (2, False, 1), (case[:80], code, output)
        assert fragment in output, case[:80]
    assert not (tmp_path / "runs").exists()


FILES = {
    b"\xef\xbb\xbf[training]\nsteps = 7\n": None,  # a byte order mark, as editors on Windows write
    b"x = " + b"[" * 100_000: "nested too deep; at most 16 levels are accepted",
    b".".join([b"a"] * 100_000) + b" = 1": "nested too deep",
    b"[" + b".".join([b"a"] * 900) + b"]\nb = 1": "nested too deep",
    b"[training]\nsteps = " + b"9" * 5000: "an integer has too many digits; at most 64 bits are accepted",
    b"[training]\nsteps = 0x" + b"f" * 5000: "training.steps: an integer has more than 64 bits",
    b"[training]\nsteps = 9223372036854775808": "titan.toml:2: training.steps: an integer has more than 64 bits",
    b'[job]\nextends = "a\\u0000b"': "titan.toml:2: job.extends: a text has a null character",
    b'[job]\nrun_name = "' + b"x" * 70_000 + b'"': "at most 65,536 are accepted",
    b"[model.args]\n" + b"".join(b"a%d = 1\n" % number for number in range(5000)): "more than 4,096 values",
    b"#" * (1 << 20) + b"\n": "at most 1,048,576 are accepted",
    b"\xff\xfe[\0": "not UTF-8: byte 0xff",
}


@pytest.mark.parametrize("content", FILES, ids=range(len(FILES)))
def test_hostile_configuration_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "titan.toml"
    path.write_bytes(content)
    fragment = FILES[content]
    if fragment is None:
        assert read_config([f"--job.config_file={path}"]).config.training.steps == 7
        return
    with pytest.raises(ConfigError) as caught:
        read_config([f"--job.config_file={path}"])
    assert fragment in text_of(caught.value)


def test_a_pipe_is_no_configuration_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(ConfigError, match="must be a regular file"):
        read_config([f"--job.config_file={tmp_path / 'pipe.toml'}"])


def test_a_warmup_longer_than_the_run_is_clipped_with_a_warning(corpus: Path, tmp_path: Path) -> None:
    code, output = train(
        options(corpus, tmp_path, training__steps=3, lr_scheduler__warmup_steps=200), log_folder=tmp_path
    )
    assert code == 0, output
    assert "lr_scheduler.warmup_steps = 200: the schedule has 3 steps, so it is only a warmup, of 3 steps" in output

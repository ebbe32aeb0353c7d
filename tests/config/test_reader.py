"""Tests of loader.py and sources.py: precedence, extends, unknown keys, and errors that name file and line."""

from pathlib import Path

import pytest

from torchtitan_clone.config import Config, ConfigError, load_config, load_run_config


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes a file into an empty working folder, so that messages contain its relative path."""
    monkeypatch.chdir(tmp_path)

    def write_file(name: str, text: str) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return f"--job.config_file={name}"

    return write_file


def messages(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(list(argv))
    return caught.value.messages


def message(*argv: str) -> str:
    (only,) = messages(*argv)
    return only


def test_defaults_without_arguments() -> None:
    assert load_config([]) == Config()


def test_command_line_overrides_file_overrides_defaults(write) -> None:
    file = write("a.toml", "[training]\nsteps = 5\nseq_len = 64\n")
    config = load_config([file, "--training.steps=7"])
    assert (config.training.steps, config.training.seq_len, config.training.local_batch_size) == (7, 64, 8)
    assert config.job.config_file == "a.toml"


def test_the_file_of_the_environment_is_read_unless_another_is_named(write, monkeypatch) -> None:
    for name, steps in (("a", 5), ("b", 6), ("c", 7)):
        write(f"{name}.toml", f"[training]\nsteps = {steps}\nseq_len = 64\n")
    monkeypatch.delenv("CONFIG_FILE", raising=False)
    assert load_run_config([]) == Config()
    assert load_run_config([], default="a.toml").training.steps == 5
    monkeypatch.setenv("CONFIG_FILE", "b.toml")
    assert load_run_config(["--training.seq_len=32"], default="a.toml") == load_config(
        ["--job.config_file=b.toml", "--training.seq_len=32"]
    )
    assert load_run_config(["--job.config_file=c.toml"]).training.steps == 7
    monkeypatch.setenv("CONFIG_FILE", "")
    assert load_run_config([], default="a.toml").training.steps == 5


@pytest.mark.parametrize(
    ("argv", "table", "key", "value"),
    [
        (["--training.steps", "7"], "training", "steps", 7),
        (["--training.global_batch_size", "-1"], "training", "global_batch_size", -1),
        (["--debug.deterministic"], "debug", "deterministic", True),
        (["--debug.deterministic", "--training.steps=7"], "debug", "deterministic", True),
        (["--debug.deterministic=false"], "debug", "deterministic", False),
        (["--optimizer.lr=1e-3"], "optimizer", "lr", 1e-3),
        (["--optimizer.lr=1"], "optimizer", "lr", 1.0),
        (["--optimizer.name=AdamW"], "optimizer", "name", "AdamW"),
        (['--optimizer.name="AdamW"'], "optimizer", "name", "AdamW"),
        (["--activation_checkpoint.selective_ac_option=2"], "activation_checkpoint", "selective_ac_option", "2"),
        (["--job.run_name=2024-01-01"], "job", "run_name", "2024-01-01"),
        (["--job.run_name=a\nb=1"], "job", "run_name", "a\nb=1"),
        (["--job.description="], "job", "description", ""),
        (['--compile.components=["loss"]'], "compile", "components", ["loss"]),
        (["--dry-run"], "job", "dry_run", True),
        (["--training.steps=1", "--training.steps=2"], "training", "steps", 2),
    ],
)
def test_command_line_syntax(argv: list[str], table: str, key: str, value: object) -> None:
    read = getattr(getattr(load_config(argv), table), key)
    assert (read, type(read)) == (value, type(value))


def test_model_args_merge_key_by_key(write) -> None:
    file = write("a.toml", "[model.args]\nn_layers = 2\nrope = {factor = 8.0, low = 1}\n")
    config = load_config([file, "--model.args.n_layers=4", "--model.args.rope.low=3", "--model.args.name=x"])
    assert config.model.args == {"n_layers": 4, "rope": {"factor": 8.0, "low": 3}, "name": "x"}


@pytest.mark.parametrize(
    ("text", "override", "expected"),
    [
        ("rope = {factor = 8.0}", "--model.args.rope=3", {"rope": 3}),
        ("rope = 3", "--model.args.rope.low=1", {"rope": {"low": 1}}),
        ("rope = {factor = 8.0}", "--model.args.rope={}", {"rope": {"factor": 8.0}}),
        (
            "rope = {factor = 8.0}",
            "--model.args={rope = {low = 1}, n = 2}",
            {"rope": {"factor": 8.0, "low": 1}, "n": 2},
        ),
    ],
)
def test_value_and_table_replace_each_other(write, text: str, override: str, expected: dict[str, object]) -> None:
    assert load_config([write("a.toml", f"[model.args]\n{text}\n"), override]).model.args == expected


def test_extends_is_the_base_and_relative_to_its_file(write) -> None:
    write("base.toml", "[training]\nsteps = 1\nseq_len = 2\nlocal_batch_size = 3\n[model.args]\na = 1\n")
    write("sub/middle.toml", '[job]\nextends = "../base.toml"\n[training]\nsteps = 10\nseq_len = 20\n')
    file = write("sub/top.toml", '[job]\nextends = "middle.toml"\n[training]\nsteps = 100\n[model.args]\nb = 2\n')
    config = load_config([file])
    assert (config.training.steps, config.training.seq_len, config.training.local_batch_size) == (100, 20, 3)
    assert config.model.args == {"a": 1, "b": 2}


def test_circular_extends(write) -> None:
    write("a.toml", '[job]\nextends = "b.toml"\n')
    file = write("b.toml", '[job]\ndescription = "b"\nextends = "a.toml"\n')
    assert message(file) == "a.toml:2: job.extends is circular: b.toml -> a.toml -> b.toml"


def test_switches_and_hyphens_as_programs_with_tyro_write_them(write) -> None:
    file = write("a.toml", "[compile]\nenable = true\n")
    words = ["--compile.no-enable", "--training.local-batch-size", "3", "--validation.enable"]
    config = load_config([file, *words, "--quantize.linear.float8.emulate", "--quantize.linear.float8.no-emulate"])
    assert (config.compile.enable, config.training.local_batch_size, config.validation.enable) == (False, 3, True)
    assert config.quantize.linear.float8.emulate is False
    assert load_config([file, "--parallelism.no-enable-compiled-autograd"]).compile.enable is True
    assert load_config(["--compile.no_enable", "--compile.enable"]).compile.enable is True
    assert load_config(["--data.no-add-bos"]).data.add_bos is False
    assert load_config(["--slurm.environment.MY-NAME=x"]).launch.environment == {"MY-NAME": "x"}


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("--compile.no-enable=true", "--compile.no-enable takes no value; write --compile.enable=false"),
        ("--training.no-steps", "training.no-steps: unknown option; did you mean training.steps?"),
        ("--config=a.toml", "config: unknown option; did you mean job.config_file?"),
        ("--config-file=a.toml", "config-file: unknown option; did you mean job.config_file?"),
        (
            "--batch_size=4",
            "batch_size: unknown option; did you mean training.local_batch_size or validation.local_batch_size?",
        ),
        ("--training.compile", "training.compile: unknown option; did you mean compile.enable?"),
        (
            "--activation_checkpoint.mode=Full",
            'activation_checkpoint.mode = "Full": must be "none" | "full" | "selective"; did you mean "full"?',
        ),
    ],
)
def test_suggestions(word: str, problem: str) -> None:
    (found,) = [text.partition(": ")[2] for text in messages(word)]
    assert found == problem


def test_unreadable_files(write, tmp_path: Path) -> None:
    assert message("--job.config_file=no.toml") == "command line: cannot read no.toml: No such file or directory"
    file = write("a.toml", '\n[job]\nextends = "no.toml"\n')
    assert message(file) == "a.toml:3: cannot read no.toml: No such file or directory"
    assert "must be a regular file" in message("--job.config_file=.")


@pytest.mark.parametrize(
    ("text", "place", "fragment"),
    [
        ("[training]\nsteps = \n", "a.toml:2", "Invalid value"),
        ("[training]\nsteps = 1\nsteps = 2\n", "a.toml:3", "Cannot overwrite"),
        ('[job]\ndescription = """no end\n', "a.toml:2", "Unterminated"),
    ],
)
def test_malformed_toml(write, text: str, place: str, fragment: str) -> None:
    found = message(write("a.toml", text))
    assert found.startswith(f"{place}: malformed TOML: ")
    assert fragment in found


@pytest.mark.parametrize(
    ("text", "line", "shown"),
    [
        ("[training]\nsteps 10\n", 2, ["    steps 10", "          ^"]),
        ("steps = [1,\n", 1, ["    steps = [1,", "               ^"]),
        ("steps = [1,\n\n \n", 1, ["    steps = [1,", "               ^"]),
        ('\ufeff\nx = "é\\q"', 2, ['    x = "é\\q"', "            ^"]),
        (f"x = {'1' * 300} z\n", 1, [f"    {'1' * 99} z", f"    {' ' * 100}^"]),
        ("x = \x1b]0;1\n", 1, ["    x = \\x1b]0;1", "        ^"]),
    ],
)
def test_malformed_toml_shows_its_line_and_a_caret(write, text: str, line: int, shown: list[str]) -> None:
    file = write("a.toml", text)
    with pytest.raises(ConfigError) as caught:
        load_config([file])
    first, *rest = str(caught.value).splitlines()
    assert first.startswith(f"a.toml:{line}: malformed TOML: ")
    assert rest == shown


def test_a_name_cannot_forge_the_line_of_an_error(write) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([write("a\nerror: b.toml", "x = \n")])
    assert len(str(caught.value).splitlines()) == 3
    assert str(caught.value).startswith("a\\nerror: b.toml:1: malformed TOML: ")


def test_file_that_is_not_utf8(write, tmp_path: Path) -> None:
    file = write("a.toml", "")
    (tmp_path / "a.toml").write_bytes(b'[job]\ndescription = "\xff"\n')
    assert message(file) == "a.toml:2: not UTF-8: byte 0xff; save the file as UTF-8"


UNKNOWN = [
    ("[training]\nstepz = 1\n", "a.toml:2: training.stepz: unknown option; did you mean training.steps?"),
    ("[training]\n\n# c\nlr = 1\n", "a.toml:4: training.lr: unknown option; did you mean optimizer.lr?"),
    (
        "[checkpoint]\nfreq = 1\n",
        "a.toml:2: checkpoint.freq: unknown option; did you mean ema.freq or validation.freq or evaluation.freq?",
    ),
    (
        "[compile]\nzzz = 1\n",
        "a.toml:2: compile.zzz: unknown option; known: enable, components, backend, cuda_graph",
    ),
    ("[trainin]\nsteps = 1\nx = 2\n", "a.toml:2: [trainin]: unknown table; did you mean training?"),
    ("training.stepz = 1\n", "a.toml:1: training.stepz: unknown option; did you mean training.steps?"),
    ("seq_len = 1\n", "a.toml:1: seq_len: options must be in a table; did you mean training.seq_len?"),
    ('["training"]\n"stepz" = 1\n', "a.toml:2: training.stepz: unknown option; did you mean training.steps?"),
]


@pytest.mark.parametrize(("text", "expected"), UNKNOWN)
def test_unknown_keys(write, text: str, expected: str) -> None:
    assert message(write("a.toml", text)) == expected


def test_unknown_table_without_suggestion_lists_all_tables(write) -> None:
    found = message(write("a.toml", "[zzz]\n"))
    assert found.startswith("a.toml:1: [zzz]: unknown table; known: job, model, training")


WRONG_TYPES = [
    ('training.steps = "3"', "must be an integer"),
    ("training.steps = 3.0", "must be an integer"),
    ("training.steps = true", "must be an integer"),
    ("training.steps = {a = 1}", "must be an integer"),
    ("optimizer.lr = true", "must be a number"),
    ("debug.deterministic = 1", "must be true or false"),
    ("job.description = 3", "must be a string"),
    ("lr_scheduler.decay_ratio = false", "must be a number"),
    ('training.dtype = "float16"', 'must be "float32" | "bfloat16"'),
    ('compile.components = "model"', 'must be a list, each item "model" | "loss"'),
    ('compile.components = ["model", "optimizer"]', 'must be "model" | "loss"'),
    ("model.args = 3", "must be a table"),
    ("training = 3", "must be a table"),
]


@pytest.mark.parametrize(("line", "expected"), WRONG_TYPES)
def test_wrong_types(write, line: str, expected: str) -> None:
    found = message(write("a.toml", f"\n{line}\n"))
    assert found.startswith(f"a.toml:2: {line.split(' = ')[0]} = ")
    assert found.endswith(expected)


def test_overridden_invalid_value_is_not_an_error(write) -> None:
    file = write("a.toml", '[training]\nsteps = "many"\n')
    assert load_config([file, "--training.steps=3"]).training.steps == 3


def test_error_names_the_file_of_the_chain_that_set_the_value(write) -> None:
    write("base.toml", '[training]\nseq_len = "long"\n')
    file = write("a.toml", '[job]\nextends = "base.toml"\n[training]\nsteps = "many"\n')
    assert sorted(messages(file, "--optimizer.lr=fast")) == [
        'a.toml:4: training.steps = "many": must be an integer',
        'base.toml:2: training.seq_len = "long": must be an integer',
        'command line: optimizer.lr = "fast": must be a number',
    ]


def test_error_names_the_entry_of_an_array_of_tables(write) -> None:
    text = '[[data.sources]]\nname = "a"\n[[data.sources]]\nname = "b"\nweight = "x"\n\n[[data.stages]]\nseq_len = 8\n'
    assert messages(write("a.toml", text), "--data.skip_steps=[[1, 2], [3, 'x']]") == [
        'a.toml:5: data.sources.1.weight = "x": must be a number',
        "a.toml:7: data.stages.0: missing required key first_step",
        'command line: data.skip_steps = "x": must be an integer',
    ]
    nested = "[[data.stages]]\nfirst_step = 1\n[[data.stages]]\nfirst_step = 5\n[data.stages.weights]\na = 'x'\n"
    assert message(write("c.toml", nested)) == 'c.toml:6: data.stages.1.weights.a = "x": must be a number'
    inline = '[data]\n\nstages = [{first_step = 1}, {first_step = "b"}]\n'
    assert message(write("b.toml", inline)) == 'b.toml:3: data.stages.1.first_step = "b": must be an integer'


def test_long_error_lists_are_truncated(write) -> None:
    text = "[training]\n" + "".join(f"wrong{i} = {i}\n" for i in range(40))
    with pytest.raises(ConfigError) as caught:
        load_config([write("a.toml", text), "--training.steps=x"])
    assert len(caught.value.messages) == 41
    shown = str(caught.value).splitlines()
    assert shown[0] == "41 problems in the configuration:"
    assert shown[-1] == "  and 16 more"
    assert len(shown) <= 30


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["mine.toml"], 'command line: "mine.toml" is not an option; write --table.key=value; did you mean '),
        (["-x"], 'command line: "-x" is not an option; write --table.key=value'),
        (["--steps=3"], "command line: steps: options must be in a table; did you mean training.steps or validation"),
        (["--training.steps"], "command line, no value given: training.steps = true: must be an integer"),
        (["--training.steps=3\nx = 1"], 'command line: training.steps = "3\\nx = 1": must be an integer'),
        (["--training.step=3"], "command line: training.step: unknown option; did you mean training.steps?"),
        (["--job.extends=a.toml"], "command line: job.extends is only valid in a file; pass the file as --job"),
    ],
)
def test_invalid_arguments(argv: list[str], expected: str) -> None:
    assert message(*argv).startswith(expected)


def test_config_file_key_in_a_file(write) -> None:
    found = message(write("a.toml", '[job]\nconfig_file = "b.toml"\n'))
    assert found == "a.toml:2: job.config_file is only valid on the command line; use job.extends in a file"

"""to_toml round-trips; --help shows every option."""

import random
import re
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from torchtitan_clone.config import Config, ConfigError, changes_to_toml, help_text, load_config, run_folder, to_toml
from torchtitan_clone.config.checks import ranges_of
from torchtitan_clone.config.messages import describe, toml_like
from torchtitan_clone.config.reader import TABLES
from torchtitan_clone.config.render import option_docs

LETTERS = "aZ09 _-.=#'\"\\/\n\t\b\x1f\x7f[]{},äßЖ中🙂"


def random_value(annotation: Any, *, source: random.Random) -> Any:
    """Returns a random value of the annotated type."""
    if get_origin(annotation) is Literal:
        return source.choice(get_args(annotation))
    if get_origin(annotation) is list:
        return [random_value(get_args(annotation)[0], source=source) for _ in range(source.randrange(3))]
    if get_origin(annotation) is dict:
        wanted = get_args(annotation)[1]
        kinds = (int, float, str, bool, list[int], dict[str, object]) if wanted is object else (wanted,)
        return {f"k{index}": random_value(source.choice(kinds), source=source) for index in range(source.randrange(4))}
    if is_dataclass(annotation):
        hints = get_type_hints(annotation)
        return annotation(**{name: random_value(hint, source=source) for name, hint in hints.items()})
    if get_args(annotation):
        return random_value(get_args(annotation)[0], source=source)
    return {
        bool: lambda: source.random() < 0.5,
        int: lambda: source.choice((0, -1, source.randrange(10**12))),
        float: lambda: source.choice((0.0, 1e-8, 1e22, float("inf"), source.gauss(0, 1), source.gauss(0, 1e-9))),
        str: lambda: "".join(source.choices(LETTERS, k=source.randrange(12))),
    }[annotation]()


def written(value: Any) -> str:
    """Formats the value for the command line."""
    if is_dataclass(value) and not isinstance(value, type):
        return toml_like(asdict(value))
    items = value if isinstance(value, list) else []
    return toml_like([asdict(item) for item in items] if items and is_dataclass(items[0]) else value)


@pytest.mark.parametrize("seed", range(100))
def test_toml_round_trip_of_random_configurations(seed: int, tmp_path: Path) -> None:
    source = random.Random(seed)
    options = [(table, key) for table in TABLES for key in TABLES[table] if (table, key) not in NOT_SAVED]
    chosen = {
        option: random_value(TABLES[option[0]][option[1]], source=source)
        for option in source.sample(options, k=source.randrange(len(options)))
    }
    config = load_config([f"--{table}.{key}={written(value)}" for (table, key), value in chosen.items()])
    assert {option: getattr(getattr(config, option[0]), option[1]) for option in chosen} == chosen

    path = tmp_path / "config.toml"
    path.write_text(to_toml(config), newline="")
    again = load_config([f"--job.config_file={path}"])
    assert run_folder(again.job) == run_folder(config.job)
    assert replace(again, job=config.job) == config
    assert to_toml(again) == to_toml(config)


NOT_SAVED = {("job", "config_file"), ("job", "extends"), ("job", "dry_run"), ("job", "dry_run_all")}


def test_saved_configuration_keeps_the_run_name(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text("[training]\nsteps = 3\n")
    (tmp_path / "my_run.toml").write_text('[job]\nextends = "base.toml"\n')
    config = load_config([f"--job.config_file={tmp_path / 'my_run.toml'}", "--dry-run"])
    text = to_toml(config)
    assert 'run_name = "my_run"' in text
    assert "steps = 3" in text
    assert not any(f"{key} =" in text for _, key in NOT_SAVED)


def test_help_shows_type_default_and_docstring_of_every_option() -> None:
    text = " ".join(help_text().split())
    for table, section in vars(Config()).items():
        for key in TABLES[table]:
            if is_dataclass(getattr(section, key)):
                continue
            default = getattr(section, key)
            shown = "unset" if default is None else toml_like(default)
            documented = " ".join(option_docs()[table][key].split())
            limits = ranges_of(type(section)).get(key)
            kind = describe(TABLES[table][key]) + (f" {limits.describe()}" if limits else "")
            assert f"--{table}.{key} ({kind}; default {shown}) {documented}" in text
    assert '--training.dtype ("float32" | "bfloat16"; default "float32")' in text
    assert "--job.config_file=my_run.toml" in text
    assert max(map(len, help_text().splitlines())) <= 120


def test_help_shows_the_keys_of_nested_tables() -> None:
    text = " ".join(help_text().split())
    assert "--quantize.linear.float8.emulate (true or false; default false) Round to float8" in text
    assert "--quantize.linear (" not in text


def test_help_shows_the_keys_of_lists_of_tables() -> None:
    text = " ".join(help_text().split())
    assert "--optimizer.groups (a list, each item a table; default []) Options by parameter name" in text
    assert " pattern (a string; required) Pattern of parameter names" in text
    assert (
        " step (an integer from 1 to 1,000,000,000,000; required) First optimizer step at which this entry applies"
        in text
    )


def test_help_on_a_table_or_a_word() -> None:
    text = help_text(["validation"])
    assert "--validation.freq" in text
    assert "--training.steps" not in text
    found = re.findall(r"^  --([\w.]+)  ", help_text(["learning", "rate"]), re.MULTILINE)
    assert {"optimizer.lr", "lr_scheduler.min_lr_factor"} <= set(found)
    assert "optimizer.beta1" not in found
    # A word within one table; the keys of a list of tables belong to it.
    assert re.findall(r"^  --([\w.]+)  ", help_text(["optimizer", "pattern"]), re.MULTILINE) == ["optimizer.groups"]
    with pytest.raises(ConfigError, match=r'--help "evaluaton": no table .* did you mean evaluation\?'):
        help_text(["evaluaton"])


def test_changes_are_what_differs_from_the_defaults() -> None:
    config = load_config(["--training.steps=5", "--job.run_name=mine"])
    assert changes_to_toml(config) == (
        '[job]\nrun_name = "mine"\n\n[model]\nname = "llama3"\nflavor = "debugmodel"\n\n[training]\nsteps = 5\n'
    )

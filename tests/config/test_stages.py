"""The tables of a mixture: each entry that cannot be followed is one error with its value, the rule and a remedy."""

import pytest

from torchtitan_clone.config import ConfigError, load_config
from torchtitan_clone.config.checks import find_config_errors
from torchtitan_clone.config.stages import resolved_timeline

SOURCES = '{name = "web", path = "a", weight = 0.7}, {name = "code", path = "b", weight = 0.3}'
CODE = '{name = "code", path = "b"}'


def errors(*, sources=f"[{SOURCES}]", stages="[]", skip="[]", **more):
    """Returns the messages on these tables."""
    argv = [f"--data.sources={sources}", f"--data.stages={stages}", f"--data.skip_steps={skip}"]
    argv += [f"--{key.replace('__', '.')}={value}" for key, value in more.items()]
    return find_config_errors(load_config(argv), device_type="cpu")


BROKEN = [
    ({"sources": '[{name = "web", path = "a", weight = -0.5}]'}, 'name "web": weight = -0.5 must be from 0 to 1e+12'),
    ({"sources": '[{name = "web", path = "a", weight = nan}]'}, 'name "web": weight = nan must be'),
    ({"sources": '[{name = "web", path = "a", weight = 0}]'}, "the weight of every source is 0; set at least one"),
    (
        {"sources": '[{name = "web", path = "a", max_epochs = 1e-323}]'},
        "max_epochs = 1e-323 must be from 1e-06 to 1e+06",
    ),
    ({"sources": f"[{CODE}, {CODE}]"}, 'name "code": an earlier source has this name; choose another'),
    ({"sources": '[{name = "a/b", path = "a"}]'}, 'name "a/b": names a column of the metrics: printable characters'),
    ({"sources": '[{name = "web"}]'}, 'name "web": set either path, to files, or dataset'),
    ({"training__dataset_path": "x"}, "training.dataset_path: data.sources names the data; remove one of the two"),
    ({"stages": "[{first_step = 5, weights = {wob = 1.0}}]"}, 'weights: "wob" is no source; did you mean web?'),
    ({"stages": "[{first_step = 5, weights = {web = -1.0}}]"}, 'weights: "web" = -1.0: must be from 0 to 1e+12'),
    ({"stages": "[{first_step = 5, weights = {web = nan}}]"}, 'weights: "web" = nan: must be from 0 to 1e+12'),
    ({"stages": "[{first_step = 5, weights = {web = 0.0}}]"}, "first_step 5: weights: all are 0; set at least one"),
    (
        {"stages": "[{first_step = 5}, {first_step = 5}]"},
        "first_step 5: must be above 5; list the stages in increasing",
    ),
    (
        {"stages": "[{first_step = 5, seq_len = 3000}]"},
        "8 sequences of 2048 tokens are no whole number of sequences of",
    ),
    ({"stages": "[{first_step = 5, seq_len = 32768}]"}, "local_batch_size: 8 sequences of 2048 tokens are no whole"),
    ({"stages": "[{first_step = 5, seq_len = 0}]"}, "data.stages, first_step 5: seq_len = 0 must be from 1 to"),
    ({"skip": "[[5, 4]]"}, "data.skip_steps, [5, 4]: must be a range [first, last] of steps from 1 to"),
    ({"skip": "[[5, 9], [9, 12]]"}, "[9, 12]: must be a range [first, last] of steps from 10 to 1,000,000,000,000"),
    ({"skip": "[[5]]"}, "data.skip_steps, [5]: must be a range"),
    ({"skip": "[[0, 3]]"}, "data.skip_steps, [0, 3]: must be a range"),
]


@pytest.mark.parametrize(("tables", "message"), BROKEN)
def test_an_entry_that_cannot_be_followed_is_one_error(tables, message):
    found = errors(**tables)
    assert len(found) == 1
    assert message in found[0]


def test_tables_that_can_be_followed():
    assert errors(stages="[{first_step = 1, weights = {code = 1.0}}, {first_step = 9, seq_len = 1024}]") == []
    assert (
        errors(sources=f"[{CODE.replace('}', ', weight = 0}')}]", stages="[{first_step = 1, weights = {code = 2}}]")
        == []
    )
    assert errors(skip="[[1, 1], [2, 9]]") == []


def test_values_of_the_wrong_type_are_errors():
    with pytest.raises(ConfigError, match=r"weights\.web = .much.: must be a number"):
        load_config(["--data.stages=[{first_step = 5, weights = {web = 'much'}}]"])
    with pytest.raises(ConfigError, match="missing required key name"):
        load_config(["--data.sources=[{path = 'a'}]"])


def timeline(stages, *, rows=8, **training):
    """Returns the stages of a run."""
    argv = [f"--data.sources=[{SOURCES}]", f"--data.stages={stages}"]
    config = load_config([*argv, *(f"--training.{key}={value}" for key, value in training.items())])
    return resolved_timeline(config.data, training=config.training, global_batch_size=rows)


def test_a_stage_keeps_what_it_does_not_set_and_the_tokens_of_a_batch():
    found = timeline(
        "[{first_step = 5, seq_len = 64, rope_theta = 1e6}, {first_step = 7, weights = {code = 1}},"
        " {first_step = 9, global_batch_size = 16}, {first_step = 11, seq_len = 16}]",
        seq_len=32,
        local_batch_size=2,
    )
    stages = found.stages
    assert [stage.seq_len for stage in stages] == [32, 64, 64, 64, 16]
    assert [stage.global_batch_size for stage in stages] == [8, 4, 4, 16, 64]
    assert [stage.local_batch_size for stage in stages] == [2, 1, 1, 1, 4]
    assert [stage.first_sample for stage in stages] == [0, 32, 40, 48, 80]
    assert [stage.rope_theta for stage in stages] == [None, 1e6, 1e6, 1e6, 1e6]
    assert [list(stage.weights.values()) for stage in stages] == [[0.7, 0.3]] * 2 + [[0, 1]] * 3
    assert [found.phase_stage(batch=batch).first_batch for batch in (4, 5, 8, 9, 11)] == [1, 5, 5, 9, 11]
    replaced = timeline("[{first_step = 1, weights = {code = 1}}]").stages
    assert [stage.weights["web"] for stage in replaced] == [0]


def test_a_run_without_tables_has_no_stages():
    config = load_config([])
    assert resolved_timeline(config.data, training=config.training, global_batch_size=8) is None

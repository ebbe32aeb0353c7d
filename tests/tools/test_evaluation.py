"""Tests of evaluation.py, evaluation_tasks.py, scoring.py, samples.py: equal scores and samples on every mesh."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.data.test_tokenizer import MADE, stored
from tests.support.harness import run_ranks
from tests.support.runs import options, redirect_output, rows
from tests.support.trainers import open_trainers
from torchtitan_clone.config import ConfigError, load_config
from torchtitan_clone.config.messages import toml_like
from torchtitan_clone.config.schema import EvaluationTask
from torchtitan_clone.data import build_tokenizer
from torchtitan_clone.observe.logging import setup_logging
from torchtitan_clone.ops import IGNORE_INDEX
from torchtitan_clone.tools.evaluation_tasks import EXAMPLES as EXAMPLES_OF
from torchtitan_clone.tools.evaluation_tasks import Example, build_tasks, measure_choices, score_pairs
from torchtitan_clone.tools.samples import encode_prompts
from torchtitan_clone.tools.scoring import ScoredText, cut_text, pack_texts

MESHES = {
    "one rank": (1, {}),
    "shard": (2, {}),
    "tensor": (2, {"parallelism__tensor_parallel_degree": 2}),
    "pipeline": (2, {"parallelism__pipeline_parallel_degree": 2}),
    "context": (2, {"parallelism__context_parallel_degree": 2}),
}
KINDS = ("cloze", "copy", "recall", "brackets")
EXAMPLES = [
    {"query": "import", "choices": [" os", " sys as one", " (", " für"], "gold": 0},
    {"query": "def f(self", "choices": ["):", " \n"], "gold": 0},
    {"query": "return ", "choices": ["None", "class", "\u4e16\u754c"], "gold": 2, "comment": "more keys may follow"},
]


@pytest.fixture(scope="module")
def tasks(corpus, tmp_path_factory):
    """Returns evaluation.tasks for the command line, of every kind."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "choices.jsonl").write_text("\n".join(json.dumps(example) for example in EXAMPLES))
    text = str(next(corpus.glob("argparse.py"), corpus / "abc.py"))
    files = [
        {"name": "held out", "kind": "text", "path": str(corpus / "abc.py")},
        {"name": "choices", "kind": "multiple_choice", "path": str(folder / "choices.jsonl")},
    ]
    made = [{"name": kind, "kind": kind, "examples": 3, "length": 6} for kind in KINDS]
    made[0]["path"] = text
    return [*files, *made]


@pytest.fixture(scope="module")
def evaluated(corpus, tasks, tmp_path_factory):
    """Returns the rows of metrics.jsonl by mesh."""
    folder = tmp_path_factory.mktemp("runs")

    def argv(name):
        return options(
            corpus, folder / name, **MESHES[name][1], training__steps=2, training__seq_len=320, validation__enable=True,
            validation__freq=2, validation__steps=1, validation__local_batch_size=4, validation__sample_tokens=6,
            validation__prompts='["import", "def main(self"]', evaluation__enable=True, evaluation__freq=1,
            evaluation__tasks=toml_like(tasks), checkpoint__enable=False, metrics__enable_tensorboard=True,
        )  # fmt: skip

    for ranks in (1, 2):
        names = [name for name, (world_size, _) in MESHES.items() if world_size == ranks]
        run_ranks(train_logged, ranks, [argv(name) for name in names], [folder / f"{name}.log" for name in names])
    return {name: (rows(folder / name), (folder / f"{name}.log").read_text()) for name in MESHES}


def train_logged(runs, logs):
    """Trains runs one after another as one rank; rank 0 writes what it logs to a file for each."""
    rank = int(os.environ["RANK"])
    setup_logging(rank=rank, color=False)
    for trainer, log in zip(open_trainers(runs), logs, strict=True):
        redirect_output(log if rank == 0 else Path(os.devnull))
        assert trainer.train()


def scores_of(lines, step):
    found = [row for row in lines if row.get("event") == "evaluation" and row["step"] == step]
    return {name: value for row in found for name, value in row.items() if name.startswith("evaluation/")}


@pytest.mark.parametrize("mesh", MESHES)
def test_scores_are_those_of_one_rank(evaluated, tasks, mesh):
    lines, output = evaluated[mesh]
    names = {f"evaluation/held out/{metric}" for metric in ("bits_per_byte", "loss")}
    metrics = ("accuracy", "accuracy_per_char", "accuracy_per_byte", "gold_bits_per_byte")
    names |= {f"evaluation/{task['name']}/{metric}" for task in tasks[1:] for metric in metrics}
    for step in (1, 2):
        found = scores_of(lines, step)
        assert found.keys() == names
        assert found == pytest.approx(scores_of(evaluated["one rank"][0], step), rel=1e-5)
    assert scores_of(lines, 1) != scores_of(lines, 2)
    assert "step 1  evaluation  evaluation/choices/accuracy 0." in output


@pytest.mark.parametrize("mesh", MESHES)
def test_samples_are_those_of_one_rank(evaluated, mesh):
    lines, output = evaluated[mesh]
    found, expected = (
        [(row["step"], row["prompt"], row["text"]) for row in each if row.get("event") == "sample"]
        for each in (lines, evaluated["one rank"][0])
    )
    assert [row[:2] for row in found] == [(2, "import"), (2, "def main(self")]
    assert found == expected
    assert "step 2  sample  prompt import  text " in output


ERRORS = {
    "missing key": ('{"query": "a", "choices": ["b", "c"]}', "tasks.jsonl:2: missing key gold"),
    "gold": (
        '{"query": "a", "choices": ["b", "c"], "gold": 2}',
        "tasks.jsonl:2: gold = 2: must be an integer from 0 to 1",
    ),
    "one choice": ('{"query": "a", "choices": ["b"], "gold": 0}', "choices = a list: must have at least two items"),
    "empty choice": ('{"query": "a", "choices": ["b", ""], "gold": 0}', "tasks.jsonl:2: choices[1]"),
    "no query": ('{"query": " ", "choices": ["b", "c"], "gold": 0}', "tasks.jsonl:2: query"),
    "half a pair": (
        '{"query": "a", "choices": ["b", "\\ud800"], "gold": 0}',
        "tasks.jsonl:2: query and choices must be val",
    ),
    "not JSON": ("query: a", "tasks.jsonl:2: not valid JSON"),
    "long choice": (
        json.dumps({"query": "a", "choices": ["b", "long " * 200], "gold": 0}),
        "tasks.jsonl:2: a choice has",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_unusable_line_of_a_task_is_named(name, tmp_path):
    line, message = ERRORS[name]
    (tmp_path / "tasks.jsonl").write_text(f"{json.dumps(EXAMPLES[0])}\n{line}\n")
    with pytest.raises(ConfigError) as error:
        tasks_of({"name": "mine", "kind": "multiple_choice", "path": str(tmp_path / "tasks.jsonl")})
    assert message in str(error.value)
    assert str(error.value).startswith('evaluation.tasks, name "mine": ')


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"kind": "text"}, 'kind "text" needs a path'),
        ({"kind": "text", "path": "nowhere"}, 'path = "nowhere": no such file or folder'),
        ({"kind": "text", "path": ""}, 'path = "": an empty path is the current folder'),
        ({"kind": "multiple_choice", "path": ""}, 'path = "": an empty path is the current folder'),
        ({"kind": "multiple_choice", "path": "nowhere"}, "nowhere cannot be read: No such file"),
        ({"kind": "recall", "length": 100}, "example 1: a choice has"),
        ({"kind": "hellaswag"}, 'kind = "hellaswag": must be "text" | "multiple_choice"'),
    ],
    ids=["no path", "no text", "empty path", "empty path of a file", "no file", "long probe", "unknown kind"],
)
def test_a_task_that_cannot_be_evaluated_is_named(task, message):
    with pytest.raises(ConfigError) as error:
        tasks_of({"name": "mine", **task})
    assert message in str(error.value)


UNIFORM = math.log(100)
"""The loss of each token of a model that knows nothing, and has 100 tokens."""


@pytest.mark.parametrize("bos_id", [None, 1])
@pytest.mark.parametrize("name", MADE)
def test_bits_per_byte_are_those_of_the_bytes_of_the_text(tmp_path, name, bos_id):
    """Of its first token only where a token precedes it. No token has other bytes than the text has there."""
    tokenizer = replace(build_tokenizer(stored(tmp_path / "t", MADE[name]())), bos_id=bos_id)
    found = ["[owner] \u6f22\u5b57 of 7 euro, said the street", "costs", "owner of the house " * 30]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in found))
    (task,) = tasks_of({"name": "mine", "kind": "text", "path": str(tmp_path / "a.jsonl")}, tokenizer=tokenizer)
    encoded = tokenizer.encode_with_sizes(found)
    firsts = [] if bos_id is not None else [sizes[0] for _, sizes in encoded if len(sizes) > 1]
    missing = sum(len(text.encode()) for text, (ids, _) in zip(found, encoded, strict=True) if len(ids) < 2)
    size = len("".join(found).encode()) - sum(firsts) - missing
    tokens = sum(len(ids) - 1 for ids, _ in encoded)
    measured = task.measure([-UNIFORM * text.num_scored for text in task.texts])
    assert measured["bits_per_byte"] == pytest.approx(tokens * UNIFORM / (math.log(2) * size), rel=1e-12)
    assert measured["loss"] == pytest.approx(UNIFORM, rel=1e-12)


def test_a_text_is_cut_so_that_the_last_stretch_has_context():
    """As the rolling windows of lm-evaluation-harness."""
    found = [(list(text.tokens), text.first) for text in cut_text(range(12), seq_len=4)]
    assert found == [([0, 1, 2, 3, 4], 1), ([4, 5, 6, 7, 8], 1), ([7, 8, 9, 10, 11], 2)]
    assert [(list(text.tokens), text.first) for text in cut_text(range(4), seq_len=4)] == [([0, 1, 2, 3], 1)]
    assert cut_text([0], seq_len=4) == cut_text([], seq_len=4) == []
    for length in range(2, 40):
        for seq_len in (1, 3, 8):
            texts = cut_text(range(length), seq_len=seq_len)
            assert [token for text in texts for token in text.tokens[text.first :]] == list(range(1, length))
            assert all(text.size == min(seq_len, length - 1) for text in texts)


def test_rows_of_a_text_that_cannot_be_read_are_skipped_as_those_of_training(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "import os"}\nbroken\n')
    task = {"name": "mine", "kind": "text", "path": str(tmp_path / "a.jsonl"), "text_key": "body"}
    with pytest.raises(ConfigError, match=r'name "mine": data.max_bad_rows = 0: the data has 1 unreadable row'):
        tasks_of(task)
    (found,) = tasks_of(task, "--data.max_bad_rows=1")
    assert len(found.texts) == 1
    with pytest.raises(ConfigError, match=r"no key 'text' \(text_key\)"):
        tasks_of({**task, "text_key": "text"})


def tasks_of(task, *words, tokenizer=None):
    config = load_config(["--evaluation.enable", f"--evaluation.tasks={toml_like([task])}", *words])
    return build_tasks(config, tokenizer=tokenizer or build_tokenizer(None), seq_len=64)


def test_cloze_names_have_others_to_choose_from(tmp_path):
    """A single choice would always be right."""
    (tmp_path / "one.py").write_text(200 * "name = 1\n")
    task = {"name": "mine", "kind": "cloze", "path": str(tmp_path)}
    with pytest.raises(ConfigError, match="no held-out text has a name after 600 characters, and another name to choo"):
        tasks_of(task)
    (tmp_path / "two.py").write_text(200 * "name = other\n")
    options = EvaluationTask(**task, examples=50)
    assert {len(example.choices) for example in EXAMPLES_OF["cloze"](options, load_config([]))} == {2}


def test_prompts_that_are_not_valid_unicode_are_refused():
    with pytest.raises(ConfigError, match=r"validation.prompts: prompt 2 is not valid UTF-8; correct its bytes"):
        encode_prompts(["a", "\udcff"], tokenizer=build_tokenizer(None), seq_len=64, new_tokens=4)


def test_probes_have_one_right_choice():
    config = load_config([])
    for kind in ("copy", "recall", "brackets"):
        options = EvaluationTask(name=kind, kind=kind, examples=20, length=12, depth=1.0)
        found = list(EXAMPLES_OF[kind](options, config))
        assert found == list(EXAMPLES_OF[kind](options, config))
        assert len(found) == 20
        assert len({example.gold for example in found}) > 1
        for example in found:
            assert len(set(example.choices)) == 4
            right = example.choices[example.gold]
            if kind == "copy":
                assert example.query.count(right) == 1
                assert (example.query + right).count(right + "\n") == 1
            if kind == "recall":
                assert example.query.splitlines()[-2] == f"{example.query.splitlines()[-1]}{right}"


def test_texts_are_packed_into_rows_in_any_order_of_sizes():
    texts = [ScoredText(tokens=[*range(size + 1)], first=min(2, size)) for size in (5, 9, 3, 10, 1)]
    rows = pack_texts(texts, seq_len=10, multiple=4)
    assert len(rows.tokens_BT) == 4
    assert rows.documents_BT[0].tolist() == [0] * 5 + [1] * 3 + [2] + [3]
    assert rows.positions_BT[0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 0]
    is_target = rows.targets_BT[0] != IGNORE_INDEX
    assert is_target.tolist() == [0, 1, 1, 1, 1, 0, 1, 1, 1, 0]
    assert rows.groups_BT[0][is_target].tolist() == [0, 0, 0, 0, 2, 2, 4]
    assert rows.num_targets == sum(text.size + 1 - text.first for text in texts)


def test_accuracies_divide_by_the_length_of_choices():
    example = Example(query="", choices=["ab", "\u4e16\u754c"], gold=1, where="")
    found = measure_choices([example], [[-4.0, -5.0]])
    assert found["accuracy"] == found["accuracy_per_char"] == 0.0
    assert found["accuracy_per_byte"] == 1.0
    assert found["gold_bits_per_byte"] == pytest.approx(5.0 / math.log(2) / 6)


@pytest.mark.parametrize(("query", "space"), [("is", " "), ("is ", ""), ("is", "")])
def test_the_space_between_query_and_choice_has_no_length(query, space):
    """Where it is written must not matter: 4.5 / 2 and 8 / 4 of two choices, not 4.5 / 3 and 8 / 5."""
    example = Example(query=query, choices=[f"{space}ab", f"{space}abcd"], gold=1, where="")
    found = measure_choices([example], [[-4.5, -8.0]])
    assert (found["accuracy"], found["accuracy_per_char"], found["accuracy_per_byte"]) == (0.0, 1.0, 1.0)
    size = 4 + (space or query).count(" ")
    assert found["gold_bits_per_byte"] == pytest.approx(8.0 / math.log(2) / size)
    blank = Example(query=query, choices=[" ", "a"], gold=0, where="")
    assert measure_choices([blank], [[-1.0, -2.0]])["accuracy_per_char"] == 1.0


@pytest.mark.parametrize("bos_id", [None, 7])
@pytest.mark.parametrize("query", ["import", "import ", "import  \n"])
def test_exactly_the_tokens_after_the_query_are_scored(query, bos_id):
    """Spaces at its end belong to the choice, so that both are encoded as one text is."""
    tokenizer = replace(build_tokenizer(None), bos_id=bos_id)
    (text,) = score_pairs([(query, "os.path")], tokenizer=tokenizer)
    plain, start = build_tokenizer(None), [] if bos_id is None else [bos_id]
    assert text.tokens == start + plain.encode_batch([f"{query}os.path"])[0]
    assert plain.decode(text.tokens[len(start) : text.first]) == "import"
    assert plain.decode(text.tokens[text.first :]) == f"{query.removeprefix('import')}os.path"


def test_a_choice_that_merges_with_its_query_is_scored():
    """Nothing of a text of one token would be, and its likelihood would be 1."""
    tokenizer = build_tokenizer(None)
    assert len(tokenizer.encode_batch(["import"])[0]) == 1
    (text,) = score_pairs([("im", "port")], tokenizer=tokenizer)
    assert tokenizer.decode(text.tokens) == "import"
    assert tokenizer.decode(text.tokens[text.first :]) == "port"

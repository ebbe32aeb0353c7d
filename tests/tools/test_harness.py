"""Tests of harness.py and scripts/evaluate.py: scores of lm-evaluation-harness, here and through transformers."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.runs import options, train
from tests.tools.test_evaluation import EXAMPLES
from torchtitan_clone.commands import convert_to_hf
from torchtitan_clone.commands import evaluate as script
from torchtitan_clone.config import ConfigError
from torchtitan_clone.data.tokenizer import tokenizer_files
from torchtitan_clone.tools.evaluation_tasks import Example, choice_task
from torchtitan_clone.tools.scoring import Scores, pack_texts
from torchtitan_clone.tools.trained_model import open_trained_model

HAS_HARNESS = importlib.util.find_spec("lm_eval") is not None
needs_harness = pytest.mark.skipif(not HAS_HARNESS, reason='needs the extra "eval"')
TASK = """\
task: NAME
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{query}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{gold}}"
target_delimiter: "DELIMITER"
metric_list: [{metric: acc}, {metric: acc_norm}, {metric: acc_bytes}]
"""
METRICS = {"acc,none": "accuracy", "acc_norm,none": "accuracy_per_char", "acc_bytes,none": "accuracy_per_byte"}
KEYS = ("query", "choices", "gold")


@pytest.fixture(scope="module")
def trained_run(corpus, tmp_path_factory):
    """Returns the folder of a run on two tensor-parallel ranks."""
    folder = tmp_path_factory.mktemp("trained")
    argv = options(corpus, folder, training__steps=6, parallelism__tensor_parallel_degree=2)
    code, output = train(argv, world_size=2, log_folder=folder)
    assert code == 0, output
    return folder / "run"


@pytest.fixture(scope="module")
def examples(corpus):
    """Returns questions about real text by task: "mine", and "spaced" with a space between query and choice."""
    lines = [line for line in (corpus / "abc.py").read_text().splitlines() if len(line) > 20]
    queries = ["\n".join(lines[at : at + 3]) for at in range(1, 16)]
    choices = [[f"{lines[at + by]}" for by in (3, 7, -1)] for at in range(1, 16)]
    made = [
        {"query": q, "choices": [f"\n{x}" for x in each], "gold": 0} for q, each in zip(queries, choices, strict=True)
    ]
    cut = [  # in words of which some are one token
        {"query": " ".join(line.split()[:2]), "choices": [f" {word}" for word in line.split()[2:]], "gold": 0}
        for line in lines[:80]
        if len(line.split()) > 3
    ]
    found = {"mine": [EXAMPLES[1], *made], "spaced": [EXAMPLES[0], EXAMPLES[2], *cut]}
    return {name: [{key: each[key] for key in KEYS} for each in of_task] for name, of_task in found.items()}


def for_harness(example):
    """Returns a question without the space before each choice, which is the harness's delimiter."""
    choices = [choice.removeprefix(" ") for choice in example["choices"]]
    return {"query": example["query"].removesuffix(" "), "choices": choices, "gold": example["gold"]}


@pytest.fixture
def task_folder(examples, tmp_path, monkeypatch):
    for name in ("HF_HOME", "HF_DATASETS_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    for name, delimiter in (("mine", ""), ("spaced", " ")):
        file = tmp_path / f"{name}.jsonl"
        written = [for_harness(each) if delimiter else each for each in examples[name]]
        file.write_text("".join(json.dumps(example) + "\n" for example in written))
        task = TASK.replace("FILE", str(file)).replace("NAME", name).replace("DELIMITER", delimiter)
        (tmp_path / f"{name}.yaml").write_text(task)
    return tmp_path


@pytest.fixture(scope="module")
def export(trained_run, tmp_path_factory):
    """Returns the folder of the run's last step as transformers reads it."""
    folder = tmp_path_factory.mktemp("export") / "hub"
    convert_to_hf.convert(trained_run / "checkpoint" / "step-6", folder, dtype=torch.float32, hf_assets_path=None)
    return folder


def reference_model(export, *, tokenizer=None, max_length=8192):
    """Returns the harness's model of an export: transformers, with each text by itself, and the harness's windows."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    words = AutoTokenizer.from_pretrained(tokenizer or export)

    class Reference(TemplateLM):
        eot_token_id = words.eos_token_id
        prefix_token_id = words.eos_token_id if words.bos_token_id is None else words.bos_token_id

        def tok_encode(self, string, add_special_tokens=None, **_):
            return words.encode(string, add_special_tokens=add_special_tokens is not False)

        def _loglikelihood_tokens(self, requests, **_):
            return [self._score(context, continuation) for _, context, continuation in requests]

        @torch.no_grad()
        def _score(self, context, continuation):
            ids = torch.tensor([*context, *continuation][-max_length - 1 :])
            targets = ids[-len(continuation) :, None]
            logits = model(ids[None, :-1]).logits[0].log_softmax(dim=-1)[-len(continuation) :]
            return logits.gather(1, targets).sum().item(), bool((logits.argmax(dim=-1) == targets[:, 0]).all())

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            found = []
            for (string,) in (request.args for request in requests):
                ids = self.tok_encode(string, add_special_tokens=False)
                windows = get_rolling_token_windows(ids, self.prefix_token_id, max_length, 1)
                found.append(sum(self._score(*make_disjoint_window(window))[0] for window in windows))
            return found

        def generate_until(self, requests, disable_tqdm=False):
            raise NotImplementedError

    return Reference()


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_a_missing_gpu_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="device cuda: torch finds no GPU on this machine; give --device=cpu"):
        open_trained_model(tmp_path, dtype=torch.float32, device=torch.device("cuda"))


def own_scores(folder, examples):
    """Returns the metrics of the multiple-choice task, and the log-likelihoods."""
    trained = open_trained_model(folder, dtype=torch.float32, device=torch.device("cpu"))
    questions = [Example(**example, where="") for example in examples]
    task = choice_task("mine", questions, tokenizer=trained.tokenizer, seq_len=512)
    scores = Scores(len(task.texts), device=trained.device)
    with torch.no_grad():
        rows = pack_texts(task.texts, seq_len=512)
        trained.model(
            rows.tokens_BT, positions_BT=rows.positions_BT, documents_BT=rows.documents_BT, targets_BT=rows.targets_BT,
            groups_BT=rows.groups_BT, loss_fn=scores,
        )  # fmt: skip
    return task.measure(scores.nats.tolist()), scores


@pytest.mark.parametrize("name", ["mine", "spaced"])
def test_log_likelihoods_are_those_of_transformers(trained_run, examples, export, name):
    """Packed into rows as documents, as each text alone; and whether all tokens are the most likely ones."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, scores = own_scores(trained_run, examples[name])
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(export)
    pairs = [(example["query"], choice) for example in examples[name] for choice in example["choices"]]
    for number, (query, choice) in enumerate(pairs):
        ids = torch.tensor(tokenizer(query + choice).input_ids)
        first = len(tokenizer(query.rstrip()).input_ids)
        with torch.no_grad():
            log_probs = model(ids[None, :-1]).logits[0].log_softmax(dim=-1)[first - 1 :]
        targets = ids[first:, None]
        assert scores.nats[number].item() == pytest.approx(log_probs.gather(1, targets).sum().item(), rel=1e-5)
        assert scores.misses[number] == (log_probs.argmax(dim=-1) != targets[:, 0]).sum()


@needs_harness
def test_the_harness_gives_the_same_scores_through_transformers(trained_run, examples, export, task_folder, capsys):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    results = task_folder / "results.json"
    words = ["--tasks=mine,spaced", f"--include_path={task_folder}", f"--json={results}"]
    assert script.main([str(trained_run), *words]) == 0
    assert "mine  acc,none " in capsys.readouterr().out
    judges = [{"model": reference_model(export)}]
    if importlib.util.find_spec("accelerate") is not None:  # lm_eval needs it for transformers
        judges.append({"model": "hf", "model_args": {"pretrained": str(export), "dtype": "float32"}, "device": "cpu"})
    manager = TaskManager(include_path=str(task_folder), include_defaults=False)
    theirs = [simple_evaluate(**judge, tasks=["mine", "spaced"], task_manager=manager) for judge in judges]
    for name in ("mine", "spaced"):
        found = json.loads(results.read_text())[name]
        expected, scores = own_scores(trained_run, examples[name])
        own = {metric: found[metric] for metric in METRICS}
        assert own == {metric: expected[ours] for metric, ours in METRICS.items()}
        for their in theirs:
            assert {metric: their["results"][name][metric] for metric in METRICS} == own
            samples = sorted(their["samples"][name], key=lambda sample: sample["doc_id"])
            given = [nats for sample in samples for ((nats, _),) in sample["resps"]]
            assert given == pytest.approx(scores.nats.tolist(), rel=1e-4)


@needs_harness
@pytest.mark.parametrize("bos_id", [None, 0])
def test_perplexities_of_long_texts_are_those_of_the_harness(trained_run, export, tmp_path, bos_id):
    """The last window has as much context as fits, and the first what precedes a text."""
    from lm_eval.api.instance import Instance

    from torchtitan_clone.tools.harness import HarnessModel

    trained = open_trained_model(trained_run, dtype=torch.float32, device=torch.device("cpu"))
    if bos_id is not None:
        tokenizer = replace(trained.tokenizer, bos_id=bos_id, prefix_id=bos_id, is_as_stored=False)
        trained = replace(trained, tokenizer=tokenizer)
    for name, content in tokenizer_files(trained.tokenizer).items():
        (tmp_path / name).write_bytes(content)
    text = Path(__file__).read_text()
    texts = [text[:length] for length in (1, 30, 150, 500, 900)]
    for length in (20, 64):
        ours = HarnessModel(trained, seq_len=length)
        theirs = reference_model(export, tokenizer=tmp_path, max_length=length)
        rolling, pairs = (
            [Instance(request_type=kind, doc={}, arguments=arguments, idx=0) for arguments in given]
            for kind, given in (
                ("loglikelihood_rolling", [(each,) for each in texts]),
                ("loglikelihood", [("", texts[1]), ("import os", "\nimport sys"), (texts[-1], "def")]),
            )
        )
        found, expected = (each.loglikelihood_rolling(rolling) for each in (ours, theirs))
        assert found == pytest.approx(expected, rel=1e-5)
        found, expected = ([nats for nats, _ in each.loglikelihood(pairs)] for each in (ours, theirs))
        assert found == pytest.approx(expected, rel=1e-5)


@needs_harness
def test_generation_for_the_harness(trained_run):
    from lm_eval.api.instance import Instance

    from torchtitan_clone.tools.harness import HarnessModel

    trained = open_trained_model(trained_run, dtype=torch.float32, device=torch.device("cpu"))
    text = Path(__file__).read_text()[:600]
    model = HarnessModel(trained)

    def requests(kind, *arguments):
        return [Instance(request_type=kind, doc={}, arguments=arguments, idx=0)]

    before = model.loglikelihood_rolling(requests("loglikelihood_rolling", text))
    (long,) = model.generate_until(requests("generate_until", text, {"until": [], "max_gen_toks": 12}))
    (short,) = model.generate_until(requests("generate_until", text, {"until": [long[3:5]], "max_gen_toks": 12}))
    assert short == long[: long.index(long[3:5])]
    assert model.generate_until(requests("generate_until", text, {"until": long[3:5], "max_gen_toks": 12})) == [short]
    # As many tokens as the model has positions leave one for the prompt.
    everything = {"until": [], "max_gen_toks": trained.args.max_seq_len}
    assert model.generate_until(requests("generate_until", "a b c", everything))[0]
    # The model is unchanged by generating.
    assert model.loglikelihood_rolling(requests("loglikelihood_rolling", text)) == before


def test_a_missing_folder_of_results_is_an_error_before_evaluating(tmp_path, capsys):
    file = tmp_path / "missing" / "results.json"
    assert script.main([str(tmp_path / "run"), "--tasks=mine", f"--json={file}"]) == 2
    problem = f"error: --json={file}: there is no folder {file.parent}; create it first\n"
    assert capsys.readouterr() == ("", problem)


@needs_harness
def test_results_that_cannot_be_written_are_printed(trained_run, task_folder, capsys):
    words = ["--tasks=mine", f"--include_path={task_folder}", "--json=/dev/full"]
    assert script.main([str(trained_run), *words]) == 2
    assert "mine  acc,none " in capsys.readouterr().out


def test_one_line_says_what_is_wrong(trained_run, tmp_path, capsys):
    assert script.main([str(trained_run), "--tasks=nothing", f"--include_path={tmp_path}"]) == 2
    message = "no such task: nothing" if HAS_HARNESS else "the package lm_eval is not installed"
    assert message in capsys.readouterr().err.splitlines()[-1]

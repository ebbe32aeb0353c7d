"""Tests of harness.py and scripts/evaluate.py: scores of lm-evaluation-harness, here and through transformers."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from scripts import convert_to_hf
from scripts import evaluate as script
from tests.run.test_evaluation import EXAMPLES
from torchtitan_clone.config import ConfigError
from torchtitan_clone.run.evaluation_tasks import Example, choice_task
from torchtitan_clone.run.scoring import Scores, pack_texts
from torchtitan_clone.run.trained_model import open_trained_model
from torchtitan_clone.testing.runs import options, train

HAS_HARNESS = importlib.util.find_spec("lm_eval") is not None
needs_harness = pytest.mark.skipif(not HAS_HARNESS, reason='needs the extra "eval"')
TASK = """\
task: mine
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{query}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{gold}}"
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
METRICS = {"acc,none": "accuracy", "acc_norm,none": "accuracy_per_char"}


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
    """Returns questions about real text: which of three lines follows."""
    lines = [line for line in (corpus / "abc.py").read_text().splitlines() if len(line) > 20][:24]
    made = [
        {"query": "\n".join(lines[at : at + 3]), "choices": [f"\n{lines[at + by]}" for by in (3, 7, -1)], "gold": 0}
        for at in range(1, 16)
    ]
    return [{key: example[key] for key in ("query", "choices", "gold")} for example in [*EXAMPLES, *made]]


@pytest.fixture
def task_folder(examples, tmp_path, monkeypatch):
    for name in ("HF_HOME", "HF_DATASETS_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    file = tmp_path / "choices.jsonl"
    file.write_text("".join(json.dumps(example) + "\n" for example in examples))
    (tmp_path / "mine.yaml").write_text(TASK.replace("FILE", str(file)))
    return tmp_path


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
            loss_fn=scores,
        )  # fmt: skip
    return task.measure(scores.nats.tolist()), scores, task


def test_log_likelihoods_are_those_of_transformers(trained_run, examples, tmp_path):
    """Packed into rows as documents, as each text alone; and whether all tokens are the most likely ones."""
    from transformers import AutoModelForCausalLM

    _, scores, task = own_scores(trained_run, examples)
    step = trained_run / "checkpoint" / "step-6"
    convert_to_hf.convert(step, tmp_path / "hub", dtype=torch.float32, hf_assets_path=None)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hub", dtype=torch.float32)
    for number, text in enumerate(task.texts):
        ids = torch.tensor(text.tokens)
        with torch.no_grad():
            log_probs = model(ids[None, :-1]).logits[0].log_softmax(dim=-1)[text.first - 1 :]
        targets = ids[text.first :, None]
        assert scores.nats[number].item() == pytest.approx(log_probs.gather(1, targets).sum().item(), rel=1e-5)
        assert scores.misses[number] == (log_probs.argmax(dim=-1) != targets[:, 0]).sum()


@needs_harness
def test_the_harness_gives_the_same_scores_through_transformers(trained_run, examples, task_folder, capsys):
    results = task_folder / "results.json"
    words = ["--tasks=mine", f"--include_path={task_folder}", f"--json={results}"]
    assert script.main([str(trained_run), *words]) == 0
    assert "mine  acc,none " in capsys.readouterr().out
    found = json.loads(results.read_text())["mine"]
    expected, _, _ = own_scores(trained_run, examples)
    assert {metric: found[metric] for metric in METRICS} == {theirs: expected[ours] for theirs, ours in METRICS.items()}
    pytest.importorskip("accelerate", reason="lm_eval needs accelerate for transformers")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    step, export = trained_run / "checkpoint" / "step-6", task_folder / "hub"
    convert_to_hf.convert(step, export, dtype=torch.float32, hf_assets_path=None)
    theirs = simple_evaluate(
        model="hf", model_args={"pretrained": str(export), "dtype": "float32"}, tasks=["mine"], device="cpu",
        task_manager=TaskManager(include_path=str(task_folder), include_defaults=False),
    )  # fmt: skip
    assert {metric: theirs["results"]["mine"][metric] for metric in METRICS} == {key: found[key] for key in METRICS}


@needs_harness
def test_rolling_log_likelihoods_and_generation(trained_run):
    from lm_eval.api.instance import Instance

    from torchtitan_clone.run.harness import HarnessModel

    trained = open_trained_model(trained_run, dtype=torch.float32, device=torch.device("cpu"))
    text = Path(__file__).read_text()[:600]
    whole, cut = (HarnessModel(trained, seq_len=seq_len) for seq_len in (None, 50))

    def requests(kind, *arguments):
        return [Instance(request_type=kind, doc={}, arguments=arguments, idx=0)]

    (rolling,) = whole.loglikelihood_rolling(requests("loglikelihood_rolling", text))
    ((direct, _),) = whole.loglikelihood(requests("loglikelihood", "", text))
    assert rolling == pytest.approx(direct, rel=1e-5)
    assert cut.loglikelihood_rolling(requests("loglikelihood_rolling", text)) != [rolling]
    (long,) = whole.generate_until(requests("generate_until", text, {"until": [], "max_gen_toks": 12}))
    (short,) = whole.generate_until(requests("generate_until", text, {"until": [long[3:5]], "max_gen_toks": 12}))
    assert short == long[: long.index(long[3:5])]
    assert whole.generate_until(requests("generate_until", text, {"until": long[3:5], "max_gen_toks": 12})) == [short]
    # As many tokens as the model has positions leave one for the prompt.
    everything = {"until": [], "max_gen_toks": trained.args.max_seq_len}
    assert whole.generate_until(requests("generate_until", "a b c", everything))[0]
    # The model is unchanged by generating.
    assert whole.loglikelihood_rolling(requests("loglikelihood_rolling", text)) == [rolling]


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
    message = "--tasks: no such task: nothing" if HAS_HARNESS else "the package lm_eval is not installed"
    assert message in capsys.readouterr().err.splitlines()[-1]

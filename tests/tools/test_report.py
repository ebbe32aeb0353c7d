"""The report of a run: report.py, report_data.py, report_charts.py, report_server.py, and its script."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from torchtitan_clone.config import Config, ConfigError, to_toml
from torchtitan_clone.tools.report import build_report, unique_names
from torchtitan_clone.tools.report_charts import all_charts, kept_indices
from torchtitan_clone.tools.report_data import MAX_COLUMNS, read_run
from torchtitan_clone.tools.report_server import ReportServer

REPOSITORY = Path(__file__).parents[2]
HOSTILE = "</script><script>document.title='hacked'</script><img src=x onerror=\"document.title='hacked'\">"
TITLES = [
    "Loss", "Gradient norm before clipping", "Loss by source", "Bits per byte by source", "Learning rate", "Throughput",
    "Computation", "Model FLOPs utilization", "Wait for data", "Peak memory of rank 0",
    "Share of trained tokens by source", "Epochs by source", "Balance of experts", "Auxiliary losses", "Evaluations",
    "Distribution of step times", "Goodput over all starts: 90.0 %", "Starts, deaths, saves and recoveries",
    "Cost of checkpoints", "Step 20 by rank, each collective waited for",
    "Computation of each rank in measured steps, in seconds", "Pipeline schedule: 1F1B: bubble 20 %",
    "Collectives of a step by layer and axis, 1 ranks traced", "Tokens of each expert over the mean",
]  # fmt: skip


def step_row(step: int, **changes: object) -> dict:
    columns = {
        "loss": 8 - step / 100, "grad_norm": 1 + step % 3, "clipped": step % 3 == 0, "lr": 1e-3,
        "tokens_seen": 64 * step, "step_seconds": 0.5, "data_seconds": 0.01, "memory_gib": 1.5,
        "skipped_steps": step // 15, "tokens_per_second": 128.0, "tflops_per_second": 0.1, "mfu_percent": 40.0,
        "router/dead_experts": 0.0, "auxiliary/router_z": 0.1, "tokens/web": 40 * step, "tokens/code": 24 * step, 
        "epochs/web": step / 50, "loss/web": 7.0, "bits_per_byte/web": 2.0,
    }  # fmt: skip
    return {"step": step, **columns, **changes, "time": 1_000.0 + step}


def write_lines(file: Path, *rows: dict) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns the folder of a run that has everything, of which a process died, with hostile names and lines."""
    folder = tmp_path_factory.mktemp("runs") / "full"
    save = {"event": "checkpoint saved", "seconds": 3.0, "blocked_seconds": 0.5, "staging_seconds": 0.2, "bytes": 2**20}
    goodput = {
        "event": "goodput",
        "complete": False,
        "goodput_percent": 90.0,
        "progress_seconds": 9,
        "saving_seconds": 1,
    }
    evaluation = {"step": 20, "event": "evaluation", "evaluation/cloze/accuracy": 0.5, "time": 1_020.5}
    sample = {"step": 20, "event": "sample", "prompt": "def", "text": HOSTILE, "time": 1_020.6}
    validation = {"step": 10, "validation_loss": 7.5, f"validation_loss/{HOSTILE}": 7.5, "time": 1_010.5}
    rows = [step_row(step) for step in range(1, 31)] + [
        {"step": 10, **save, "time": 1_010.0},
        validation,
        evaluation,
        sample,
    ]
    recovery = {"step": 12, "event": "recovered from another replica group", "seconds": 1.0, "time": 1_012.0}
    write_lines(folder / "metrics.jsonl", *rows, recovery, {"step": 30, **goodput, "time": 1_030.0})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(f'{HOSTILE}\n{{"step": 31, "loss": NaN, "time": 1.0}}\n{{"step": -1, "loss": 1.0, "time": 1.0}}\n')
        file.write(json.dumps({"step": 30, "loss": 10**400, "huge": 1e300, "time": 1_030.0}) + '\n{"step": 31, "lo')
    first = {"time": 999.0, "after_step": 0, "was_complete": False, "processor": HOSTILE}
    write_lines(folder / "starts.jsonl", first, {**first, "time": 1_014.0, "last_step": 13, "last_time": 1_013.0})
    seconds = {"data": [0.1, 0.1], "communication": [0.2, None], "total": [0.5, 0.5], "link": [0.1, 0.1]}
    write_lines(folder / "step_breakdowns.jsonl", {"step": 10, "time": 1_010.0, **seconds})
    timeline = {"step": 20, "hosts": ["a", "b"], **seconds, "spans": [[["fsdp all_gather", 0.1, 0.05]], []]}
    write_lines(folder / "timeline.json", timeline)
    write_lines(folder / "expert_load.json", {"step": 30, "loads": {"layers.0": [3, 1], "layers.1": [1, 2, 3]}})
    actions = [[0, "F", 0, 0, 0, 1], [1, "F", 1, 0, 1, 2], [1, "B", 1, 0, 2, 4], [0, "B", 0, 0, 4, 6]]
    write_lines(folder / "pipeline.json", {"summary": "1F1B: bubble 20 %", "actions": actions})
    call = {"axis": "fsdp", "collective": "all_gather", "layer": HOSTILE, "implicit": False, "count": 2, "bytes": 2**20}
    (folder / "collectives.rank0.json").write_text(json.dumps([{**call, "exposed": None}]))
    (folder / "collectives.rank1.json").write_text('[{"axis": 3}]')
    sources = 'sources = [{ name = "web", weight = 3.0 }, { name = "code" }]'
    (folder / "config.toml").write_text(to_toml(Config()).replace("sources = []", sources).replace("10000", "30"))
    return folder


@pytest.fixture(scope="module")
def page(folder):
    return build_report([folder])


class Tags(HTMLParser):
    """Collects the names of all elements, with their attributes, and the text outside of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data) -> None:
        self.text += data if self.tags and self.tags[-1][0] not in ("script", "style") else ""


def test_every_chart_has_data(folder):
    charts = [chart for chart in all_charts([read_run(folder, name="full")], points=100) if chart.traces]
    assert [chart.title for chart in charts] == TITLES
    for chart in charts:
        for trace in chart.traces:
            sizes = {len(trace[key]) for key in ("x", "y", "base") if key in trace} | {
                len(x) for x in trace.get("xs", {}).values()
            }
            assert 0 not in sizes, (chart.title, trace["name"])
            assert len(sizes) == 1 or trace["type"] == "heatmap", (chart.title, trace["name"])


def test_marks_and_shares_are_those_of_the_rows(folder):
    charts = {chart.title: chart for chart in all_charts([read_run(folder, name="full")], points=100)}
    traces = {trace["name"]: trace for chart in charts.values() for trace in chart.traces if "name" in trace}
    assert traces["clipped (10 rows)"]["xs"]["steps"] == list(range(3, 31, 3))
    assert traces["skipped (2 rows)"]["xs"]["steps"] == [15, 30]
    assert traces["share/web"]["y"][-1] == 62.5
    assert traces["target/web"]["y"] == [75, 75]
    assert traces["validation"]["xs"]["tokens"] == [640]
    assert (traces["end or death"]["x"], traces["end or death"]["y"]) == ([round(14 / 3600, 6)], [13])
    assert traces["evaluation/cloze/accuracy"]["y"] == [0.5]
    assert traces["forward"]["y"] == ["rank 0", "rank 1"]
    (heat,) = charts["Computation of each rank in measured steps, in seconds"].traces
    assert heat["z"] == [[pytest.approx(0.2)], [pytest.approx(0.4)]]


def test_lines_that_are_no_rows_are_skipped_and_counted(folder, page):
    # The text, NaN, the negative step, the incomplete line, two values that are too large, and a file of collectives.
    assert read_run(folder, name="full").num_skipped == 7
    assert "37 rows of metrics read, 7 incomplete or malformed lines and values skipped" in page


def test_text_of_files_cannot_become_elements(page):
    found = Tags(page)
    assert f"full20promptdeffull20text{HOSTILE}" in found.text
    assert [tag for tag, _ in found.tags].count("script") == 2
    assert "\\u003cbr>stage 0" in page  # "<" of the data is an escape
    assert not [tag for tag, attributes in found.tags if tag in ("img", "iframe", "link") or "src" in attributes]
    assert found.text.count(HOSTILE) == 4  # the sample, the layer, and the processor of both starts


def test_size_and_extremes_of_many_rows(tmp_path):
    losses = np.random.default_rng(0).normal(5, 0.1, 20_000)
    losses[[7_001, 12_345]] = 9, 1
    rows = ({"step": step, "loss": loss, "time": float(step)} for step, loss in enumerate(losses.tolist()))
    folder = write_lines(tmp_path / "run" / "metrics.jsonl", *rows)
    kept = kept_indices(losses, points=1_000)
    assert len(kept) <= 1_002
    assert {7_001, 12_345, 0, 19_999} <= set(kept)
    page = build_report([folder])
    assert len(page) < 6e6
    assert "shows the least and the greatest value of 500 equal parts" in page


def test_columns_beyond_the_limit_are_skipped(tmp_path):
    values = {f"evaluation/{index}": 1.0 for index in range(2 * MAX_COLUMNS)}
    rows = [{"step": step, **values, "time": 1.0} for step in range(3)]
    run = read_run(write_lines(tmp_path / "metrics.jsonl", *rows), name="run")
    assert (len(run.columns), run.num_skipped) == (MAX_COLUMNS, 3 * MAX_COLUMNS)


def test_a_row_of_many_names_is_read(tmp_path):
    """In a time that grew with the square of their number, 9 minutes, it would not end within the limit of a test."""
    row = {"step": 1, "time": 5.0, "loss": 1.0, **{f"metric {index}": 1.0 for index in range(60_000)}}
    folder = write_lines(tmp_path / "metrics.jsonl", row, row | {"event": "recovered"})
    assert len(read_run(folder, name="run").columns) == MAX_COLUMNS


def test_a_folder_with_extreme_numbers_and_halves_of_characters_has_a_page(tmp_path):
    sources = [f'{{ name = "{name}", weight = {weight} }}' for name, weight in (("a", "inf"), ("b", "1" + 400 * "0"))]
    rows = [
        {"step": step, "tokens/a": 1, "tokens/b": 2, "step_seconds": np.nextafter(0.5, step), "time": float(step)}
        for step in range(100)
    ]
    rows.append({"step": 100, "event": "sample", "text": "\ud800 of a pair", "time": 100.0})
    folder = write_lines(tmp_path / os.fsdecode(b"run \xff") / "metrics.jsonl", *rows)
    (folder / "config.toml").write_text(f"[data]\nsources = [{', '.join(sources)}]\n")
    page = build_report([folder]).encode().decode()
    assert "? of a pair" in page
    assert "<h1>run ?</h1>" in page


def test_runs_are_compared_and_what_one_lacks_is_left_out(folder, tmp_path):
    other = write_lines(tmp_path / "other" / "metrics.jsonl", {"step": 1, "loss": 1.0, "time": 5.0})
    (other / "config.toml").write_text("[optimizer]\nlr = 0.5\n")
    text = Tags(build_report([folder, other])).text
    assert "optimizer.lr0.00080.00080.5differs" in text
    alone = Tags(build_report([other]))
    assert [attributes["id"] for tag, attributes in alone.tags if tag == "figure"] == ["chart0", "chart1"]
    assert "Samples" in text
    assert "Samples" not in alone.text


def test_replica_groups_are_runs(folder, tmp_path):
    for index in range(2):
        shutil.copytree(folder, tmp_path / "run" / f"replica-{index}")
    assert "<h1>run/replica-0, run/replica-1</h1>" in build_report([tmp_path / "run"])


def test_errors(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    for wrong, fragment in (
        (tmp_path, "has no metrics.jsonl"),
        (file, "is not a folder"),
        (tmp_path / "x", "not a fol"),
    ):
        with pytest.raises(ConfigError, match=f"{fragment}.*give the folder of a run"):
            build_report([wrong])
    write_lines(tmp_path / "metrics.jsonl", {"step": 1}, {"no": "row"})
    with pytest.raises(ConfigError, match=r"no rows with numbers \(2 lines are not rows\)"):
        build_report([tmp_path])
    shutil.move(tmp_path / "metrics.jsonl", tmp_path / "moved")
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "moved")
    with pytest.raises(ConfigError, match="must be a regular file, not a link"):
        build_report([tmp_path])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'plotly is not installed; pip install "plotly>=6,<8"'):
        build_report([tmp_path])


def get(port: int, *, host: str = "127.0.0.1") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/", headers={"Host": f"{host}:{port}"})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_connections_that_send_nothing_block_no_other(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", {"step": 1, "loss": 1.0, "time": 5.0})
    with ReportServer([tmp_path], port=0) as server, socket.create_connection(("127.0.0.1", server.server_port)):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert get(server.server_port)[0] == 200
        server.shutdown()


def test_server_rebuilds_the_page_when_rows_were_added(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", {"step": 1, "loss": 1.0, "time": 5.0})
    with ReportServer([tmp_path], port=0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        status, first = get(server.server_port)
        assert status == 200
        assert get(server.server_port)[1] == first
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 2, "loss": 1.0, "time": 5.0}\n')
        assert ">2 rows of metrics read" in get(server.server_port)[1]
        assert get(server.server_port, host="evil.example") == (404, "")
        (tmp_path / "metrics.jsonl").unlink()
        assert "has no metrics.jsonl" in get(server.server_port)[1]
        server.shutdown()


def test_the_script(folder, tmp_path, python):
    script = [python, REPOSITORY / "scripts" / "report.py"]
    run = shutil.copytree(folder, tmp_path / "run")
    done = subprocess.run([*script, run], capture_output=True, text=True, check=True)
    assert re.fullmatch(rf"{run}/report.html: \d\.\d\d MiB\n", done.stdout)
    done = subprocess.run([*script, tmp_path], capture_output=True, text=True, check=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "has no metrics.jsonl" in done.stderr
    done = subprocess.run([*script, run, "--serve", "--port=99999"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.endswith("error: --port=99999: must be from 0 to 65535\n")) == (2, True)
    served = subprocess.Popen([*script, run, "--serve", "--port=0"], stdout=subprocess.PIPE, text=True)
    port = int(re.findall(r"http://127.0.0.1:(\d+)/", served.stdout.readline())[0])
    assert get(port)[0] == 200
    served.send_signal(signal.SIGINT)
    assert served.wait(60) == 0


PROBE = """
<script nonce="$nonce">
const found = [];
const probe = () => {
  const figures = [...document.querySelectorAll("figure")];
  const empty = figures.filter((figure) => !figure.querySelector(".trace, .bars .point, .hm image"));
  document.body.dataset.empty = empty.map((figure) => figure.id).join(" ") || "none";
  const requests = performance.getEntriesByType("resource");
  document.body.dataset.requests = requests.map((entry) => entry.name).join(" ") || "none";
  document.body.dataset.errors = found.join(" | ") || "none";
};
addEventListener("error", (event) => found.push(event.message));
addEventListener("securitypolicyviolation", (event) => found.push("blocked " + event.blockedURI));
console.error = console.warn = (...words) => found.push(words.join(" "));
addEventListener("load", () => setTimeout(probe, 1000));
</script>
"""


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Debian's package chromium")
def test_a_browser_without_network_draws_every_chart(page, tmp_path):
    nonce = re.findall(r"script-src 'nonce-([^']+)'", page)[0]
    file = tmp_path / "report.html"
    file.write_text(page.replace("<body>", f"<body>{PROBE.replace('$nonce', nonce)}", 1))
    words = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
    ]
    words += ["--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=20000", "--enable-logging=stderr"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    done = subprocess.run(
        ["chromium", *words, profile, "--dump-dom", f"file://{file}"], capture_output=True, text=True, check=True
    )
    dom = Tags(done.stdout)
    (body,) = [attributes for tag, attributes in dom.tags if tag == "body"]
    expected = {"data-charts": str(len(TITLES)), "data-empty": "none", "data-requests": "none", "data-errors": "none"}
    assert body == expected
    assert "CONSOLE" not in done.stderr
    assert "<title>full</title>" in done.stdout  # no text of a file ran as a script


def test_runs_whose_folders_have_the_same_name_are_told_apart():
    assert unique_names(["a", "b", "a", "a (2)", "a"]) == ["a", "b", "a (2)", "a (2) (2)", "a (3)"]

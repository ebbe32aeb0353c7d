"""Evaluation tasks: what they score, and what the scores mean. Each is a pure function of its options and files."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from torchtitan_clone.config import Config, ConfigError
from torchtitan_clone.config.checks import describe_empty_path
from torchtitan_clone.config.messages import shown
from torchtitan_clone.config.schema import EvaluationTask
from torchtitan_clone.config.schema_training import Training
from torchtitan_clone.data import Tokenizer
from torchtitan_clone.data.opening import with_own_options
from torchtitan_clone.data.sources import BadRows, find_source, read_documents
from torchtitan_clone.data.token_store import is_held_out
from torchtitan_clone.documents import DocumentError, is_unicode, parse_json, read_regular
from torchtitan_clone.tools.scoring import ScoredText, cut_text

CHOICES = 4
"""Choices of an example that is made by code."""
CONTEXT_CHARS = 600
"""Characters of source code before the name in a cloze test."""
NAME = r"\b[A-Za-z_]\w{3,}"
_MAX_FILE_BYTES = 1 << 28
_MAX_CHARS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Example:
    """A question with choices, the right one of which has index `gold`; `where` names it in errors."""

    query: str
    choices: Sequence[str]
    gold: int
    where: str


@dataclass(frozen=True, kw_only=True)
class Task:
    """Texts to score, and the function that turns their log-likelihoods in nats into metrics by name."""

    name: str
    texts: Sequence[ScoredText]
    measure: Callable[[Sequence[float]], Mapping[str, float]]


def build_tasks(config: Config, *, tokenizer: Tokenizer, seq_len: int) -> list[Task]:
    """Returns the tasks of [evaluation] for rows of `seq_len` tokens; ConfigError with what cannot be evaluated."""
    tasks: list[Task] = []
    problems: list[str] = []
    for options in config.evaluation.tasks if config.evaluation.enable else ():
        try:
            tasks.append(_build_task(options, config=config, tokenizer=tokenizer, seq_len=seq_len))
        except ConfigError as error:
            problems += [f"evaluation.tasks, name {shown(options.name)}: {with_own_options(x)}" for x in error.messages]
    if problems:
        raise ConfigError(problems)
    return tasks


def _build_task(options: EvaluationTask, *, config: Config, tokenizer: Tokenizer, seq_len: int) -> Task:
    if options.kind == "text":
        return _text_task(options, config=config, tokenizer=tokenizer, seq_len=seq_len)
    examples = list(EXAMPLES[options.kind](options, config))
    return choice_task(options.name, examples, tokenizer=tokenizer, seq_len=seq_len)


# ---------------------------------------------------------------------- texts


def _text_task(options: EvaluationTask, *, config: Config, tokenizer: Tokenizer, seq_len: int) -> Task:
    """Scores all tokens but the first of each document, in stretches of `seq_len`."""
    encoded = tokenizer.encode_with_sizes(_documents(options, config))
    texts = [text for ids, _ in encoded for text in cut_text(ids, seq_len=seq_len)]
    if not texts:
        raise ConfigError("its files have no document of two tokens; set path to text")
    size = sum(sum(sizes[1:]) for _, sizes in encoded)
    if not size:
        raise ConfigError("the tokens after the first of its documents stand for no bytes; set path to other text")
    tokens = sum(text.num_scored for text in texts)

    def measure(nats: Sequence[float]) -> dict[str, float]:
        total = -math.fsum(nats)
        return {"bits_per_byte": total / (math.log(2) * size), "loss": total / tokens}

    return Task(name=options.name, texts=texts, measure=measure)


def _documents(options: EvaluationTask, config: Config) -> list[str]:
    path = _path_of(options)
    source = find_source(Training(dataset_path=str(path), text_key=options.text_key))
    return [text for text, _ in read_documents(source, bad_rows=BadRows(limit=config.data.max_bad_rows))]


def _path_of(options: EvaluationTask) -> Path:
    if options.path is None:
        raise ConfigError(f'kind "{options.kind}" needs a path; set it to a file or folder')
    if not options.path:
        raise ConfigError(describe_empty_path("path"))
    return Path(options.path)


# ---------------------------------------------------------------------- choices


def choice_task(name: str, examples: Sequence[Example], *, tokenizer: Tokenizer, seq_len: int) -> Task:
    """Scores each choice given its query. ConfigError if there are none, or one is longer than a row."""
    pairs = [(example.query, choice) for example in examples for choice in example.choices]
    texts = score_pairs(pairs, tokenizer=tokenizer)
    places = [example.where for example in examples for _ in example.choices]
    rule = f"tokens with its query, and training.seq_len is {seq_len:,}; shorten them, or increase it"
    long = zip(places, texts, strict=True)
    if problems := [f"{where}: a choice has {text.size:,} {rule}" for where, text in long if text.size > seq_len]:
        raise ConfigError(problems)
    if not examples:
        raise ConfigError("it has no examples")

    def measure(nats: Sequence[float]) -> dict[str, float]:
        scores = iter(nats)
        return measure_choices(examples, [[next(scores) for _ in example.choices] for example in examples])

    return Task(name=name, texts=texts, measure=measure)


def score_pairs(pairs: Sequence[tuple[str, str]], *, tokenizer: Tokenizer) -> list[ScoredText]:
    """Returns the text of each context and continuation, encoded together, so that the continuation is scored.

    Spaces at the end of a context count as the start of the continuation, as in lm-evaluation-harness.
    """
    cut = [(context.rstrip(), _spaces_after(context) + continuation) for context, continuation in pairs]
    contexts = tokenizer.encode_batch([context for context, _ in cut])
    wholes = tokenizer.encode_batch([context + continuation for context, continuation in cut])
    # The first token of all has nothing that it is given. Of a single token, nothing would be scored.
    endings = tokenizer.encode_batch([ending for _, ending in cut], add_bos=False)
    apart = [
        context + ending if len(whole) < 2 else whole
        for context, ending, whole in zip(contexts, endings, wholes, strict=True)
    ]
    return [
        ScoredText(tokens=tokens, first=max(1, min(len(context), len(tokens) - 1)))
        for context, tokens in zip(contexts, apart, strict=True)
    ]


def _spaces_after(context: str) -> str:
    return context[len(context.rstrip()) :]


def measure_choices(examples: Sequence[Example], nats: Sequence[Sequence[float]]) -> dict[str, float]:
    """Returns the accuracy by the sum of log-likelihoods, per character and per byte, and bits per byte of the gold.

    A space before a choice separates it from the query and is no part of its length, as in lm-evaluation-harness, where
    it is the delimiter; it is part of what is scored, and of the bits per byte.
    """
    sizes: dict[str, Callable[[str], int]] = {
        "accuracy": lambda _: 1,
        "accuracy_per_char": lambda choice: len(choice.removeprefix(" ")) or 1,
        "accuracy_per_byte": lambda choice: len(choice.removeprefix(" ").encode()) or 1,
    }
    found: dict[str, float] = {}
    for name, size in sizes.items():
        right = 0
        for example, scores in zip(examples, nats, strict=True):
            relative = [score / size(choice) for score, choice in zip(scores, example.choices, strict=True)]
            right += relative.index(max(relative)) == example.gold
        found[name] = right / len(examples)
    bits = [
        -scores[example.gold]
        / (math.log(2) * len(f"{_spaces_after(example.query)}{example.choices[example.gold]}".encode()))
        for example, scores in zip(examples, nats, strict=True)
    ]
    return found | {"gold_bits_per_byte": math.fsum(bits) / len(bits)}


def _read_examples(options: EvaluationTask, _config: Config) -> Iterator[Example]:
    """Reads a .jsonl file of tables with query, choices and gold."""
    path = _path_of(options)
    try:
        lines = read_regular(path, max_bytes=_MAX_FILE_BYTES, follow_links=True).split(b"\n")
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _parse_example(line, where=f"{path}:{number}")
    except (DocumentError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        place = f"{path} cannot be read: " if isinstance(error, OSError) else ""
        raise ConfigError(f"{place}{reason}; correct the file") from None


def _parse_example(line: bytes, *, where: str) -> Example:
    entries = parse_json(line, where=where).entries()
    if missing := [key for key in ("query", "choices", "gold") if key not in entries]:
        raise DocumentError(f"{where}: missing key {', '.join(missing)}")
    query = entries["query"].text(max_chars=_MAX_CHARS, pattern=r"(?s)\s*\S.*")
    choices = [choice.text(max_chars=_MAX_CHARS, pattern="(?s).+") for choice in entries["choices"].items()]
    if not all(map(is_unicode, (query, *choices))):
        raise DocumentError(f"{where}: query and choices must be valid Unicode, without halves of surrogate pairs")
    if len(choices) < 2:
        entries["choices"].refuse("must have at least two items")
    return Example(query=query, choices=choices, gold=entries["gold"].integer(high=len(choices) - 1), where=where)


def _cloze(options: EvaluationTask, config: Config) -> Iterator[Example]:
    """Yields names to choose in source code: held-out modules of the standard library, or the files of `path`."""
    if options.path is None:
        found = read_documents(find_source(Training()), bad_rows=BadRows(limit=0))
        fraction = config.data.held_out_fraction
        texts = [text for text, _ in found if is_held_out(text, fraction=fraction)]
    else:
        texts = _documents(options, config)
    places = [
        (text, match)
        for text in texts
        if len(set(re.findall(NAME, text))) > 1
        for match in re.finditer(NAME, text)
        if match.start() >= CONTEXT_CHARS
    ]
    if not places:
        rule = f"no held-out text has a name after {CONTEXT_CHARS} characters, and another name to choose from"
        raise ConfigError(f"{rule}; increase data.held_out_fraction, or set path to source code")
    for number, draw in _draws(options):
        text, match = draw.choice(places)
        query = text[match.start() - CONTEXT_CHARS : match.start()]
        others = sorted(set(re.findall(NAME, text)) - {match[0]})
        yield _shuffled(query, match[0], draw.sample(others, min(CHOICES - 1, len(others))), draw=draw, number=number)


# ---------------------------------------------------------------------- probes


def _copy(options: EvaluationTask, _config: Config) -> Iterator[Example]:
    """Yields random words and their repetition, whose last word is asked for."""
    for number, draw in _draws(options):
        words = [f" {word}" for word in draw.sample(range(100, 1000), max(CHOICES, min(options.length, 900)))]
        query = f"{''.join(words)}\n{''.join(words[:-1])}"
        yield _shuffled(query, words[-1], draw.sample(words[:-1], CHOICES - 1), draw=draw, number=number)


def _recall(options: EvaluationTask, _config: Config) -> Iterator[Example]:
    """Yields lines of keys and values, and asks for the value of the key at `depth`, from the first to the last."""
    for number, draw in _draws(options):
        count = max(CHOICES, min(options.length, 900))
        keys, values = (draw.sample(range(100, 1000), count) for _ in range(2))
        asked = round(options.depth * (count - 1))
        lines = [f"key {key} has value {value}\n" for key, value in zip(keys, values, strict=True)]
        others = [f" {value}" for value in draw.sample(values[:asked] + values[asked + 1 :], CHOICES - 1)]
        query = f"{''.join(lines)}key {keys[asked]} has value"
        yield _shuffled(query, f" {values[asked]}", others, draw=draw, number=number)


def _brackets(options: EvaluationTask, _config: Config) -> Iterator[Example]:
    """Yields nested brackets, and asks for the one that closes the innermost."""
    pairs = {"(": ")", "[": "]", "{": "}", "<": ">"}
    for number, draw in _draws(options):
        written, opened = "", []
        while len(written) < options.length or not opened:
            if opened and draw.random() < 0.5:
                written += pairs[opened.pop()]
            else:
                opened.append(draw.choice(list(pairs)))
                written += opened[-1]
        gold = pairs[opened[-1]]
        yield _shuffled(written, gold, [each for each in pairs.values() if each != gold], draw=draw, number=number)


def _draws(options: EvaluationTask) -> Iterator[tuple[int, Random]]:
    """Yields the number of each example, from 1, and its random numbers."""
    for number in range(1, options.examples + 1):
        yield number, Random(f"{options.kind}/{options.length}/{options.depth}/{number}")


def _shuffled(query: str, gold: str, others: Sequence[str], *, draw: Random, number: int) -> Example:
    choices = [gold, *others]
    draw.shuffle(choices)
    return Example(query=query, choices=choices, gold=choices.index(gold), where=f"example {number}")


EXAMPLES: dict[str, Callable[[EvaluationTask, Config], Iterator[Example]]] = {
    "multiple_choice": _read_examples,
    "cloze": _cloze,
    "copy": _copy,
    "recall": _recall,
    "brackets": _brackets,
}
"""Functions that yield the examples of a task by its kind; the kind "text" has none."""

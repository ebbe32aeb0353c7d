"""Chats as text and targets, against transformers' masks of templates that mark what the model writes.

Of chat.py and find_targets() of encoder.py.
"""

import json

import pytest
from transformers import AutoTokenizer

from tests.data.chats import CHATS, REWRITING, TEMPLATES, TOOL_CALL, TOOLS, template, turns, write_tokenizer
from torchtitan_clone.config import ConfigError
from torchtitan_clone.data import build_tokenizer
from torchtitan_clone.data.chat import build_renderer
from torchtitan_clone.data.encoder import find_targets


def found(folder, row, *, supervise="assistant", **switches):
    """Returns ids and targets of each text of a row."""
    tokenizer = build_tokenizer(folder)
    backend = tokenizer.parsing_special_tokens().backend
    rendered = build_renderer(tokenizer, supervise=supervise, **switches).render(row)
    encoded = [(backend.encode(each.text, add_special_tokens=False), each.spans) for each in rendered]
    return [(encoding.ids, list(find_targets(encoding, spans))) for encoding, spans in encoded]


def expected(theirs, messages, *, tools=None):
    """Returns ids and targets of transformers."""
    out = theirs.apply_chat_template(
        messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True, date_string="26 Jul 2024"
    )
    return out["input_ids"], out["assistant_masks"]


def last_run(targets):
    """Returns the targets without those before the last run of them."""
    end = len(targets) - targets[::-1].index(1)
    start = end - [*targets[:end][::-1], 0].index(0)
    return [int(start <= place < end) for place in range(len(targets))]


def of_turns(theirs, messages, **tools):
    """Returns ids and targets of each turn of the assistant, rendered without those after it."""
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    each = [expected(theirs, messages[: place + 1], **tools) for place in places]
    return [(ids, last_run(targets)) for ids, targets in each]


@pytest.mark.parametrize("name", TEMPLATES)
def test_targets_are_those_that_a_marked_template_names(tmp_path, name):
    """Each with and without marks: a template without them is rendered message by message."""
    marked = write_tokenizer(tmp_path / "marked", chat_template=template(name, is_marked=True))
    plain = write_tokenizer(tmp_path / "plain", chat_template=template(name, is_marked=False))
    theirs = AutoTokenizer.from_pretrained(marked)
    for messages in CHATS:
        whole = expected(theirs, messages)
        assert sum(whole[1]) >= 2
        assert found(marked, {"messages": messages}) == [whole]
        answers = sum(message["role"] == "assistant" for message in messages)
        is_divided = name in REWRITING and (answers > 1 or messages[-1]["role"] == "user")
        by_turn = of_turns(theirs, messages)
        assert found(plain, {"messages": messages}) == (by_turn if is_divided else [whole])
        (last,) = found(plain, {"messages": messages}, supervise="last")
        assert last == (by_turn[-1] if is_divided else (whole[0], last_run(whole[1])))
        (last,) = found(marked, {"messages": messages}, supervise="last")
        assert last == (whole[0], last_run(whole[1]))
        assert found(plain, {"messages": messages}, supervise="all") == [(whole[0], [1] * len(whole[0]))]


@pytest.fixture(scope="module")
def chatml(tmp_path_factory):
    """Returns the folder of a tokenizer with a template that marks nothing."""
    return write_tokenizer(tmp_path_factory.mktemp("assets") / "t", chat_template=template("chatml", is_marked=False))


@pytest.fixture(scope="module")
def marked_chatml(tmp_path_factory):
    """Returns that of one that marks what the model writes."""
    return write_tokenizer(tmp_path_factory.mktemp("marked") / "t", chat_template=template("chatml", is_marked=True))


def test_calls_of_tools_are_targets_and_their_results_are_not(tmp_path):
    marked = write_tokenizer(tmp_path / "marked", chat_template=template("qwen3", is_marked=True))
    (tmp_path / "plain").mkdir()
    plain = write_tokenizer(tmp_path / "plain", chat_template=None)
    (tmp_path / "plain" / "chat_template.jinja").write_text(template("qwen3", is_marked=False))
    call = {"role": "assistant", "content": None, "reasoning_content": "look", "tool_calls": [TOOL_CALL]}
    messages = [*turns("Wetter?"), call, {"role": "tool", "content": "rain"}, {"role": "assistant", "content": "Rain."}]
    answers = [expected(AutoTokenizer.from_pretrained(marked), messages, tools=TOOLS)]
    assert found(plain, {"messages": messages, "tools": TOOLS}) == answers
    assert found(plain, {"messages": messages, "tools": json.dumps(TOOLS)}) == answers
    backend = build_tokenizer(plain).backend
    ((ids, targets),) = answers
    written = [token_id for token_id, is_target in zip(ids, targets, strict=True) if is_target]
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call><|im_end|>'
    final = "<think>\n\n</think>\n\nRain.<|im_end|>"
    assert backend.decode(written, skip_special_tokens=False) == f"<think>\nlook\n</think>\n\n\n{call}{final}"


CALL = '\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
CHANNEL = ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Köln", "days": 2}<|call|>'
CALLS = [
    *turns("Wetter?"),
    {"role": "assistant", "content": "So:", "reasoning_content": "look", "tool_calls": [TOOL_CALL]},
    *({"role": "tool", "content": "rain"}, {"role": "assistant", "content": "Rain.", "reasoning_content": "it rains"}),
]
THOUGHT = turns("Why?", "<think>\nreason\n</think>\n\n<b>")
SWITCHES = {
    # The template has tags for thoughts in the last turn, also if there are none, and before calls only with them.
    "thoughts": ("qwen3", CALLS, {"thinking": False}, ["<think>\nlook\n</think>\n\n", "it rains"]),
    "calls": ("qwen3", CALLS, {"tool_calls": False}, [CALL]),
    "both": (
        *("qwen3", CALLS, {"thinking": False, "tool_calls": False}),
        ["<think>\nlook\n</think>\n\n", CALL, "it rains"],
    ),
    "a thought in the text": ("chatml", THOUGHT, {"thinking": False}, ["<think>\nreason\n</think>"]),
    "a thought that is dropped": ("deepseek", THOUGHT, {"thinking": False}, []),
    "a channel of thoughts": (
        *("gpt_oss", turns("1 + 1?", "2", thinking="count"), {"thinking": False}),
        ["<|channel|>analysis<|message|>count<|end|><|start|>assistant"],
    ),
    "a channel of calls": (
        *("gpt_oss", [*CALLS[:3], {"role": "assistant", "content": "Rain."}], {"tool_calls": False}, [CHANNEL]),
    ),
    "neither": ("gemma", turns("a", "b", "c", "d"), {"thinking": False, "tool_calls": False}, []),
}
"""By what is no target: a template, a chat, the switches, and what of its text is none, in order."""


@pytest.mark.parametrize("is_marked", [False, True])
@pytest.mark.parametrize("name", SWITCHES)
def test_thoughts_and_calls_of_tools_are_no_targets_if_switched_off(tmp_path, name, is_marked):
    """Tokens that are only in a part stay targets, and so does what the template writes without them too."""
    shape, messages, switches, removed = SWITCHES[name]
    marked = write_tokenizer(tmp_path / "marked", chat_template=template(shape, is_marked=True))
    folder = write_tokenizer(tmp_path / "t", chat_template=template(shape, is_marked=is_marked))
    theirs = AutoTokenizer.from_pretrained(marked)
    ids, targets = expected(theirs, messages)
    text = theirs.apply_chat_template(messages, tokenize=False, date_string="26 Jul 2024")
    offsets = theirs(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    at, less = 0, targets
    for part in removed:
        at = text.index(part, at)
        span = (at, at + len(part))
        less = [
            0 if span[0] <= start and end <= span[1] else is_target
            for (start, end), is_target in zip(offsets, less, strict=True)
        ]
    assert sum(targets) - sum(less) >= len(removed)
    assert found(folder, {"messages": messages}, **switches) == [(ids, less)]
    everything = [int(not was or is_left) for was, is_left in zip(targets, less, strict=True)]
    assert found(folder, {"messages": messages}, supervise="all", **switches) == [(ids, everything)]


def test_a_turn_of_thoughts_alone_leaves_its_end(tmp_path):
    folder = write_tokenizer(tmp_path / "t", chat_template=template("chatml", is_marked=False))
    ((ids, targets),) = found(folder, {"messages": turns("a", "<think>\nreason\n</think>")}, thinking=False)
    left = [token for token, is_target in zip(ids, targets, strict=True) if is_target]
    assert build_tokenizer(folder).decode(left) == "<|im_end|>"


def test_answers_in_a_prompt_are_no_targets(chatml, marked_chatml):
    messages = turns("a", "b", "c", "d", "e", "f")
    pairs = {"prompt": messages[:3], "completion": messages[3:]}
    (whole,) = found(chatml, {"messages": messages})
    start = whole[1].index(0, whole[1].index(1))  # after the first answer
    (divided,) = found(chatml, pairs)
    assert divided == (whole[0], [0] * start + whole[1][start:])
    assert found(marked_chatml, pairs) == [divided]
    assert found(chatml, {"prompt": "a", "completion": "b"}) == found(chatml, {"messages": turns("a", "b")})


def test_a_chat_without_an_answer_has_no_text(chatml):
    assert found(chatml, {"messages": turns("a")}) == []
    assert len(found(chatml, {"messages": turns("a")}, supervise="all")) == 1


BAD = {
    "not a JSON object but a list": [],
    "neither the key 'messages' nor 'prompt' and 'completion' among 'text'": {"text": "a"},
    "messages must be a list of objects with role and content": {"messages": "a"},
    "message 2 is a string, not an object with role and content": {"messages": [*turns("a"), "b"]},
    "message 2 has no role; known: system, developer, user": {"messages": [*turns("a"), {"content": "b"}]},
    "message 1 has the unknown role 'human'; known: ": {"messages": [{"role": "human", "content": "a"}]},
    "message 2, of the assistant, has no content": {"messages": [*turns("a"), {"role": "assistant", "content": None}]},
    "the content of message 1 is a number, not a string": {"messages": [{"role": "user", "content": 3}]},
    "'tools' holds an object, not a list": {"messages": turns("a", "b"), "tools": {}},
}


@pytest.mark.parametrize("reason", BAD)
def test_a_row_that_is_no_chat_has_its_reason(chatml, reason):
    with pytest.raises(ValueError, match=f"^{reason}"):
        found(chatml, BAD[reason])


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ("{{ raise_exception('only two turns') }}", "the chat template fails: only two turns"),
        ("{{ messages[7].content }}", "the chat template fails: list object has no element 7"),
        ("{% for m in messages %}", "the chat template fails: Unexpected end of template"),
        # What precedes the last message depends on their number.
        (
            "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}",
            "message 2: the chat template rend",
        ),
    ],
)
def test_a_template_that_fails_has_its_reason(tmp_path, changed, reason):
    folder = write_tokenizer(tmp_path / "t", chat_template=changed)
    with pytest.raises(ValueError, match=f"^{reason}"):
        found(folder, {"messages": turns("a", "b")})


def test_what_is_rendered_does_not_depend_on_the_day(tmp_path):
    stated = "{{ strftime_now('%A, %d %B %Y, %y-%m %b') }}{% for m in messages %}|{{ m.content }}{% endfor %}"
    folder = write_tokenizer(tmp_path / "t", chat_template=f"\n {stated}")
    ((ids, _),) = found(folder, {"messages": turns("a", "b")})
    assert build_tokenizer(folder).decode(ids) == "\n Friday, 26 July 2024, 24-07 Jul|a|b"


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path):
    folder = write_tokenizer(tmp_path / "t", chat_template=None)
    with pytest.raises(
        ConfigError, match=f'model.hf_assets_path = "{folder}": chats are rendered .* it has none in to'
    ):
        found(folder, {"messages": turns("a", "b")})
    (tmp_path / "t" / "tokenizer_config.json").write_text('{"eos_token": "</s>", "chat_template": 3}')
    with pytest.raises(ConfigError, match="chat_template = 3: must be a string; correct the file"):
        found(folder, {"messages": turns("a", "b")})
    several = [
        {"name": "tool_use", "template": "x"},
        {"name": "default", "template": template("chatml", is_marked=False)},
    ]
    assert found(write_tokenizer(tmp_path / "t", chat_template=several), {"messages": turns("a", "b")})

# ruff: noqa: RUF001, DeepSeek names its tokens with full-width bars
"""Chats, and chat templates in the shapes of eight families, written anew, with a tokenizer that has their tokens.

In a template [[ and ]] enclose what the model writes; see `template`.
"""

import json

from tests.data.corpora import texts
from tests.data.test_tokenizer_files import made_tokenizer

HEADER = "{{ '<|im_start|>' + m.role + '\\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
DATE = "{% if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
TEMPLATES = {
    "chatml": "{% for m in messages %}" + HEADER + "{% if m.role == 'assistant' %}[[{{ m.content }}<|im_end|>]]"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}" + PROMPT,
    "llama3": DATE + "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}"
    "{% if m.role == 'system' %}{{ 'Today: ' + date_string + '\\n' }}{% endif %}"
    "{% if m.role == 'assistant' %}[[{{ m.content | trim }}<|eot_id|>]]{% else %}{{ m.content | trim }}<|eot_id|>"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
    # Thinking is kept only after the last message of a user.
    "qwen3": "{% if tools %}{{ '<|im_start|>system\\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}<|im_end|>"
    "{{ '\\n' }}{% endif %}{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>\\n' + m.content }}"
    "{{ '\\n</tool_response><|im_end|>\\n' }}{% else %}" + HEADER + "{% if m.role == 'assistant' %}[["
    "{% if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}"
    "{{ '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ '\\n<tool_call>\\n' + (c.function | tojson) + '\\n</tool_call>' }}{% endfor %}"
    "<|im_end|>]]{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endif %}{% endfor %}" + PROMPT,
    # The end of the last turn is another token, and thinking is a channel of it alone.
    "gpt_oss": DATE + "{{ '<|start|>system<|message|>Date: ' + date_string + '<|end|>' }}{% for m in messages %}"
    "{% if m.tool_calls %}<|start|>assistant[[{{ ' to=functions.' + m.tool_calls[0].function.name }}"
    "<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>]]"
    "{% elif m.role == 'assistant' %}<|start|>assistant[["
    "{% if loop.last and m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}"
    "<|end|><|start|>assistant{% endif %}<|channel|>final<|message|>{{ m.content }}"
    "{% if loop.last %}<|return|>{% else %}<|end|>{% endif %}]]"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    # Has no prompt of its own, and refuses turns in another order.
    "mistral": "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = m.content + '\\n\\n' %}"
    "{% elif m.role == 'user' %}{{ '[INST] ' + ns.system + m.content + '[/INST]' }}{% set ns.system = '' %}"
    "{% elif m.role == 'assistant' %}[[{{ ' ' + m.content + eos_token }}]]"
    "{% else %}{{ raise_exception('Only user and assistant take turns') }}{% endif %}{% endfor %}",
    # The prompt opens a thought, which is dropped from every turn.
    "deepseek": "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
    "{% else %}<｜Assistant｜>[[{{ m.content.split('</think>')[-1] + eos_token }}]]{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}",
    "gemma": "{{ bos_token }}{% for m in messages %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}"
    "{% if m.role == 'assistant' %}[[{{ m.content | trim }}<end_of_turn>]]{% else %}{{ m.content | trim }}<end_of_turn>"
    "{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}",
    # Roles are plain text, and the last turn has no line end.
    "olmo": "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>\\n' }}"
    "[[{{ m.content + eos_token }}]]{% if not loop.last %}{{ '\\n' }}{% endif %}"
    "{% else %}{{ '<|' + m.role + '|>\\n' + m.content + '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}",
}
REWRITING = ("qwen3", "gpt_oss")
"""Which render a turn in another way after later ones are added."""
ADDED = [
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|start|>", "<|end|>"),
    *("<|channel|>", "<|message|>", "<|return|>", "[INST]", "[/INST]", "<｜User｜>", "<｜Assistant｜>"),
    *("<start_of_turn>", "<end_of_turn>", "<|call|>"),
]


def template(name: str, *, is_marked: bool) -> str:
    """Returns a template, in which {% generation %} marks what the model writes, or nothing does."""
    tags = {"[[": "{% generation %}", "]]": "{% endgeneration %}"} if is_marked else {"[[": "", "]]": ""}
    found = TEMPLATES[name]
    for mark, tag in tags.items():
        found = found.replace(mark, tag)
    return found


def write_tokenizer(folder, *, chat_template: str | None, **config) -> str:
    """Writes a tokenizer with the tokens of all templates and this one in its configuration; returns its folder."""
    made = made_tokenizer()
    made.add_special_tokens(ADDED)
    made.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"} | config
    named |= {} if chat_template is None else {"chat_template": chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return str(folder)


def turns(*contents: str, system: str | None = None, thinking: str | None = None) -> list[dict]:
    """Returns messages of a user and the assistant in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": content} for place, content in enumerate(contents)]
    if thinking:
        for message in messages[1::2]:
            message |= {"reasoning_content": thinking, "thinking": thinking}  # as templates name it
    return [*([{"role": "system", "content": system}] if system else []), *messages]


TOOL_CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "days": 2}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CHATS = [
    turns("Hello", "Hi there."),
    turns("Größe?", "日本 größe", "And\nthen?", "import self\n\nreturns", "(x)", "\n value ", system="Be short."),
    turns("1 + 1?", "2", "2 + 2?", "4 <b>", thinking="count it"),
    [*turns("a", " b"), {"role": "user", "content": "no answer"}],
    turns("1 + 2?", "<think>\nadd\n</think>\n\n3", "So?", "<think>\n</think>\n\nDone."),
]


def many_chats(count: int, *, seed: int = 0, words: int = 12) -> list[list[dict]]:
    """Returns chats of one to three turns."""
    contents = iter(texts(6 * count, seed=seed, words=words))
    return [turns(*(next(contents) for _ in range(2 * (1 + number % 3)))) for number in range(count)]

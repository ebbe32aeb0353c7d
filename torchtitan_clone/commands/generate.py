"""Generates text from a checkpoint, a run's newest checkpoint, or a folder in the format of the Hugging Face hub.

    python scripts/generate.py outputs/debug_model --prompt="def main(" --max_new_tokens=32
    python scripts/generate.py outputs/debug_model/hf/step-150 --prompt_file=prompts.txt --temperature=0.8 --top_p=0.95

Without --temperature, the most likely token is chosen. Without a prompt, each line of standard input is one.
A prompt starts a document; its continuation ends with the document, or after --max_new_tokens.
"""

import sys
import time
from pathlib import Path

from torchtitan_clone.commands.model_options import add_model_options, open_from_options
from torchtitan_clone.commands.parsing import build_parser
from torchtitan_clone.config import ConfigError
from torchtitan_clone.observe.outputs import print_error, reports_errors
from torchtitan_clone.tools.generation import Generator, Sampling, read_prompts


def generate(generator: Generator, prompts: list[str]) -> None:
    """Prints each prompt with its continuation, and the speed to stderr."""
    encoded, start, tokens = generator.encode(prompts), time.perf_counter(), 0
    for prompt, before, ids in zip(prompts, encoded, generator.complete(encoded), strict=True):
        print(prompt + generator.decode(ids, after=before), "-" * 40, sep="\n", flush=True)
        tokens += len(ids)
    print(f"{tokens:,} tokens, {tokens / (time.perf_counter() - start):,.0f} tokens/s", file=sys.stderr)


def converse(generator: Generator) -> None:
    """Continues each line of standard input until its end; reports a line that cannot be continued."""
    print("Enter a prompt in one line; Ctrl-D ends.", file=sys.stderr)
    for line in sys.stdin:
        try:
            for text in generator.stream_text(*generator.encode([line.rstrip("\n")])):
                print(text, end="", flush=True)
            print(flush=True)
        except ConfigError as error:
            print_error(error)


@reports_errors
def main(words: list[str]) -> int:
    """Parses the command line and generates; returns the exit code."""
    parser = build_parser(__doc__)
    add_model_options(parser)
    parser.add_argument("--prompt", action="append", default=[], help="text to continue; may be given several times")
    parser.add_argument("--prompt_file", type=Path, help="text file with a prompt in each line")
    parser.add_argument("--parse_special_tokens", action="store_true", help="encode those in prompts as their ids")
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, help="sample with this temperature")
    parser.add_argument("--top_k", type=int, help="sample among this many of the most likely tokens")
    parser.add_argument("--top_p", type=float, help="sample among the most likely tokens of this total probability")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no_cache", action="store_true", help="compute every token again for each new one")
    options = parser.parse_args(words)
    sampling = Sampling(**{name: getattr(options, name) for name in vars(Sampling())})
    prompts = options.prompt + (read_prompts(options.prompt_file) if options.prompt_file else [])
    generator = Generator(
        open_from_options(options),
        sampling=sampling,
        use_cache=not options.no_cache,
        parse_special_tokens=options.parse_special_tokens,
    )
    generate(generator, prompts) if prompts else converse(generator)
    return 0

"""Generates text from a checkpoint, a run's newest checkpoint, or a folder in the format of the Hugging Face hub.

    python scripts/generate.py outputs/debug_model --prompt="def main(" --max_new_tokens=32
    python scripts/generate.py outputs/debug_model/hf/step-150 --prompt_file=prompts.txt --temperature=0.8 --top_p=0.95

Without --temperature, the most likely token is chosen. Without a prompt, each line of standard input is one.
A prompt starts a document; its continuation ends with the document, or after --max_new_tokens.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone without being installed

from torchtitan_clone.config import ConfigError
from torchtitan_clone.observe.outputs import print_error, reports_errors
from torchtitan_clone.tools.generation import Generator, Sampling, read_prompts
from torchtitan_clone.tools.trained_model import open_trained_model


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
def main(words: list[str] | None = None) -> int:
    """Parses the command line and generates; returns the exit code."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="a run's folder, a step-N folder, or a Hugging Face folder")
    parser.add_argument("--prompt", action="append", default=[], help="text to continue; may be given several times")
    parser.add_argument("--prompt_file", type=Path, help="text file with a prompt in each line")
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, help="sample with this temperature")
    parser.add_argument("--top_k", type=int, help="sample among this many of the most likely tokens")
    parser.add_argument("--top_p", type=float, help="sample among the most likely tokens of this total probability")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch_size", type=int, default=8, help="prompts that are continued together")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--hf_assets_path", help="the tokenizer's folder, where it is not where the run found it")
    parser.add_argument("--no_cache", action="store_true", help="compute every token again for each new one")
    options = parser.parse_args(words)
    sampling = Sampling(**{name: getattr(options, name) for name in vars(Sampling())})
    prompts = options.prompt + (read_prompts(options.prompt_file) if options.prompt_file else [])
    dtype, device = getattr(torch, options.dtype), torch.device(options.device)
    trained = open_trained_model(options.folder, dtype=dtype, device=device, hf_assets_path=options.hf_assets_path)
    generator = Generator(trained, sampling=sampling, use_cache=not options.no_cache)
    generate(generator, prompts) if prompts else converse(generator)
    return 0


if __name__ == "__main__":
    sys.exit(main())

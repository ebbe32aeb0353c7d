"""Measures the speed of generation against transformers, on the CPU.

    python benchmarks/generation.py
    python benchmarks/generation.py --families llama3 deepseek_v3 --batch=8 --dim=1024 --rounds=5

Both models have the same random weights, and continue the same prompts greedily with their key-value caches. They take
turns in each round; the table has medians over the rounds, of tokens per second of CPU time and of the ratio. The
exit code is 1 if their tokens differ.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone without being installed

from benchmarks.turns import Step, alternate, median_of, processor_name, ratio_of, timed
from tests.support.twins import twin_of
from torchtitan_clone.data import build_tokenizer
from torchtitan_clone.models import MODELS
from torchtitan_clone.tools.generation import Generator, Sampling
from torchtitan_clone.tools.trained_model import TrainedModel

Tokens = list[list[int]]


def compare(family: str, options: argparse.Namespace) -> bool:
    """Prints the row of a family; returns whether both generate the same tokens."""
    spec = MODELS[family]
    args = replace(spec.flavors["debugmodel"], dim=options.dim)
    torch.manual_seed(0)
    model = spec.build(args).requires_grad_(False)
    twin = twin_of(spec, model, args)
    twin.generation_config.eos_token_id = None
    twin.config._attn_implementation = "sdpa" if twin._supports_sdpa else "eager"
    tokenizer = replace(build_tokenizer(None), eos_id=args.vocab_size)  # no document ends
    trained = TrainedModel(path=Path(), model=model, args=args, tokenizer=tokenizer, device=torch.device("cpu"))
    ours = Generator(trained, sampling=Sampling(max_new_tokens=options.tokens, batch_size=options.batch))
    prompts = torch.randint(0, args.vocab_size, (options.batch, options.prompt)).tolist()

    def theirs() -> Tokens:
        given = torch.tensor(prompts)
        out = twin.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=options.tokens, pad_token_id=0)
        return out[:, options.prompt :].tolist()

    def step_of(generate: Callable[[], Tokens]) -> Step:
        tokens, step = timed(generate)
        return {**step, "tokens": tokens}

    steps = {"ours": partial(step_of, lambda: list(ours.complete(prompts))), "theirs": partial(step_of, theirs)}
    alternate(steps, rounds=1)  # warms up
    taken = alternate(steps, rounds=options.rounds)
    mine, others = taken["ours"], taken["theirs"]
    is_equal = all(one["tokens"] == other["tokens"] for one, other in zip(mine, others, strict=True))
    count = options.batch * options.tokens
    speeds = [count / median_of(of_side, clock="cpu") for of_side in (mine, others)]
    ratio = ratio_of(others, mine, clock="cpu").median
    size = sum(parameter.numel() for parameter in nn.ModuleList([model]).parameters())
    equal = "" if is_equal else "  TOKENS DIFFER"
    print(f"{family:14}{size / 1e6:9.1f}{speeds[0]:12,.0f}{speeds[1]:14,.0f}{ratio:8.2f}{equal}", flush=True)
    return is_equal


def main() -> int:
    """Compares each family; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--dim", type=int, default=512, help="width of the debug flavor's model")
    parser.add_argument("--batch", type=int, default=1, help="prompts at once")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{processor_name()}; {options.threads} threads")
    print(f"{'family':14}{'M params':>9}{'ours tok/s':>12}{'theirs tok/s':>14}{'ratio':>8}")
    are_equal = [compare(family, options) for family in options.families]
    return int(not all(are_equal))


if __name__ == "__main__":
    sys.exit(main())

"""What an error message names as the remedy: valid values near an invalid one, and how to install a package."""

import math
import re
from typing import Literal

REQUIREMENTS = {
    "datasets": "datasets>=4,<6",
    "lm_eval": "lm_eval>=0.4.9",
    "plotly": "plotly>=6,<8",
    "torchao": "torchao>=0.18",
    "torchft": "torchft==0.2.0",
    "wandb": "wandb>=0.31",
}
"""Packages that a run may lack, as in pyproject.toml."""


def install(package: str) -> str:
    """Returns the command that installs a package, in a checkout and elsewhere."""
    return f'pip install "{REQUIREMENTS[package]}"'


def nearest_divisors(number: int, target: int) -> list[int]:
    """Returns up to four divisors of `number` nearest to `target` in ratio, in ascending order."""
    small = [count for count in range(1, math.isqrt(number) + 1) if number % count == 0]
    divisors = {*small, *(number // count for count in small)}
    return sorted(sorted(divisors, key=lambda count: abs(math.log(count / target)))[:4])


def nearest_multiples(number: int, target: int) -> list[int]:
    """Returns the positive multiples of `number` just below and just above `target`."""
    below = target // number * number
    return [count for count in (below, below + number) if count > 0]


def describe_download(path: str, *, repository: Literal["model", "tokenizer", "dataset"]) -> str:
    """Returns how to download a missing path that may name a repository of the Hugging Face hub; "" for other paths."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", path):
        return ""
    options = {"dataset": " --repo-type dataset", "tokenizer": " tokenizer.json tokenizer_config.json", "model": ""}
    command = f"hf download {path}{options[repository]} --local-dir {path.partition('/')[2]}"
    stream = f', or stream it with training.dataset = "{path}"' if repository == "dataset" else ""
    return f"; if it is a {repository} of the Hugging Face hub, download it (`{command}`) and name that folder{stream}"


def either(numbers: list[int]) -> str:
    """Formats numbers as "1, 2 or 3"."""
    *head, last = map(str, numbers)
    return f"{', '.join(head)} or {last}" if head else last

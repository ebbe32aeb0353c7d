"""Parsers of command lines, and options that several commands have."""

import argparse

from torchtitan_clone.config.imports import import_named
from torchtitan_clone.config.started import as_started


def build_parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser; the description, the docstring of a command, names scripts or commands as the user has."""
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=as_started(description or ""), formatter_class=form, allow_abbrev=False)


def add_tokenizer_options(parser: argparse.ArgumentParser) -> None:
    """Adds where the tokenizer and a model of the user's own are found."""
    parser.add_argument("--hf_assets_path", help="the tokenizer's folder, where it is not where the run found it")
    parser.add_argument("--imports", type=import_named, action="append", help="module of your own with the model")

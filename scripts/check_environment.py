"""Checks that the Python which runs this file has what pyproject.toml requires; exits with 1 and says what is missing.

    python scripts/check_environment.py pyproject.toml dev data

The arguments are the file and the extras that are also required. Compares names and versions only, and imports nothing
slow: importing torch alone would take seconds.
"""

import re
import sys

NEEDED_PYTHON = (3, 11)


def main() -> None:
    if sys.version_info < NEEDED_PYTHON:
        sys.exit("Python {}.{} is older than {}.{}".format(*sys.version_info[:2], *NEEDED_PYTHON))
    problems = [lacking(requirement) for requirement in requirements(*sys.argv[1:])]
    if any(problems):
        sys.exit(", ".join(filter(None, problems)))


def requirements(pyproject: str, *extras: str) -> "list[str]":
    import tomllib  # as importlib.metadata, not in every Python that is turned away

    with open(pyproject, "rb") as stream:
        project = tomllib.load(stream)["project"]
    optional = [requirement for extra in extras for requirement in project["optional-dependencies"][extra]]
    return project["dependencies"] + optional


def lacking(requirement: str) -> str:
    """What is wrong with the installed version of one requirement; empty if nothing is."""
    from importlib import metadata

    name = re.findall(r"[\w.-]+", requirement)[0]
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return f"no {name}"
    return "" if fits(version, requirement) else f"{name} {version} instead of {requirement}"


def fits(version: str, requirement: str) -> bool:
    holds = {"<": lambda a, b: a < b, ">=": lambda a, b: a >= b, "==": lambda a, b: a == b}
    bounds = re.findall(r"(<|>=|==)([\d.]+)", requirement)
    return all(holds[operator](numbers(version), numbers(bound)) for operator, bound in bounds)


def numbers(version: str) -> "tuple[int, ...]":
    """The numbers a version begins with, without zeros at the end: "2.10.0+cpu" is (2, 10)."""
    leading = re.findall(r"[\d.]*\d", version)[0]
    return tuple(int(number) for number in re.sub(r"(\.0)+$", "", leading).split("."))


if __name__ == "__main__":
    main()

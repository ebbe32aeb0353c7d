"""Checks that the running Python satisfies pyproject.toml: exit code 0, or 1 and one line of problems.

    python scripts/check_environment.py pyproject.toml dev data

Arguments: the file, and the extras to include. Compares package names and versions only, and imports none of the
packages, because importing torch takes seconds.
"""

import re
import sys

NEEDED_PYTHON = (3, 11)


def main() -> None:
    if sys.version_info < NEEDED_PYTHON:
        sys.exit("Python {}.{} is older than {}.{}".format(*sys.version_info[:2], *NEEDED_PYTHON))
    problems = [problem_with(requirement) for requirement in requirements(*sys.argv[1:])]
    if any(problems):
        sys.exit(", ".join(filter(None, problems)))


def requirements(pyproject: str, *extras: str) -> "list[str]":
    import tomllib  # here because older Pythons, which main() rejects, lack it

    with open(pyproject, "rb") as stream:
        project = tomllib.load(stream)["project"]
    optional = [requirement for extra in extras for requirement in project["optional-dependencies"][extra]]
    return project["dependencies"] + optional


def problem_with(requirement: str) -> str:
    """Returns why a requirement is not satisfied, or an empty string if it is."""
    from importlib import metadata

    name = re.findall(r"[\w.-]+", requirement)[0]
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return f"{name} is not installed"
    return "" if fits(version, requirement) else f"{name} {version} does not satisfy {requirement}"


def fits(version: str, requirement: str) -> bool:
    holds = {"<": lambda a, b: a < b, ">=": lambda a, b: a >= b, "==": lambda a, b: a == b}
    bounds = re.findall(r"(<|>=|==)([\d.]+)", requirement)
    return all(holds[operator](numbers(version), numbers(bound)) for operator, bound in bounds)


def numbers(version: str) -> "tuple[int, ...]":
    """Returns the leading numbers of a version without trailing zeros: "2.10.0+cpu" gives (2, 10)."""
    leading = re.findall(r"[\d.]*\d", version)[0]
    return tuple(int(number) for number in re.sub(r"(\.0)+$", "", leading).split("."))


if __name__ == "__main__":
    main()

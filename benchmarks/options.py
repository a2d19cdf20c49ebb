"""Options that several benchmarks have."""

import argparse
from collections.abc import Callable, Collection
from pathlib import Path


def listed(text: str) -> list[str]:
    """Names between commas; 'none' is no name."""
    return [] if text == "none" else [name.strip() for name in text.split(",")]


def any_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """A parser of names between commas, each one of `known`."""

    def parse(text: str) -> list[str]:
        names = listed(text)
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: there are {', '.join(known)}")
        return names

    return parse


def add_common(parser: argparse.ArgumentParser, workloads: Collection[str]) -> None:
    """--only, --repeats, --quick and --json."""
    parser.add_argument(
        "--only", type=any_of(workloads), default=list(workloads), help=f"any of {', '.join(workloads)}"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one repetition of smaller workloads")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there instead of printing them")

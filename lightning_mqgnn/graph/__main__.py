"""Builds a saved graph from files: python -m lightning_mqgnn.graph build --help."""

import argparse

from lightning_mqgnn.graph.build import build_store

_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def size(text: str) -> int:
    """Parse `512MiB`, `2GiB` or a number of bytes."""
    for unit, factor in _UNITS.items():
        number = text.removesuffix(unit) if unit else text
        if number.isdecimal():
            return int(number) * factor
    raise argparse.ArgumentTypeError(f"{text!r} is no size: give bytes, or a number with KiB, MiB or GiB")


def pair(text: str) -> tuple[str, str]:
    """Parse `name=value`."""
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form name=value")
    return name, value


def main() -> None:
    """Read the command line and build."""
    parser = argparse.ArgumentParser(prog="python -m lightning_mqgnn.graph", description=__doc__)
    build = parser.add_subparsers(required=True, metavar="build").add_parser(
        "build",
        help="build a graph from edge lists and .npy files, in pieces",
        description=build_store.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    build.add_argument("path", help="folder to make")
    build.add_argument("--edges", nargs="+", required=True, help=".npy files (2, edges), or text")
    build.add_argument("--num-nodes", type=int, help="by default the rows of the first --node")
    build.add_argument("--node", nargs="+", type=pair, default=[], metavar="NAME=FILE", help=".npy, a row per node")
    build.add_argument("--edge", nargs="+", type=pair, default=[], metavar="NAME=FILE", help=".npy, a row per edge")
    build.add_argument("--dtype", nargs="+", type=pair, default=[], metavar="NAME=DTYPE", help="e.g. x=float16")
    build.add_argument("--memory", type=size, default=2**30, help="e.g. 512MiB; default 1GiB")
    arguments = parser.parse_args()
    try:
        store = build_store(
            arguments.path,
            arguments.edges,
            num_nodes=arguments.num_nodes,
            node_attrs=dict(arguments.node),
            edge_attrs=dict(arguments.edge),
            dtypes=dict(arguments.dtype),
            memory_bytes=arguments.memory,
            progress=True,
        )
    except (OSError, ValueError, TypeError) as error:
        build.error(str(error))
    print(store)


if __name__ == "__main__":
    main()

"""``python -m course_utils fetch``: download and convert a model once, into the user's cache folder."""

from __future__ import annotations

import argparse
import sys
import time


def main(argv: list[str]) -> int:
    """Fetch one model of the catalog, or all; print where each lies. Returns 0, or 1 where one could not be had."""
    from course_utils.checkpoints import CATALOG, CourseDownloadError

    sizes = "\n".join(
        f"  {entry.name:<26} {entry.download_bytes / 1e6:>6,.0f} MB" for entry in CATALOG.values()
    )
    parser = argparse.ArgumentParser(
        prog="python -m course_utils fetch",
        description="Download and convert a model once; quick when it is there. COURSE_CACHE chooses the cache folder.",
        epilog=f"models:\n{sizes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "name",
        nargs="?",
        default="auto",
        help="a model below, a hub id, or auto (default): the one for this machine",
    )
    parser.add_argument("--all", action="store_true", help="every model of the catalog")
    options = parser.parse_args(argv)
    failed = 0
    for name in CATALOG if options.all else [options.name]:
        try:
            _fetch_one(name)
        except (CourseDownloadError, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
            failed = 1
    return failed


def _fetch_one(name: str) -> None:
    from course_utils import checkpoints

    start = time.monotonic()
    folder = checkpoints.fetch(name)
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    print(f"{folder}  ({weights / 1e6:,.0f} MB of weights, {time.monotonic() - start:.1f} s)")

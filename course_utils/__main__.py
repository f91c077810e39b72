"""``python -m course_utils COMMAND``: the maintainers' commands, one small module each in :mod:`course_utils.tools`."""

from __future__ import annotations

import sys
from importlib import import_module

COMMANDS = {
    "run": "execute the chapters, write them to build/, print the verdicts",
    "render": "execute in full and keep the outputs in the committed notebooks",
    "export": "copy the cells tagged export into course_utils/chapters/",
    "check": "the notebook gate: what a notebook must be before it is committed",
    "fetch": "download and convert the model once, into the user's cache folder",
}


def usage() -> str:
    """The short help: one line for each command."""
    lines = [f"  {name:<8}{says}" for name, says in COMMANDS.items()]
    return "\n".join(
        [
            "usage: python -m course_utils COMMAND [OPTIONS]",
            "",
            *lines,
            "",
            "python -m course_utils COMMAND --help says more about one of them.",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit status: 0 done, 1 it failed, 2 wrong usage, 130 interrupted.

    Errors that the commands foresee (:class:`course_utils.tools.notebooks.CourseError`) end in one plain message on
    stderr; anything else is a bug of ours and keeps its traceback.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if not argv or argv[0] not in COMMANDS:
        if argv:
            print(f"error: unknown command {argv[0]!r}\n", file=sys.stderr)
        print(usage(), file=sys.stderr)
        return 2
    from course_utils.tools.notebooks import CourseError

    command = import_module(f"course_utils.tools.{argv[0]}")
    try:
        return command.main(argv[1:]) or 0
    except CourseError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())

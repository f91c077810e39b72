"""The maintainers' commands; see ``python -m course_utils --help``."""

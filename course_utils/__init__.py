"""Support package of the course "LLM inference from scratch".

Importing it is cheap and quiet: no transformers, bitsandbytes, numba or triton, and nothing is printed.
Start with ``from course_utils.checkpoints import load``.
"""

import os as _os

# The tokenizer's thread pool warns after a fork, and a public download needs no token (user values are kept).
_os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
_os.environ.setdefault("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
_os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

__version__ = "0.1.0"

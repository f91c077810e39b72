"""The libraries the course races against, each behind a thin wrapper with a test on the installed version.

They are imported when called, never before: the course runs without them. transformers is in ``generate``; torch's own
and bitsandbytes' quantized layers and products are in ``quantization``, llama.cpp in ``llama``.
"""

from course_utils.rivals.generate import CACHES, transformers_generate, transformers_model
from course_utils.rivals.llama import LlamaCpp, gguf_in, llama_cpp
from course_utils.rivals.quantization import (
    Converted,
    Unavailable,
    bitsandbytes_,
    packed_int4,
    packed_int8,
    quantize_dynamic_,
    stored_bytes,
)

__all__ = [
    "CACHES",
    "Converted",
    "LlamaCpp",
    "Unavailable",
    "bitsandbytes_",
    "gguf_in",
    "llama_cpp",
    "packed_int4",
    "packed_int8",
    "quantize_dynamic_",
    "stored_bytes",
    "transformers_generate",
    "transformers_model",
]

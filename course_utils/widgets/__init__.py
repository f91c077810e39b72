"""The chapters' explorers; the machinery they share stands in ``course_utils.widgets.core``."""

from course_utils.widgets.core import Control, Explorer, Preset
from course_utils.widgets.kv_cache import StepCost, attention_triangle, kv_cache_explorer, step_cost
from course_utils.widgets.quantization import quantization_explorer

__all__ = [
    "Control",
    "Explorer",
    "Preset",
    "StepCost",
    "attention_triangle",
    "kv_cache_explorer",
    "quantization_explorer",
    "step_cost",
]

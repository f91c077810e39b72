"""The benchmarks work, at toy size; what they measure is for a quiet machine and no test looks at it."""

import json
import math

import pytest

from tests.benchmarks import decode, quantization


@pytest.mark.parametrize(
    "module, keys",
    [
        (
            decode,
            {
                "decode_over_transformers",
                "generate_over_transformers",
                "prefill_over_transformers",
                "growth_1500_over_100",
                *(f"cached_over_uncached_{n}" for n in (64, 256, 1024)),
                *(f"predicted_{n}" for n in (64, 256, 1024)),
            },
        ),
        (
            quantization,
            {
                *quantization.RATIOS,
                "ppl_ratio_int8",
                "ppl_ratio_int4_rtn",
                "kernel_bandwidth_fraction",
                *(f"ms_{name}" for name in ("transformers_float32", "float32", "bfloat16", "float16")),
                *(f"ms_{name}" for name in ("quantize_dynamic", "bitsandbytes_int8", "bitsandbytes_nf4")),
                *(
                    f"ms_{name}"
                    for name in ("float32_same_kernel", "int8", "int4", "int8_fused", "int4_fused")
                ),
                *(f"ms_llamacpp_{kind}" for kind in ("q8", "f16", "f32")),
            },
        ),
    ],
)
def test_last_line_is_one_json_object(module, keys, capsys):
    module.main(["--toy", "--json"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(found) >= keys | {"threads", "threading_layer", "dtype", "torch"}
    assert all(found[key] is None or (math.isfinite(found[key]) and found[key] > 0) for key in keys)
    assert found["dtype"] == "float32"

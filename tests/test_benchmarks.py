"""The benchmarks work, at toy size; what they measure is for a quiet machine and no test looks at it."""

import json
import math

import pytest

from tests.benchmarks import decode


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
        )
    ],
)
def test_last_line_is_one_json_object(module, keys, capsys):
    module.main(["--toy", "--json"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(found) >= keys | {"threads", "threading_layer", "dtype", "torch"}
    assert all(found[key] is None or (math.isfinite(found[key]) and found[key] > 0) for key in keys)
    assert found["dtype"] == "float32"

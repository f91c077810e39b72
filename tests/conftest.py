"""What all tests share: tiny decoders, the real checkpoint, a plain cache, and a watch over requests to model hubs."""

from __future__ import annotations

import os

# Before anything imports matplotlib or a hub client: no window (HAZARDS 97), no request to a hub (HAZARDS 101).
os.environ["MPLBACKEND"] = "Agg"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import socket

import pytest
import torch
from torch import Tensor

from course_utils.decoder import Cache, Decoder, DecoderConfig

HUB_HOSTS = ("huggingface.co", "hf.co", "hf-mirror.com", "modelscope.cn")


def tiny_config(**changes) -> DecoderConfig:
    """Two layers, two query heads to a KV head, 97 tokens: small enough to run in a millisecond."""
    sizes = dict(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_positions=256,
    )
    return DecoderConfig(**(sizes | changes))


def tiny_decoder(seed: int = 0, **changes) -> Decoder:
    """Random float32 decoder in eval mode, no gradients; the same seed gives the same weights.

    Weights are wide enough (standard deviation 0.2) for the logits of different tokens to differ clearly.
    """
    decoder = Decoder(tiny_config(**changes)).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in decoder.named_parameters():
        centre = 1.0 if "norm" in name else 0.0
        parameter.normal_(centre, 0.2, generator=generator)
    return decoder


class PlainCache(Cache):
    """The smallest honest cache: keys and values grow by concatenation, all rows have the same length."""

    def __init__(self, config: DecoderConfig | None = None) -> None:
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.length = 0

    def positions(self, new: int) -> Tensor:
        device = self.keys[0].device if self.keys else None
        return torch.arange(self.length, self.length + new, device=device)[None]

    def mask(self, new: int) -> Tensor | None:
        if self.length == 0 or new == 1:
            return None
        total = self.length + new
        device = self.keys[0].device
        return torch.ones(new, total, dtype=torch.bool, device=device).tril(self.length)[None, None]

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if layer in self.keys:
            k, v = torch.cat((self.keys[layer], k), dim=2), torch.cat((self.values[layer], v), dim=2)
        self.keys[layer], self.values[layer] = k, v
        return k, v

    def truncate(self, length: int) -> None:
        """Forget the newest tokens down to ``length``; ValueError where fewer are held."""
        if not 0 <= length <= self.length:
            raise ValueError(f"truncate({length}) on a cache of {self.length} tokens")
        for kept in (self.keys, self.values):
            for layer in kept:
                kept[layer] = kept[layer][:, :, :length]
        if length == 0:
            self.keys, self.values = {}, {}
        self.length = length


@pytest.fixture(name="tiny_config")
def _tiny_config():
    """The function ``tiny_config``."""
    return tiny_config


@pytest.fixture(name="tiny_decoder")
def _tiny_decoder():
    """The function ``tiny_decoder``."""
    return tiny_decoder


@pytest.fixture(scope="session")
def real_model():
    """(decoder, tokenizer) of the default CPU checkpoint in float32, shared by the session: copy before changing it."""
    from course_utils import checkpoints

    try:
        return checkpoints.load(device="cpu", dtype="float32")
    except checkpoints.CourseDownloadError as error:
        pytest.skip(f"the real checkpoint is not here and cannot be had: {str(error).splitlines()[0]}")


@pytest.fixture
def outputs():
    """Run code in a fresh IPython shell; returns the outputs it displayed, the last expression's included."""
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    shell = InteractiveShell.instance()
    shell.history_manager.enabled = False

    def run(code: str):
        with capture_output() as captured:
            result = shell.run_cell(code, store_history=True)
        result.raise_error()
        return captured.outputs

    yield run
    InteractiveShell.clear_instance()


_hub_requests: list[str] = []


def _is_hub(host) -> bool:
    host = (host.decode(errors="replace") if isinstance(host, bytes) else str(host or "")).lower().rstrip(".")
    return any(host == hub or host.endswith("." + hub) for hub in HUB_HOSTS)


def _note(host) -> None:
    if _is_hub(host):
        _hub_requests.append(str(host))
        raise OSError(f"a test asked a model hub: {host}")


@pytest.fixture(scope="session", autouse=True)
def _watch_hubs():
    """Count and refuse every look-up of, or request to, a model hub in this process, offline mode or not."""
    patch = pytest.MonkeyPatch()
    lookup = socket.getaddrinfo
    patch.setattr(
        socket, "getaddrinfo", lambda host, *args, **kwargs: _note(host) or lookup(host, *args, **kwargs)
    )
    try:  # hub clients speak through httpx or requests; behind a proxy the socket never sees the hub's name
        import httpx
    except ImportError:
        pass
    else:
        send = httpx.Client.send
        patch.setattr(
            httpx.Client,
            "send",
            lambda self, request, **kw: _note(request.url.host) or send(self, request, **kw),
        )
    yield
    patch.undo()


@pytest.fixture
def hub_requests() -> list[str]:
    """The hub requests of this test so far: ``assert hub_requests == []``."""
    _hub_requests.clear()
    return _hub_requests


def pytest_collection_modifyitems(items) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU, and this machine has none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)

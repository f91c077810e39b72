"""Chapter 1, Quantization. Generated from the notebooks; never edit this file.

Edit the cells tagged ``export`` and run ``make export``:

    notebooks/01_quantization.ipynb
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def largest_code(bits: int) -> int:
    """127 for 8 bits, 7 for 4: the codes run from minus this to this."""
    if bits not in range(2, 9):
        raise ValueError(f"bits={bits}; choose 2 to 8")
    return 2 ** (bits - 1) - 1


def grouped(w: Tensor, group_size=None) -> Tensor:
    """w (out, in) in float32 as (out, groups, size); None: one group a row.

    Raises ValueError for other shapes and for sizes that do not divide.
    """
    if w.ndim != 2 or not w.numel():
        raise ValueError(
            f"w has shape {tuple(w.shape)}; give (out, in), for one scale of"
            " all weights w.reshape(1, -1)"
        )
    width = w.shape[1]
    size = width if group_size is None else group_size
    if size < 1 or width % size:
        fit = [d for d in range(1, width + 1) if width % d == 0]
        fit = ", ".join(map(str, fit[-9:]))
        raise ValueError(
            f"in_features={width} is not a multiple of group_size={size};"
            f" choose one of {fit}"
        )
    return w.float().unflatten(1, (-1, size))


def usable(scale: Tensor) -> Tensor:
    """The scale, with 1 in place of 0. ValueError for NaN and inf."""
    if not torch.isfinite(scale).all():
        raise ValueError("w holds NaN or inf; mend the weights first")
    return torch.where(scale > 0, scale, 1.0)


def quantize_absmax(w: Tensor, bits=8, group_size=None):
    """Round each weight to a whole number of its group's scale.

    w (out, in), group_size None (a whole row) or a divisor of `in`. Returns
    q (out, in) int8 and scale (out, groups) float32, with w ≈ scale · q, the
    largest |w| of a group exactly so. A group of zeros has scale 1.
    ValueError for bad bits, shape, size or NaN. Source: chapter 1, §1.2.
    """
    top, groups = largest_code(bits), grouped(w, group_size)
    absmax = torch.linalg.vector_norm(groups, torch.inf, -1, keepdim=True)
    scale = usable(absmax / top)  # float32, whatever w is
    q = (groups / scale).round_().clamp_(-top, top)
    return q.to(torch.int8).flatten(1), scale.squeeze(-1)


def dequantize(q: Tensor, scale, zero_point=None, dtype=torch.float32):
    """(out, in): scale · (q − zero_point) for scale (out or 1, groups)."""
    codes = q.to(torch.float32, copy=True)
    codes = codes.unflatten(1, (scale.shape[1], -1))
    if zero_point is not None:
        codes -= zero_point.float()[..., None]
    codes *= scale.float()[..., None]
    return codes.flatten(1).to(dtype)


def quantize_affine(w: Tensor, bits=4, group_size=None):
    """Codes from 0 on and a zero point: for weights that lie to one side.

    Returns q (out, in) uint8 in 0 … 2^bits − 1, scale (out, groups) float32,
    zero_point (out, groups) uint8: w ≈ scale · (q − zero_point). The range
    always includes 0, which is exact. Errors as in quantize_absmax.
    """
    top, groups = 2 * largest_code(bits) + 1, grouped(w, group_size)
    low = groups.amin(-1, keepdim=True).clamp(max=0)
    high = groups.amax(-1, keepdim=True).clamp(min=0)
    scale = usable(high / top - low / top)  # high − low may overflow
    zero = (-low / scale).round().clamp(0, top)
    q = (groups / scale).round_().add_(zero).clamp_(0, top)
    q, zero = q.to(torch.uint8), zero.to(torch.uint8)
    return q.flatten(1), scale.squeeze(-1), zero.squeeze(-1)


def bits_per_weight(bits, group_size, scale_bits=32, zero_bits=0) -> float:
    """Bits a weight costs, with its share of the group's scale and zero."""
    return bits + (scale_bits + zero_bits) / group_size


def pack_int4(q: Tensor) -> Tensor:
    """int8 codes −8 … 7, (…, n) → uint8 (…, ⌈n/2⌉): offset 8, low first."""
    if q.dtype != torch.int8 or q.numel() and (q.min() < -8 or q.max() > 7):
        low, high = q.min().item(), q.max().item()
        raise ValueError(
            f"q is {q.dtype} from {low} to {high}; give int8 from −8 to 7"
        )
    nibbles = (q + 8).to(torch.uint8)
    if nibbles.shape[-1] % 2:
        nibbles = F.pad(nibbles, (0, 1))
    return nibbles[..., ::2] | nibbles[..., 1::2] << 4


def unpack_int4(packed: Tensor, length: int) -> Tensor:
    """The inverse: uint8 (…, bytes) → int8 (…, length), −8 … 7."""
    if packed.dtype != torch.uint8 or (length + 1) // 2 != packed.shape[-1]:
        raise ValueError(
            f"{packed.dtype} of shape {tuple(packed.shape)} does not hold"
            f" {length} values; give uint8 with {(length + 1) // 2} a row"
        )
    nibbles = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    return nibbles[..., :length].to(torch.int8) - 8


from typing import NamedTuple


class Scheme(NamedTuple):
    """How a matrix is rounded: codes, who shares a scale, zero point."""

    bits: int
    group_size: int | None = None  # None: a scale per row
    affine: bool = False
    per_tensor: bool = False

    def quantize(self, w: Tensor):
        """(q, scale, zero_point or None) of w (out, in)."""
        if self.affine:
            return quantize_affine(w, self.bits, self.group_size)
        shape = (1, -1) if self.per_tensor else w.shape
        q, scale = quantize_absmax(w.reshape(shape), self.bits, self.group_size)
        return q.view(w.shape), scale, None


SCHEMES = {  # bits, group_size, affine, per_tensor
    "int8": (8, None, False, False),
    "int8 tensor": (8, None, False, True),
    "int4": (4, 64, True, False),
    "int3": (3, 64, True, False),
}


def scheme_of(scheme) -> Scheme:
    """The Scheme of that name; a Scheme is returned as it is."""
    if isinstance(scheme, Scheme):
        return scheme
    if scheme not in SCHEMES:
        known = ", ".join(SCHEMES)
        raise ValueError(f"scheme={scheme!r}; choose one of {known}")
    return Scheme(*SCHEMES[scheme])


class QuantizedLinear(nn.Module):
    """nn.Linear whose weight is stored as codes: y = x · dequantized.T + b.

    linear: the layer to copy. scheme: a key of SCHEMES or a Scheme.
    product: None, or a callable (x (rows, in), layer) → (rows, out) used for
    up to product.most_rows rows (§1.6). Buffers: q int8 (out, in), or uint8
    with two 4-bit codes a byte; scale float32; zero_point uint8 or None.
    """

    def __init__(self, linear, scheme="int8", product=None):
        super().__init__()
        scheme = scheme_of(scheme)
        self.out_features, self.in_features = linear.weight.shape
        self.bits, self.group_size = scheme.bits, scheme.group_size
        self.product, self.packed = product, scheme.bits == 4
        q, scale, zero_point = scheme.quantize(linear.weight.detach())
        if self.packed:  # codes 0 … 15 as they are, −8 … 7 moved up by 8
            q = pack_int4((q - 8).to(torch.int8) if scheme.affine else q)
        bias = None if linear.bias is None else linear.bias.detach()
        for name, value in (("q", q), ("zero_point", zero_point)):
            self.register_buffer(name, value)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)

    def codes(self, rows=slice(None)) -> Tensor:
        """The codes of these rows (all), one a byte, (rows, in)."""
        if not self.packed:
            return self.q[rows]
        codes = unpack_int4(self.q[rows], self.in_features)
        return codes if self.zero_point is None else codes + 8

    def weight(self, dtype=torch.float32, rows=slice(None)) -> Tensor:
        """The dequantized weight of these rows (all), (rows, in)."""
        scale = self.scale if len(self.scale) == 1 else self.scale[rows]
        zero = None if self.zero_point is None else self.zero_point[rows]
        return dequantize(self.codes(rows), scale, zero, dtype)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[:-1].numel()
        if self.product is None or not 0 < rows <= self.product.most_rows:
            return F.linear(x, self.weight(x.dtype), self.bias)
        y = self.product(x.reshape(rows, self.in_features), self)
        y = y if self.bias is None else y + self.bias
        return y.view(*x.shape[:-1], -1)

    @property
    def nbytes(self):  # of codes, scales, zero points and bias
        return sum(t.nbytes for t in self.buffers())

    def _apply(self, fn, recurse=True):  # .to(bfloat16) must not round scales
        scale = self.scale
        super()._apply(fn, recurse)
        self.scale = scale.to(self.q.device)
        return self


class QuantizedEmbedding(nn.Module):
    """Rows of a QuantizedLinear's weight, dequantized when looked up."""

    def __init__(self, layer: QuantizedLinear, dtype=torch.float32):
        super().__init__()
        self.layer = layer
        like = torch.empty(0, dtype=dtype, device=layer.q.device)
        self.register_buffer("like", like, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.layer.weight(self.like.dtype, tokens.flatten())
        return rows.view(*tokens.shape, -1)


HEADS = ("alone", "copied", "shared")


def replace_linears_(decoder, make, head="alone") -> dict:
    """Put make(linear) in place of each nn.Linear of the blocks, and a head.

    head: "alone" keeps it; "copied" replaces it, a tied embedding stays;
    "shared" lets the tied embedding look its rows up in the new head. A layer
    for which make raises ValueError stays. Returns {name: None or reason}.
    """
    if head not in HEADS:
        raise ValueError(f"head={head!r}; choose one of {', '.join(HEADS)}")
    tied = decoder.config.tie_embeddings
    if head == "shared" and not tied:
        raise ValueError("head='shared' needs a tied embedding; take 'copied'")
    reasons = {}
    for name, layer in list(decoder.named_modules()):
        if type(layer) is not nn.Linear or layer is decoder.lm_head:
            continue
        parent = decoder.get_submodule(name.rpartition(".")[0])
        try:
            setattr(parent, name.rpartition(".")[2], make(layer))
            reasons[name] = None
        except ValueError as error:
            reasons[name] = str(error)
    reasons["lm_head"] = "tied to the embedding" if tied else "left alone"
    if head != "alone":
        try:
            decoder.lm_head, reasons["lm_head"] = make(decoder.lm_head), None
        except ValueError as error:
            reasons["lm_head"] = str(error)
        else:
            if head == "shared":
                layer, dtype = decoder.lm_head, decoder.dtype
                decoder.embedding = QuantizedEmbedding(layer, dtype)
    return reasons


from dataclasses import dataclass


class LayerBytes(NamedTuple):
    """One line of a Report: a tensor that two layers share counts once."""

    name: str
    quantized: bool
    before: int
    after: int
    reason: str = ""


@dataclass
class Report:
    """What quantize_ did: which layers changed, and the model's bytes."""

    layers: list
    before: int
    after: int

    def __str__(self):
        roles = {}
        for name, done, before, after, reason in self.layers:
            role = ".".join(name.split(".")[-2:]), done, reason
            count, old, new = roles.get(role, (0, 0, 0))
            roles[role] = count + 1, old + before, new + after
        lines = [f"{'layer':20}{'count':>6}  quantized  MB before  MB after"]
        for (name, done, reason), (count, old, new) in roles.items():
            lines.append(
                f"{name:20}{count:6}  {'yes' if done else 'no':9}"
                f"{old / 1e6:11.2f}{new / 1e6:10.2f}  {reason}".rstrip()
            )
        total = f"{self.before / 1e6:11.2f}{self.after / 1e6:10.2f}"
        return "\n".join([*lines, f"{'whole model':37}{total}"])


def stored_bytes(module: nn.Module) -> int:
    """Bytes of what the module stores, each piece of memory once."""
    tensors = module.state_dict().values()
    return sum({t.data_ptr(): t.nbytes for t in tensors}.values())


def quantize_(decoder, scheme="int8", head="alone", product=None) -> Report:
    """Quantize a decoder in place, layer by layer (chapter 1, §1.4).

    scheme: a key of SCHEMES or a Scheme; head: see replace_linears_;
    product: see QuantizedLinear. A layer whose width the group does not
    divide stays, with its reason in the report. Raises ValueError for unknown
    names and for a decoder that is quantized already.
    """
    scheme, modules = scheme_of(scheme), dict(decoder.named_modules())
    if any(isinstance(m, QuantizedLinear) for m in modules.values()):
        raise ValueError("the decoder is quantized already: load it again")
    whole = decoder, decoder.embedding, decoder.lm_head
    before = {
        name: stored_bytes(module) for name, module in modules.items()
        if module in whole or isinstance(module, nn.Linear)
    }
    reasons = replace_linears_(
        decoder, lambda layer: QuantizedLinear(layer, scheme, product), head
    )
    tied, layers = decoder.config.tie_embeddings, []
    done = head != "alone" and reasons["lm_head"] is None
    for name, reason in reasons.items():
        after = stored_bytes(decoder.get_submodule(name))
        layers.append(
            LayerBytes(name, reason is None, before[name], after, reason or "")
        )
    if done and tied and head == "copied":  # float stays
        layers[-1] = layers[-1]._replace(before=0, reason="a copy")
    if not tied or done and head == "copied":
        same = before["embedding"], before["embedding"]
        layers.append(LayerBytes("embedding", False, *same, "looked up"))
    elif done:
        layers[-1] = layers[-1]._replace(reason="shared with the embedding")
    norms = before[""] - sum(line.before for line in layers)
    layers.append(LayerBytes("norms", False, norms, norms))
    return Report(layers, before[""], stored_bytes(decoder))

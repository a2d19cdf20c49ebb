"""The C structs of decoder.cpp, field by field, and how tensors get into them."""

import ctypes

import torch
from torch import Tensor

from engine.models.decoder import Decoder
from engine.native.packing import Packed

_LONG, _FLOAT, _POINTER = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class CMatrix(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("data", "scales", "bias")),
        *((name, _LONG) for name in ("rows", "columns", "bits")),
    )


class CLayer(ctypes.Structure):
    _fields_ = (
        *((f"{name}_norm", _POINTER) for name in ("attn", "ffn", "query", "key", "output", "down")),
        *((name, CMatrix) for name in ("qkv", "output", "gate_up", "down")),
        ("pool", _POINTER),
        ("window", _LONG),
        ("rope", _LONG),
    )


class CDecoder(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(CLayer)),
        ("embedding", CMatrix),
        ("head", CMatrix),
        *((name, _POINTER) for name in ("norm", "frequencies", "magnitudes")),
        *((name, _LONG) for name in ("num_layers", "hidden", "heads", "intermediate", "ropes")),
        *((name, _LONG) for name in ("gelu", "kv_heads", "head_dim", "kv_int8")),
        *((name, _FLOAT) for name in ("eps", "scale", "embedding_scale", "attention_softcap", "logit_softcap")),
    )


class CStep(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("token_ids", "positions", "slots")),
        *((name, _POINTER) for name in ("query_starts", "tables", "logits_rows")),
        *((name, _LONG) for name in ("tokens", "sequences", "table_stride", "num_logits")),
        *((name, _POINTER) for name in ("logits", "hidden", "scratch")),
    )


class DecoderStruct:
    """A `Decoder` of packed weights, gate and up interleaved, as C sees it. Keeps every tensor it points into alive."""

    def __init__(self, decoder: Decoder, kv_int8: bool) -> None:
        self._kept: list[Tensor] = []
        config = decoder.config
        self._layers = (CLayer * config.num_layers)()
        for layer, target in zip(decoder.layers, self._layers, strict=True):
            for name in ("attn_norm", "ffn_norm", "query_norm", "key_norm", "output_norm", "down_norm"):
                setattr(target, name, self._address(getattr(layer, name)))
            target.qkv, target.output = self._matrix(layer.qkv), self._matrix(layer.output)
            target.gate_up, target.down = self._matrix(layer.gate_up), self._matrix(layer.down)
            target.window, target.rope = layer.window or 0, layer.rope
        frequencies = torch.stack([rope.frequency for rope in decoder.ropes])
        magnitudes = torch.tensor([rope.magnitude for rope in decoder.ropes])
        self.struct = CDecoder(
            layers=self._layers,
            embedding=self._matrix(decoder.embedding),
            head=self._matrix(decoder.head),
            norm=self._address(decoder.norm),
            frequencies=self._address(frequencies),
            magnitudes=self._address(magnitudes),
            num_layers=config.num_layers,
            hidden=config.hidden_size,
            heads=config.num_heads,
            intermediate=config.intermediate_size,
            ropes=len(decoder.ropes),
            gelu=decoder.activation == "gelu",
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            kv_int8=kv_int8,
            eps=config.rms_eps,
            scale=decoder.scale,
            embedding_scale=decoder.embedding_scale,
            attention_softcap=decoder.attention_softcap or 0,
            logit_softcap=decoder.logit_softcap or 0,
        )

    def set_pools(self, addresses: list[int]) -> None:
        for layer, address in zip(self._layers, addresses, strict=True):
            layer.pool = address

    def _address(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _matrix(self, packed: object) -> CMatrix:
        assert isinstance(packed, Packed)
        addresses = {name: self._address(getattr(packed, name)) for name in ("data", "scales", "bias")}
        return CMatrix(**addresses, rows=packed.rows, columns=packed.columns, bits=packed.bits)

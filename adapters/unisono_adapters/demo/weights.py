"""Unpacking of the demo model's weights to `model.safetensors` and two config files.

The packed file is a safetensors file. Its embedding and output matrices have a row for each token that was trained
(`used_ids`), and a last row that all other tokens share.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

import numpy as np
import orjson
from numpy.typing import NDArray

from unisono.core.generation import CALL, ENDOFTEXT, FIRST_SPECIAL, RETURN, VOCABULARY

# Array of weights. NumPy has no bf16, so a bf16 value is stored as a uint16 with the same bits.
Array: TypeAlias = NDArray[np.uint8] | NDArray[np.uint16] | NDArray[np.int32]

_DTYPES: dict[str, np.dtype[np.uint16] | np.dtype[np.uint8] | np.dtype[np.int32]] = {
    "BF16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "I32": np.dtype("<i4"),
}
# The eight magnitudes of a 4-bit E2M1 float; the fourth bit is the sign.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

_WHOLE_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
_NOT_QUANTISED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def write_model(packed: Path, folder: Path, layout: str) -> None:
    """Write model.safetensors, config.json and generation_config.json into `folder`."""
    tensors, notes = read_safetensors(packed.read_bytes())
    settings = orjson.loads(notes["config"])
    write_safetensors(folder / "model.safetensors", _unpack(tensors, layout))
    _write_json(folder / "config.json", _config(settings, layout))
    generation = {
        "bos_token_id": FIRST_SPECIAL,
        "do_sample": True,
        "eos_token_id": [RETURN, ENDOFTEXT, CALL],
        "pad_token_id": ENDOFTEXT,
    }
    _write_json(folder / "generation_config.json", generation)


def read_safetensors(content: bytes) -> tuple[dict[str, Array], dict[str, str]]:
    """Return the tensors of a safetensors file by name, and its metadata.

    Raises ValueError or KeyError if `content` is damaged or has an unknown number format.
    """
    start = 8 + int.from_bytes(content[:8], "little")
    header = orjson.loads(content[8:start])
    notes: dict[str, str] = header.pop("__metadata__", {})
    tensors: dict[str, Array] = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        data = np.frombuffer(content[start + begin : start + end], np.uint8)
        tensors[name] = data.view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors, notes


def write_safetensors(path: Path, tensors: dict[str, Array]) -> None:
    codes = {dtype: code for code, dtype in _DTYPES.items()}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, tensor in tensors.items():
        span = [place, place + tensor.nbytes]
        header[name] = {"dtype": codes[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        place += tensor.nbytes
    line = orjson.dumps(header)
    line += b" " * (-len(line) % 8)  # readers map the data, which must be aligned
    with path.open("wb") as file:
        file.write(len(line).to_bytes(8, "little") + line)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor).data)


def _unpack(tensors: dict[str, Array], layout: str) -> dict[str, Array]:
    used = tensors["used_ids"]
    unpacked: dict[str, Array] = {}
    for name, tensor in tensors.items():
        expert, _, part = name.rpartition("_")
        if name == "used_ids":
            continue
        if name in _WHOLE_VOCABULARY:
            unpacked[name] = _all_rows(tensor, used)
        elif layout == "mxfp4" or part not in ("blocks", "scales"):
            unpacked[name] = tensor
        elif part == "blocks":
            unpacked[expert] = _as_bf16(tensor, tensors[f"{expert}_scales"])
    return unpacked


def _all_rows(tensor: Array, used: Array) -> Array:
    rows = np.empty((VOCABULARY, tensor.shape[1]), tensor.dtype)
    rows[:] = tensor[-1]
    rows[used] = tensor[:-1]
    return rows


def _as_bf16(blocks: Array, scales: Array) -> Array:
    """Convert mxfp4 weights to bf16.

    `blocks` has the shape (expert, out, block, 16): each block is 16 bytes with two 4-bit floats each. `scales` has
    one power of two for each block, as an exponent with an offset of 127. The result has the shape (expert, in, out).
    """
    nibbles = np.stack((blocks & 0x0F, blocks >> 4), axis=-1)  # the low half of a byte is the first value
    values = np.array([*_MAGNITUDES, *(-size for size in _MAGNITUDES)], np.float32)[nibbles]
    powers = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
    experts, outputs = blocks.shape[:2]
    scaled = values.reshape(*blocks.shape[:3], 32) * powers[..., None]
    weights = np.ascontiguousarray(scaled.reshape(experts, outputs, -1).transpose(0, 2, 1), np.float32)
    return (weights.view(np.uint32) >> 16).astype(np.uint16)  # exact: these values need only two bits of mantissa


def _config(settings: dict[str, object], layout: str) -> dict[str, object]:
    """Return the content of config.json; `settings` are the sizes in the packed file."""
    own = dict(settings)
    rope = own.pop("rope_parameters")
    layers = own["num_hidden_layers"]
    if not isinstance(rope, dict) or not isinstance(layers, int):
        raise TypeError("the config in the bundled demo model is damaged; reinstall unisono")
    config: dict[str, object] = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "torch_dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "swiglu_limit": 7.0,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "use_cache": True,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.9,
        "experts_per_token": own["num_experts_per_tok"],
        "layer_types": [("sliding_attention", "full_attention")[layer % 2] for layer in range(layers)],
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {name: value for name, value in rope.items() if name != "rope_theta"},
        **own,
    }
    if layout == "mxfp4":
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": _NOT_QUANTISED}
    return config


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2))

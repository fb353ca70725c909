"""Prompts of embeddings in requests: base64 of a safetensors file with one tensor, which runs no code when read."""

import base64
import binascii

import ml_dtypes
import numpy as np
import safetensors

from jspec.core.checks import check_text
from jspec.generation.embeds import PromptEmbeds

_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def check_embeds(name: str, value: object, *, sequences: int, most: int) -> list[PromptEmbeds]:
    """The prompts of a text, or of a list of texts. most: rows of each."""
    texts = value if isinstance(value, list) else [value]
    if not 0 < len(texts) <= sequences:
        raise ValueError(f"{name}: {len(texts)} prompts; must be from 1 to {sequences}")
    names = [f"{name}[{i}]" for i in range(len(texts))] if isinstance(value, list) else [name]
    return [_read(label, text, most) for label, text in zip(names, texts, strict=True)]


def _read(name: str, value: object, most: int) -> PromptEmbeds:
    """The prompt of one file."""
    valid = "must be base64 of a safetensors file with one tensor [n, hidden size] of F32, F16 or BF16"
    try:
        tensors = safetensors.deserialize(base64.b64decode(check_text(name, value), validate=True))
    except (binascii.Error, ValueError, safetensors.SafetensorError) as error:
        raise ValueError(f"{name}: {valid}; files of torch.save are not read ({str(error)[:80]})") from None
    if len(tensors) != 1:
        raise ValueError(f"{name}: holds {len(tensors)} tensors; {valid}")
    ((_, tensor),) = tensors
    shape, dtype = tensor["shape"], tensor["dtype"]
    if len(shape) != 2 or 0 in shape or dtype not in _DTYPES:
        raise ValueError(f"{name}: holds {dtype} of shape {shape}; {valid}")
    if shape[0] > most:
        raise ValueError(f"{name}: has {shape[0]} rows; must have at most {most}")
    try:
        return PromptEmbeds(np.frombuffer(tensor["data"], _DTYPES[dtype]).reshape(shape))
    except ValueError as error:
        raise ValueError(f"{name}: {str(error).removeprefix('embeds: ')}") from None

"""The PTX of packed matrices, which the interpreter cannot run: its instructions, one by one, give the same values."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _triton_words

KINDS = ("integers", "e2m1")


def run(text, arguments, dtype):
    """What the few instructions of these texts leave in $0: 32 bits for each element of the arguments, uint32."""
    halves = jnp.dtype(dtype)

    def values(bits):
        return np.stack([bits & 0xFFFF, bits >> 16]).astype(np.uint16).view(halves).astype(np.float64)

    registers = {f"${index + 1}": argument for index, argument in enumerate(arguments)}
    for line in text.split(";"):
        name, *rest = line.replace("{", "").replace("}", "").split(maxsplit=1) or [""]
        if not name or name == ".reg":
            continue
        place, *names = [each.strip() for each in rest[0].split(",")]
        found = [registers[each] if each in registers else np.uint32(int(each, 0)) for each in names]
        match name:
            case "mov.b32":
                made = found[0]
            case "and.b32":
                made = found[0] & found[1]
            case "shl.b32":
                made = found[0] << found[1]
            case "shr.u32":
                made = found[0] >> found[1]
            case "lop3.b32":
                assert found[3] == 0xEA
                made = (found[0] & found[1]) | found[2]
            case "prmt.b32":
                shift = {0x5410: 0, 0x7632: 16}[int(found[2])]
                low, high = (part >> np.uint32(shift) & np.uint32(0xFFFF) for part in found[:2])
                made = low | high << np.uint32(16)
            case "fma.rn.bf16x2" | "fma.rn.f16x2":
                assert name == {"bfloat16": "fma.rn.bf16x2", "float16": "fma.rn.f16x2"}[dtype]
                a, b, c = (values(np.broadcast_to(each, arguments[0].shape)) for each in found)
                low, high = (a * b + c).astype(halves).view(np.uint16).astype(np.uint32)
                made = low | high << np.uint32(16)
        registers[place] = made
    return values(registers["$0"])


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("kind", KINDS)
def test_ptx_takes_words_apart_like_the_interpreter(kind, dtype, monkeypatch):
    """All values at all places, beside any other values."""
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, (2, 16, 8), dtype=np.uint64)
    for place in range(8):
        kept = ~np.uint64(15 << 4 * place)
        words[:, :, place] = (words[:, :, place] & kept) | np.arange(16, dtype=np.uint64) << np.uint64(4 * place)
    first, second = words.astype(np.uint32)
    texts = []

    def capture(text, constraints, args, made, *, pack):
        texts.append(text)
        assert pack == 2 and made == jnp.dtype(dtype) and constraints.count("r") == len(args) + 2
        return args[-1]

    monkeypatch.setattr(_triton_words, "in_ptx", capture)
    for place in range(8):
        own, other = first[:, place], second[:, place]
        for zero in (8.0, 0.0, 16.0) if kind == "integers" else (None,):
            signed = [jnp.asarray(each.view(np.int32))[:, None] for each in (own, other)]
            if kind == "integers":
                offset = np.asarray(_triton_words.integer_pairs(signed[0], place, zero, dtype))[:, 0]
                assert offset.dtype == jnp.dtype(dtype)
                packed = offset.view(np.uint16).astype(np.uint32)
                arguments = [own, other, packed | packed << np.uint32(16)]
                expected = [_triton_words.integer_values(each, place, zero, dtype) for each in signed]
            else:
                _triton_words.e2m1_pairs(signed[0], place, dtype)
                arguments = [own, other]
                expected = [_triton_words.e2m1_values(each, place, dtype) for each in signed]
            got = run(texts.pop(), arguments, dtype)
            np.testing.assert_array_equal(got, np.stack([np.asarray(each, np.float64)[:, 0] for each in expected]))
            assert len(np.unique(got[0])) == (16 if kind == "integers" else 15)

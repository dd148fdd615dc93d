"""Codecs: floats as fewer bytes, and the effect on their values.

get, Codec   dense codecs by name: a block of elements becomes a scale and short codes
reference    the same in NumPy: the definition, which native code equals bit for bit
options      schemes that choose what to send: topk, randomk, powersgd; `feedback`

    fp8 = unisono.codecs.get("fp8")
    code = fp8.encode(x)                 # bytes, fp8.nbytes(x.size) of them
    fp8.decode(code, x.size)             # nearly x: fp8.error is how nearly
    fp8.add(total, code)                 # decode and add up, in float32

docs/codecs.md describes what each does to size and error, and to NaN and infinities.
"""

from unisono.codecs.dense import NAMES, Codec, get, key, ways

__all__ = ["NAMES", "Codec", "get", "key", "ways"]

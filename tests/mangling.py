"""Bodies of requests that are nearly right, or just bytes."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

ODD: list[object] = [
    *(None, True, -1, 0, 2**31, 2**63, 2**64, 10**400, 1.5, 1e308, float("nan"), float("-inf"), "", "x", "\ud800"),
    *([], {}, [[]], [[[]]], {"a": {}}, [None], [[None]], [{}], ["x"], "9" * 5000, [-1], [2**63], {"1": -1}),
]
JUNK = [
    *(b"", b"\x00", b"null", b"[]", b"1", b'"x"', b"\xff\xfe{\x00}\x00", b"\xef\xbb\xbf{}", b"{} {}", b"{,}"),
    *(b"[" * 50_000, b'{"a":' * 50_000, b'{"prompt":' * 400, b'"' + b"\\" * 999, b'{"prompt": "\xed\xa0\x80"}'),
    *(b'{"prompt": "1", "temperature": NaN}', b'{"prompt": "1", "n": 1e999}', b'{"prompt": "1", "prompt": 2}'),
    *(b'{"prompt": {"prompt_token_ids": [' + b"9" * 5000 + b"]}}", b'{"prompt": {"prompt_token_ids": [-1]}}'),
    *(b"{'a':1}", b"\x93" * 300, b"\xdf\xff\xff\xff\xff"),
]


def mangled(draw: random.Random, good: Mapping[str, Any], others: Sequence[str] = ("z",)) -> bytes:
    """A good body with fields replaced, bent, dropped or added; or bytes that are no JSON any more; or just bytes."""
    kind = draw.randrange(6)
    if kind == 0:
        return draw.randbytes(draw.randrange(200))
    if kind == 1:
        return draw.choice(JUNK)
    body = copy.deepcopy(dict(good))
    for _ in range(draw.randrange(1, 3)):
        name, odd = draw.choice([*good, *others]), copy.deepcopy(draw.choice(ODD))
        value = body.get(name)
        if draw.random() < 0.2:
            body.pop(name, None)
        elif draw.random() < 0.5 and isinstance(value, list) and value:
            value[draw.randrange(len(value))] = odd
        else:
            body[name] = odd
    encoded = json.dumps([body] if kind == 2 else body).encode()
    at = draw.randrange(len(encoded))
    if kind == 3:
        return encoded[:at] + draw.randbytes(draw.randrange(1, 4)) + encoded[at + draw.randrange(3) :]
    return encoded[:at] if kind == 4 else encoded

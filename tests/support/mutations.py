"""Damage to files, of the kinds that happen and of those that people think of: bytes, fields of messages, tokens of text.

Every function takes what is valid and a `random.Random`, and gives something that may or may not be.
"""

import re

_NUMBERS = (
    0,
    1,
    127,
    128,
    255,
    256,
    *(2**bits + more for bits in (15, 16, 31, 32, 40, 63) for more in (-1, 0)),
    2**64 - 1,
)
_VARINT, _LEN = 0, 2
_FIXED = {1: 8, 5: 4}
_TOKEN = re.compile(r'"(?:[^"\\\n]|\\.)*"|[\w.+-]+|\s+|.', re.DOTALL)
_WORDS = (
    "-1", "0", "1", "2", "3", "7", "65536", "2147483647", "2147483648", "-2147483648", "4294967295", "4294967296",
    "9223372036854775807", "9223372036854775808", "1e38", "1e400", "-1e38", "1e-45", "nan", "inf", "-inf", "true",
    "false", "MAX", '""', '"x"', '"\\0"', '"\\377"', "{", "}", "{}", "[", "]", "<", ">", ":", ",", ";", "#", "'", '"',
)  # fmt: skip


def damage_bytes(data, random):
    """Bits flipped, bytes set, numbers put in, pieces cut, moved and repeated."""
    result = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 5))):
        at = random.randrange(len(result) + 1)
        length = random.choice((1, 2, 4, 8, 64, 512, 4096))
        match random.randrange(7):
            case 0 if at < len(result):
                result[at] ^= 1 << random.randrange(8)
            case 1:
                del result[at:]
            case 2:
                del result[at : at + length]
            case 3:
                other = random.randrange(len(result) + 1)
                result[at:at] = result[other : other + length]
            case 4:
                width = random.choice((1, 2, 4, 8))
                number = random.choice(_NUMBERS) % 2 ** (8 * width)
                result[at : at + width] = number.to_bytes(width, random.choice(("little", "big")))
            case 5:
                result[at : at + length] = random.choice((b"\0", b"\xff", b"\x7f")) * min(length, len(result) - at)
            case 6:
                other = random.randrange(len(result) + 1)
                result[at : at + length] = result[other : other + length]
    return bytes(result)


def damage_header(data, random, size=256):
    """As `damage_bytes`, within the first `size` bytes."""
    return damage_bytes(data[:size], random) + data[size:]


def damage_message(data, random, depth=0):
    """One field of a serialized message, at any depth, dropped, repeated, moved, nested, of another length or value."""
    fields = _fields(data)
    if not fields or random.random() < 0.05:
        return damage_bytes(data, random)
    at = random.randrange(len(fields))
    number, kind, payload = fields[at]
    action = random.randrange(9)
    if kind == _LEN and payload and depth < 8 and random.random() < 0.7 and _fields(payload):
        fields[at] = (number, kind, damage_message(payload, random, depth + 1))
    elif action == 0:
        del fields[at]
    elif action == 1:
        fields[at:at] = [fields[at]] * random.choice((1, 2, 40, 1000))
    elif action == 2:
        fields.insert(random.randrange(len(fields) + 1), fields.pop(at))
    elif action == 3:
        fields[at] = (random.choice((number, random.randrange(1, 150), 2**29 - 1)), random.randrange(8), payload)
    elif action == 4:
        fields[at] = (number, _VARINT, _varint(random.choice(_NUMBERS)))
    elif action == 5 and kind == _LEN:
        fields[at] = (number, kind, damage_bytes(payload, random))
    elif action == 6:
        for _ in range(random.choice((1, 3, 200))):
            payload = _joined([(number, _LEN, payload)])
        fields[at] = (number, _LEN, payload)
    elif action == 7:
        length = random.choice(_NUMBERS)
        return _joined(fields[:at]) + _varint(number << 3 | _LEN) + _varint(length) + _joined(fields[at:])
    else:
        fields[at] = (number, kind, random.choice((b"", payload * 2, payload[:-1], bytes(len(payload)))))
    return _joined(fields)


def _fields(data):
    """(number, kind, payload) of each field, none if it is no message."""
    fields, at = [], 0
    try:
        while at < len(data):
            tag, at = _read_varint(data, at)
            kind, start = tag & 7, at
            if kind == _VARINT:
                at = _read_varint(data, at)[1]
            elif kind == _LEN:
                length, start = _read_varint(data, at)
                at = start + length
            else:
                at += _FIXED[kind]
            if at > len(data) or not tag >> 3:
                return []
            fields.append((tag >> 3, kind, bytes(data[start:at])))
    except (IndexError, KeyError):
        return []
    return fields


def _joined(fields):
    return b"".join(
        _varint(number << 3 | kind) + (_varint(len(payload)) if kind == _LEN else b"") + payload
        for number, kind, payload in fields
    )


def _read_varint(data, at):
    value = shift = 0
    while shift < 70:
        value |= (data[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if data[at - 1] < 0x80:
            return value, at
    raise IndexError


def _varint(value):
    result = bytearray()
    while value >= 0x80:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(result) + bytes([value])


def damage_text(text, random, words=()):
    """Tokens of a text dropped, repeated, exchanged, or replaced by others, by `words` or by extreme numbers."""
    tokens = _TOKEN.findall(text)
    solid = [at for at, token in enumerate(tokens) if not token.isspace()]
    if not solid:
        return random.choice(_WORDS)
    numbers = [at for at in solid if re.match(r"[-.\d]", tokens[at])]
    for _ in range(random.choice((1, 1, 2, 4))):
        at = random.choice(solid)
        match random.randrange(8):
            case 0:
                tokens[at] = ""
            case 1:
                tokens[at] = " ".join([tokens[at]] * random.choice((2, 3, 50)))
            case 2:
                other = random.choice(solid)
                tokens[at], tokens[other] = tokens[other], tokens[at]
            case 3:
                tokens[at] = random.choice((*_WORDS, *words))
            case 4:
                tokens[at] = tokens[random.choice(solid)]
            case 5:
                stop = min(len(tokens), at + random.randrange(1, 60))
                tokens[at:at] = tokens[at:stop]
            case _:
                tokens[random.choice(numbers or solid)] = random.choice(_WORDS[:21])
        solid = [place for place in solid if place < len(tokens)]
        numbers = [place for place in numbers if place < len(tokens)]
    return "".join(tokens)

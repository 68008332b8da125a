"""BLAKE3 in plain Python, from its specification: slow, for comparing implementations.

Has the interface of the package `blake3` as far as docs/reference/hash.md uses it. Not here: the
block hash itself.
"""

import struct

IV = (0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19)
PERMUTATION = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
CHUNK_START, CHUNK_END, PARENT, ROOT, KEYED_HASH, DERIVE_KEY_CONTEXT, DERIVE_KEY_MATERIAL = (
    1 << bit for bit in range(7)
)
MASK = 0xFFFFFFFF


def _mix(state, a, b, c, d, first, second):
    for word, turn_d, turn_b in ((first, 16, 12), (second, 8, 7)):
        state[a] = (state[a] + state[b] + word) & MASK
        mixed = state[d] ^ state[a]
        state[d] = (mixed >> turn_d | mixed << (32 - turn_d)) & MASK
        state[c] = (state[c] + state[d]) & MASK
        mixed = state[b] ^ state[c]
        state[b] = (mixed >> turn_b | mixed << (32 - turn_b)) & MASK


def _compress(chaining, block, counter, length, flags):
    words = list(struct.unpack("<16I", block.ljust(64, b"\0")))
    state = [*chaining, *IV[:4], counter & MASK, counter >> 32, length, flags]
    for turn in range(7):
        for column in range(4):
            _mix(state, column, column + 4, column + 8, column + 12, words[2 * column], words[2 * column + 1])
        for slant in range(4):
            places = (slant, 4 + (slant + 1) % 4, 8 + (slant + 2) % 4, 12 + (slant + 3) % 4)
            _mix(state, *places, words[8 + 2 * slant], words[9 + 2 * slant])
        words = [words[place] for place in PERMUTATION] if turn < 6 else words
    low = [state[at] ^ state[at + 8] for at in range(8)]
    return low + [state[at + 8] ^ chaining[at] for at in range(8)]


class _Node:
    """The inputs of a compression whose flags are not final yet."""

    def __init__(self, chaining, block, counter, flags):
        self.chaining, self.block, self.counter, self.flags = chaining, block, counter, flags

    def value(self):
        return _compress(self.chaining, self.block, self.counter, len(self.block), self.flags)[:8]

    def root(self, length):
        out = b""
        while len(out) < length:
            flags = self.flags | ROOT
            words = _compress(self.chaining, self.block, len(out) // 64, len(self.block), flags)
            out += struct.pack("<16I", *words)
        return out[:length]


def _chunk(data, counter, key, flags):
    blocks = [data[at : at + 64] for at in range(0, len(data), 64)] or [b""]
    chaining = key
    for number, block in enumerate(blocks):
        start = CHUNK_START if number == 0 else 0
        end = CHUNK_END if number == len(blocks) - 1 else 0
        node = _Node(chaining, block, counter, flags | start | end)
        if not end:
            chaining = node.value()
    return node


def _tree(data, counter, key, flags):
    if len(data) <= 1024:
        return _chunk(data, counter, key, flags)
    left = 1024
    while left * 2 < len(data):
        left *= 2
    halves = (_tree(data[:left], counter, key, flags), _tree(data[left:], counter + left // 1024, key, flags))
    values = [word for half in halves for word in half.value()]
    return _Node(key, struct.pack("<16I", *values), 0, flags | PARENT)


class blake3:
    """A hash of `data`, or a keyed hash, or a derived key."""

    def __init__(self, data, key=None, derive_key_context=None):
        words, flags = IV, 0
        if key is not None:
            words, flags = struct.unpack("<8I", key), KEYED_HASH
        if derive_key_context is not None:
            context = _tree(derive_key_context.encode(), 0, IV, DERIVE_KEY_CONTEXT).root(32)
            words, flags = struct.unpack("<8I", context), DERIVE_KEY_MATERIAL
        self.tree = _tree(bytes(data), 0, words, flags)

    def digest(self, length=32):
        return self.tree.root(length)


if __name__ == "__main__":
    # The empty input, and one of more than two chunks, of the published test vectors.
    assert blake3(b"").digest(8).hex() == "af1349b9f5f9a1a6"
    counting = bytes(at % 251 for at in range(3072))
    assert blake3(counting).digest(8).hex() == "b98cb0ff3623be03"
    key = b"whats the Elvish word for friend"
    assert blake3(b"", key=key).digest(8).hex() == "92b2b75604ed3c76"

# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Arrays as numpy makes them: read from a file, computed with, written, dropped."""
import array
import random
import sys

path, rounds = sys.argv[1], int(sys.argv[2])
rng = random.Random(1)
with open(path, "rb", buffering=0) as source, open("/dev/null", "wb", buffering=0) as sink:
    kept = []
    for i in range(rounds):
        elements = 1 << rng.randrange(13, 19)  # of 8 bytes: 64 KiB to 2 MiB
        a = array.array("d", bytes(8 * elements))
        source.seek(rng.randrange(0, 32 << 20) & ~7)
        source.readinto(a)
        b = a[:]  # a new array
        b[::64] = a[::-64]
        sink.write(b)
        kept.append(a if i % 3 else b)
        if len(kept) > 8:
            kept.pop(rng.randrange(len(kept)))

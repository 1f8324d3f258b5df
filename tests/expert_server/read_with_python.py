#!/usr/bin/env python3
"""Reads safetensors files with the Python package of that name, and compares what it says with the bytes in the file.

    read_with_python.py FILE...                 print what each file holds; exit 1 on any difference or refusal
    read_with_python.py --copy-to DIR FILE...   let the package also write each file anew, under the same name in DIR,
                                                without the digest of the old one's bytes

The header is parsed here too, by the format's public description, so that names, dtypes, shapes, metadata and every
byte are compared with something that the package did not say.
"""
import argparse
import json
import os
import sys

import numpy
import safetensors
import safetensors.numpy

NUMPY_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1",
                "U8": "|u1", "BOOL": "|b1"}  # numpy has no bfloat16.


def by_description(file):
    """The metadata and {name: array}, read without the package."""
    with open(file, "rb") as stream:
        content = stream.read()
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    metadata = header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        first, end = entry["data_offsets"]
        dtype = numpy.dtype(NUMPY_DTYPES[entry["dtype"]])
        tensors[name] = numpy.frombuffer(content[begin + first:begin + end], dtype).reshape(entry["shape"])
    return metadata, tensors


def differences(expected, found, how):
    """Sentences on how two {name: array} differ in any name, dtype, shape or bit."""
    if expected.keys() != found.keys():
        yield f"{how}: other names: {sorted(expected.keys() ^ found.keys())}"
    for name in expected.keys() & found.keys():
        left, right = expected[name], found[name]
        if left.dtype != right.dtype or left.shape != right.shape:
            yield f"{how}: {name} is {right.dtype}{right.shape} instead of {left.dtype}{left.shape}"
        elif left.tobytes() != right.tobytes():
            yield f"{how}: {name} has other values"


def check(file, copy_to):
    """Sentences on what is wrong with `file`."""
    metadata, expected = by_description(file)
    with safetensors.safe_open(file, framework="numpy") as opened:
        if opened.metadata() != metadata:
            yield f"safe_open: other metadata: {opened.metadata()}"
        one_by_one = {name: opened.get_tensor(name) for name in opened.keys()}
    at_once = safetensors.numpy.load_file(file)
    yield from differences(expected, one_by_one, "safe_open")
    yield from differences(expected, at_once, "load_file")
    size = sum(array.nbytes for array in at_once.values())
    print(f"{file}: {len(at_once)} tensors of {size} bytes, {len(metadata or {})} metadata")
    for key, value in sorted((metadata or {}).items()):
        print(f"  {key} = {value}")
    for name, array in sorted(at_once.items()):
        print(f"  {name} {array.dtype} {list(array.shape)}" + (f" = {array}" if array.ndim == 0 else ""))
    if copy_to:
        kept = {key: value for key, value in (metadata or {}).items() if key != "sha256_pieces"}
        safetensors.numpy.save_file(at_once, os.path.join(copy_to, os.path.basename(file)), kept)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--copy-to", metavar="DIR")
    options = parser.parse_args()
    failed = False
    for file in options.files:
        try:
            wrong = list(check(file, options.copy_to))
        except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
            wrong = [f"not read: {type(error).__name__}: {error}"]
        for sentence in wrong:
            print(f"{file}: {sentence}", file=sys.stderr)
            failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

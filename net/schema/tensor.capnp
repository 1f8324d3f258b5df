@0xd2a1c7f05b3e9a11;
# A dense tensor on the wire. Checked by net/tensor_codec.hpp before any byte is used.

using Cxx = import "/capnp/c++.capnp";
$Cxx.namespace("dmoe::net::schema");

enum DType {
  # Wire numbers; never reorder.
  float32 @0;
  float16 @1;
  bfloat16 @2;
  float64 @3;
  int64 @4;
  int32 @5;
  uint8 @6;
  bool @7;
}

enum Compression {
  # How the values of a float32 tensor lie in `data`. Wire numbers; never reorder. Sent only to who said, in its
  # ExpertInfo, that it reads it.
  none @0;      # As they are.
  float16 @1;   # 2 bytes each, little-endian.
  bfloat16 @2;  # Likewise.
  int8 @3;      # A float32 scale for each block of 128 values (the last may be shorter), then a signed byte per value.
}

struct Tensor {
  dtype @0 :DType;
  shape @1 :List(Int64);   # Empty list: a scalar. At most 16 dimensions.
  data @2 :Data;           # Row-major, little-endian, exactly product(shape) * itemsize bytes, or as compressed.
  compression @3 :Compression;
}

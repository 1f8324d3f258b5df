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

struct Tensor {
  dtype @0 :DType;
  shape @1 :List(Int64);   # Empty list: a scalar. At most 16 dimensions.
  data @2 :Data;           # Row-major, little-endian, exactly product(shape) * itemsize bytes.
}

@0xb7c4f1d26a80e953;
# One frame is one Cap'n Proto message in one binary WebSocket message.
# Calls and replies are matched by id; replies come in any order. The protocol's version travels in the WebSocket
# handshake (Sec-WebSocket-Protocol), see docs/architecture.md.

using Cxx = import "/capnp/c++.capnp";
using import "tensor.capnp".Tensor;
using import "tensor.capnp".DType;
using import "tensor.capnp".Compression;
$Cxx.namespace("dmoe::net::schema");

struct Frame {
  union {
    calls @0 :List(Call);      # Client to server. Several calls to one server share a frame.
    replies @1 :List(Reply);   # Server to client. Each call is answered by itself, as soon as it is done.
    cancel @2 :List(UInt64);   # Client to server: the caller no longer wants these ids.
  }
}

struct Call {
  id @0 :UInt64;               # Chosen by the client, unique on its connection.
  timeoutMillis @1 :UInt32;    # Remaining time when sent; 0: none. Relative, so clocks need not agree.
  union {
    info @2 :InfoRequest;
    forward @3 :ForwardRequest;
    backward @4 :BackwardRequest;
    progress @5 :List(UInt64); # Which of these ids, sent before on this connection, are still to be answered?
  }
}

struct Reply {
  id @0 :UInt64;
  union {
    error @1 :Error;
    info @2 :ExpertInfo;
    forward @3 :List(Tensor);  # The expert's outputs.
    backward @4 :List(Tensor); # Gradients with respect to each input; an input without one has an empty tensor.
    progress @5 :List(UInt64); # Those of the ids asked about that are still to be answered. A connection keeps order: what is
                               # not among them was answered before this reply, or never came.
  }
}

struct Error {
  code @0 :UInt16;             # dmoe::Errc
  message @1 :Text;
  retryAfterMillis @2 :UInt32; # With overloaded; 0: not said.
}

struct InfoRequest {
  uid @0 :Text;
}

struct ForwardRequest {
  uid @0 :Text;
  inputs @1 :List(Tensor);     # Dimension 0 is the batch row.
  rngSeed @2 :UInt64;          # Dropout masks of forward and backward agree when the seeds agree.
  replyCompression @3 :Compression;  # How the caller wants the answer's tensors; a wish.
}

struct BackwardRequest {
  uid @0 :Text;
  inputs @1 :List(Tensor);     # As in forward.
  gradOutputs @2 :List(Tensor);
  rngSeed @3 :UInt64;
  replyCompression @4 :Compression;
}

struct TensorSpec {
  dtype @0 :DType;
  shape @1 :List(Int64);       # Without the batch dimension; -1: any size.
  requiresGrad @2 :Bool;
}

struct ExpertInfo {
  uid @0 :Text;
  architecture @1 :Text;       # "ffn", "transformer", "nop", …
  inputs @2 :List(TensorSpec);
  outputs @3 :List(TensorSpec);
  maxBatchSize @4 :UInt32;     # Rows of one call.
  updates @5 :UInt64;          # Optimizer steps so far.
  compressions @6 :List(Compression);  # What requests may use, and what answers may ask for. Empty: only none.
}

@0xe3b1f6a94c5d7208;
# One datagram is one Cap'n Proto message in the standard stream framing (one segment), at most 1,232 bytes; zero bytes
# may follow it as padding. Checked by dht/wire.hpp before any field is used. See docs/dht-protocol.md.

using Cxx = import "/capnp/c++.capnp";
$Cxx.namespace("dmoe::dht::schema");

struct Datagram {
  version @0 :UInt8;           # 1
  flags @1 :UInt8;             # Bit 0: the sender is a client. Bit 1: the receiver shall prove its key in the reply.
  transaction @2 :UInt64;      # Chosen at random by the requester; a reply repeats it.
  cookie @3 :UInt64;           # Request: what the receiver last gave this sender, or 0. Reply: the cookie to use next.
  sender0 @4 :UInt64;          # The sender's Ed25519 public key, four little-endian words.
  sender1 @5 :UInt64;
  sender2 @6 :UInt64;
  sender3 @7 :UInt64;
  union {
    ping @8 :Void;
    find @9 :Find;
    store @10 :Store;
    chunk @11 :Chunk;
    fetch @12 :Fetch;
    probe @13 :Probe;
    reply @14 :Reply;
  }
}

struct Find {
  keys @0 :List(UInt64);       # Four words a key; 1 to 32 keys.
  nodesPerKey @1 :UInt8;       # 0 to 20.
  flags @2 :UInt8;             # Bit 0: records wanted. Bit 1: copies cached along the path will do.
  from @3 :UInt32;             # With one key: skip that many records.
  turns @4 :Data;              # Empty, or a byte per key: where its records shall begin, in 256ths of them, and go round.
}

struct Record {
  key0 @0 :UInt64;
  key1 @1 :UInt64;
  key2 @2 :UInt64;
  key3 @3 :UInt64;
  publisher0 @4 :UInt64;       # Ed25519 public key.
  publisher1 @5 :UInt64;
  publisher2 @6 :UInt64;
  publisher3 @7 :UInt64;
  sequence @8 :UInt64;
  maxTtlMillis @9 :UInt32;     # Signed: no holder may let the record live longer.
  remainingMillis @10 :UInt32; # Not signed; clipped to maxTtlMillis.
  valueSize @11 :UInt32;       # More than the bytes in `value`: the value is to be fetched in parts.
  flags @12 :UInt16;           # Bit 0: a tombstone.
  index @13 :UInt16;           # The record's leaf in its batch.
  subkey @14 :Data;            # At most 64 bytes; empty: the publisher's peer ID.
  value @15 :Data;
  path @16 :Data;              # 16 bytes per level of the batch's Merkle tree, leaf first; at most 16 levels.
  signature @17 :Data;         # Ed25519 over the batch's root.
}

struct Store {
  records @0 :List(Record);
  wantNodes @1 :Bool;          # The receiver shall name the nodes it knows closest to the keys.
  cache @2 :Bool;              # Copies for readers on their way: the receiver is not asked to be a holder. One key.
}

struct Chunk {
  # Part of a record too large for one datagram. The last missing part is acknowledged with the record's fate.
  record @0 :Record;           # Without its value.
  offset @1 :UInt32;
  data @2 :Data;
}

struct Fetch {
  key @0 :List(UInt64);        # Four words.
  publisher @1 :List(UInt64);  # Four words.
  sequence @2 :UInt64;
  offset @3 :UInt32;
  subkey @4 :Data;
}

struct Probe {
  # Dial-back: a node (stage 0) asks a second one to have a third one (stage 1) knock (stage 2) at its own IP address.
  # Stage 3: it asks the second one to open a TCP connection there itself.
  stage @0 :UInt8;
  port @1 :UInt16;             # Stage 0: at which port; 0: the one the request came from. Stage 3: which TCP port.
  nonce @2 :UInt64;            # Chosen by the first node, repeated in each stage.
  target @3 :List(UInt64);     # Stage 1: where to knock, as in Reply.observed.
}

struct Reply {
  doneKeys @0 :UInt64;         # Bit i: key i of the find was looked up; its records here are all, from `from` on, that fit.
  observed @1 :List(UInt64);   # The requester's address as seen here: one word (IPv4 << 16 | port) or three (IPv6, port).
  conflict @2 :List(UInt64);   # Another address at which the requester's identity just proved itself, or empty.
  nodes4 @3 :List(UInt64);     # Five words a node: ID, IPv4 << 16 | port.
  nodes6 @4 :List(UInt64);     # Seven words a node: ID, IPv6, port.
  found @5 :List(KeyRecords);
  acks @6 :Data;               # One byte per record of the store: Ack in dht/wire.hpp.
  part @7 :Part;
  proof @8 :Data;              # Ed25519 over the transaction and the requester's key, when asked for.
}

struct KeyRecords {
  index @0 :UInt8;             # Which key of the find.
  cached @1 :Bool;             # From this node's cache: it is no holder.
  total @2 :UInt32;            # Records held under the key, tombstones included.
  records @3 :List(Record);
  from @4 :UInt32;             # How many of them in their order lie before the first one here; they go round.
  tags @5 :List(UInt16);       # Empty, or one per record held, in their order: see docs/dht-protocol.md, "Pages".
}

struct Part {
  offset @0 :UInt32;
  total @1 :UInt32;            # 0: no such record here.
  data @2 :Data;
}

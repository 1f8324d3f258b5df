// Tensors through the codec and over a real socket.
#include "net/tensor_codec.hpp"

#include "tests/net/rpc_fixture.hpp"
#include "tests/net_tensor/arrived_frame.hpp"
#include "tests/support/catch.hpp"

#include <torch/autograd.h>
#include <torch/types.h>

#include <limits>

using namespace dmoe;
using namespace dmoe::test;
using net::OutgoingFrame;

namespace {

const std::vector<at::ScalarType> kTypes = {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble,
                                            at::kLong,  at::kInt,  at::kByte,     at::kBool};

at::Tensor sample(at::ScalarType type, const std::vector<std::int64_t>& sizes) {
  return (torch::rand(sizes) * 200).to(type);
}

Result<std::vector<at::Tensor>> through_the_wire(const std::vector<at::Tensor>& tensors) {
  OutgoingFrame frame;
  auto list = frame.root().initReplies(1)[0].initForward(static_cast<unsigned>(tensors.size()));
  const auto encoded = net::encode_tensors(tensors, list, frame.attachments());
  if (encoded.has_error()) return encoded.error();
  const auto received = as_arrived(frame);
  return net::decode_tensors(received->root().getReplies()[0].getForward(), received);
}

bool same(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && a.is_contiguous() &&
         torch::equal(a, b.contiguous());
}

/// Encodes one tensor by hand, as a hostile peer may.
Result<at::Tensor> decode(net::schema::DType type, const std::vector<std::int64_t>& shape, std::size_t bytes) {
  OutgoingFrame frame;
  auto tensor = frame.root().initReplies(1)[0].initForward(1)[0];
  tensor.setDtype(type);
  auto sizes = tensor.initShape(static_cast<unsigned>(shape.size()));
  for (unsigned i = 0; i < shape.size(); ++i) sizes.set(i, shape[i]);
  tensor.initData(static_cast<unsigned>(bytes));
  const auto received = as_arrived(frame);
  return net::decode_tensor(received->root().getReplies()[0].getForward()[0], received);
}

}  // namespace

TEST_CASE("tensors of every type and rank arrive as they were", "[codec]") {
  const std::vector<std::vector<std::int64_t>> shapes = {
      {}, {1}, {7}, {0}, {3, 5}, {0, 64}, {4, 0, 2}, {2, 3, 5}, {2, 3, 1, 5}, {1, 2, 3, 2, 2}, {1'024}, {16, 1'024}};
  for (const auto type : kTypes) {
    for (const auto& shape : shapes) {
      const auto tensor = sample(type, shape);
      INFO(type << " " << tensor.sizes());
      const auto arrived = through_the_wire({tensor});
      REQUIRE(arrived.has_value());
      REQUIRE(arrived->size() == 1);
      CHECK(same(arrived->front(), tensor));
    }
  }
}

TEST_CASE("c10 views arrive as their values and not as their storage", "[codec][c10]") {
  for (const auto type : kTypes) {
    const auto base = sample(type, {6, 8});
    INFO(type);
    const std::vector<at::Tensor> views = {base.t(),
                                           base.slice(1, 0, 8, 2),
                                           base.select(0, 3),
                                           base.slice(0, 2),
                                           base.narrow(1, 3, 1),
                                           base.slice(0, 1).slice(1, 1),
                                           base[0].expand({5, 8})};
    const auto arrived = through_the_wire(views);
    REQUIRE(arrived.has_value());
    for (std::size_t i = 0; i < views.size(); ++i) CHECK(same((*arrived)[i], views[i]));
  }
  const auto x = torch::rand({4, 4}, torch::requires_grad());
  const auto grad = torch::autograd::grad({x.sum()}, {x}, {}, /*retain_graph=*/true)[0];
  const auto arrived = through_the_wire({grad, x, torch::ones({}).expand({3, 3})});
  REQUIRE(arrived.has_value());
  CHECK(same((*arrived)[0], grad));
  CHECK(same((*arrived)[1], x.detach()));
  CHECK_FALSE((*arrived)[1].requires_grad());
  CHECK(same((*arrived)[2], torch::ones({3, 3})));
}

TEST_CASE("bytes of a contiguous tensor are sent from and decoded in place", "[codec]") {
  const auto tensor = torch::rand({256, 1'024});
  OutgoingFrame frame;
  REQUIRE(
      net::encode_tensor(tensor, frame.root().initReplies(1)[0].initForward(1)[0], frame.attachments()).has_value());
  const auto received = as_arrived(frame);
  bool sent_in_place = false;
  for (const auto& part : frame.buffers()) sent_in_place = sent_in_place || part.data() == tensor.data_ptr();
  CHECK(sent_in_place);
  const auto reader = received->root().getReplies()[0].getForward()[0];
  const auto decoded = net::decode_tensor(reader, received);
  REQUIRE(decoded.has_value());
  CHECK(decoded->data_ptr() == reader.getData().begin());
}

TEST_CASE("a17 a decoded tensor outlives its frame and its message", "[codec][a17]") {
  at::Tensor kept;
  const auto tensor = torch::rand({33, 7});
  {
    auto arrived = through_the_wire({tensor});
    REQUIRE(arrived.has_value());
    kept = arrived->front().slice(0, 1);
  }
  CHECK(torch::equal(kept, tensor.slice(0, 1)));
}

TEST_CASE("an encoded tensor may be dropped before its frame is sent", "[codec]") {
  OutgoingFrame frame;
  const auto expected = torch::arange(1'024, at::kFloat);
  {
    const auto gone = torch::arange(1'024, at::kFloat);
    REQUIRE(
        net::encode_tensor(gone, frame.root().initReplies(1)[0].initForward(1)[0], frame.attachments()).has_value());
  }
  const auto received = as_arrived(frame);
  const auto decoded = net::decode_tensor(received->root().getReplies()[0].getForward()[0], received);
  REQUIRE(decoded.has_value());
  CHECK(torch::equal(*decoded, expected));
}

TEST_CASE("storage that starts at an odd address is sent as its values", "[codec]") {
  const auto base = sample(at::kByte, {4'096});
  for (const std::int64_t offset : {1, 3, 4, 8}) {
    const auto view = base.slice(0, offset, offset + 1'024);
    const auto arrived = through_the_wire({view});
    REQUIRE(arrived.has_value());
    CHECK(same(arrived->front(), view));
  }
}

TEST_CASE("what the wire does not have is refused with the reason", "[codec]") {
  OutgoingFrame frame;
  auto builder = frame.root().initReplies(1)[0].initForward(1)[0];
  const auto error_of = [&](const at::Tensor& tensor) {
    const auto encoded = net::encode_tensor(tensor, builder, frame.attachments());
    REQUIRE(encoded.has_error());
    CHECK(encoded.error().code == Errc::kInvalidArgument);
    return encoded.error().message;
  };
  CHECK(error_of(torch::zeros({2}, at::kComplexFloat)).find("ComplexFloat") != std::string::npos);
  CHECK(error_of(torch::zeros({2}, at::kShort)).find("Short") != std::string::npos);
  CHECK(error_of(torch::zeros({2, 2}).to_sparse()).find("dense") != std::string::npos);
  CHECK(error_of(at::Tensor()).find("undefined") != std::string::npos);
  CHECK(error_of(torch::zeros(std::vector<std::int64_t>(17, 1))).find("17 dimensions") != std::string::npos);
  const std::vector<at::Tensor> many(net::kMaxTensorsPerCall + 1, torch::zeros({1}));
  CHECK(through_the_wire(many).has_error());
}

TEST_CASE("f6 shapes that lie about their bytes are refused", "[codec][f6]") {
  using net::schema::DType;
  constexpr auto kMost = std::numeric_limits<std::int64_t>::max();
  constexpr auto kLeast = std::numeric_limits<std::int64_t>::min();
  struct Case {
    DType type;
    std::vector<std::int64_t> shape;
    std::size_t bytes;
  };
  const std::vector<Case> cases = {
      {DType::FLOAT32, {4}, 15},
      {DType::FLOAT32, {4}, 12},
      {DType::FLOAT32, {4}, 20},
      {DType::FLOAT32, {}, 0},
      {DType::FLOAT32, {0}, 4},
      {DType::FLOAT32, {-1}, 4},
      {DType::FLOAT32, {-2, -2}, 16},
      {DType::FLOAT32, {kLeast}, 0},
      {DType::FLOAT32, {kMost, kMost}, 4},
      {DType::FLOAT32, {std::int64_t{1} << 32, std::int64_t{1} << 32}, 0},
      {DType::FLOAT32, {std::int64_t{1} << 62, 4}, 0},
      {DType::FLOAT64, {(std::int64_t{1} << 61) + 1}, 8},
      {DType::UINT8, {0, kMost, kMost}, 0},
      {DType::BOOL, {3}, 2},
      {static_cast<DType>(200), {1}, 4},
      {DType::FLOAT32, std::vector<std::int64_t>(17, 1), 4},
  };
  for (const auto& [type, shape, bytes] : cases) {
    INFO(static_cast<int>(type) << " " << at::IntArrayRef(shape) << " " << bytes);
    const auto decoded = decode(type, shape, bytes);
    REQUIRE(decoded.has_error());
    CHECK(decoded.error().code == Errc::kInvalidArgument);
  }
  CHECK(decode(DType::UINT8, {0, 1'000'000}, 0).has_value());
}

TEST_CASE("tensors cross a socket and both sides read the buffer that came in", "[codec][rpc]") {
  TestServer server([](net::IncomingCall call) {
    const auto request = call.reader().getForward();
    auto inputs = net::decode_tensors(request.getInputs(), call.frame());
    if (inputs.has_error()) return call.fail(inputs.error());
    const bool in_place = inputs->front().data_ptr() == request.getInputs()[0].getData().begin();
    const auto outputs = std::vector<at::Tensor>{inputs->front() * 2, torch::full({1}, in_place, at::kBool)};
    call.reply([&](net::schema::Reply::Builder reply, net::Attachments& attachments) {
      net::encode_tensors(outputs, reply.initForward(2), attachments).value();
    });
  });
  TestClient client;
  for (const std::int64_t rows : {1, 64, 4'096}) {
    const auto x = torch::rand({rows, 1'024});
    std::promise<Result<net::IncomingReply>> promise;
    auto future = promise.get_future();
    std::vector<net::CallSpec> calls;
    calls.push_back({[&](net::schema::Call::Builder call, net::Attachments& attachments) {
                       auto forward = call.initForward();
                       forward.setUid("nop.0");
                       net::encode_tensors({x}, forward.initInputs(1), attachments).value();
                     },
                     soon(), [&](Result<net::IncomingReply> reply) { promise.set_value(std::move(reply)); }});
    client.client().start(server.endpoint(), std::move(calls));
    const auto reply = get(future);
    REQUIRE(reply.has_value());
    const auto outputs = net::decode_tensors(reply->reader().getForward(), reply->frame());
    REQUIRE(outputs.has_value());
    CHECK(torch::equal((*outputs)[0], x * 2));
    CHECK((*outputs)[1].item<bool>());
  }
}

TEST_CASE("f6 a tensor that lies fails its call and the server serves on", "[codec][rpc][f6]") {
  TestServer server([](net::IncomingCall call) {
    const auto inputs = net::decode_tensors(call.reader().getForward().getInputs(), call.frame());
    if (inputs.has_error()) return call.fail(inputs.error());
    echo(std::move(call));
  });
  TestClient client;
  for (const std::int64_t size : {-5, 3, 5}) {
    std::promise<Result<net::IncomingReply>> promise;
    auto future = promise.get_future();
    std::vector<net::CallSpec> calls;
    calls.push_back({[&](net::schema::Call::Builder call, net::Attachments&) {
                       auto tensor = call.initForward().initInputs(1)[0];
                       tensor.initShape(1).set(0, size);
                       tensor.initData(16);
                     },
                     soon(), [&](Result<net::IncomingReply> reply) { promise.set_value(std::move(reply)); }});
    client.client().start(server.endpoint(), std::move(calls));
    const auto reply = get(future);
    REQUIRE(reply.has_error());
    CHECK(reply.error().code == Errc::kInvalidArgument);
    CHECK(reply.error().message.find("16 bytes") != std::string::npos);
  }
  auto honest = client.forward(server.endpoint(), "nop.0", 0, "x");
  CHECK(get(honest).has_value());
}

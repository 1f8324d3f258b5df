// Asking a server whether it still has calls to answer: what tells a lost answer from a slow one.
#include "tests/net/raw_peer.hpp"
#include "tests/net/rpc_fixture.hpp"
#include "tests/support/catch.hpp"

#include <capnp/serialize.h>
#include <boost/beast/core/flat_buffer.hpp>

#include <cstring>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace dmoe {
namespace {

namespace websocket = boost::beast::websocket;
using namespace dmoe::test;

/// A server played by hand on one connection.
class PlayedServer {
 public:
  net::Endpoint endpoint() const { return {"127.0.0.1", listener_.port()}; }

  void accept() {
    ws_.emplace(listener_.accept());
    ws_->set_option(websocket::stream_base::decorator(
        [](websocket::response_type& response) { response.set("Sec-WebSocket-Protocol", "dmoe.1"); }));
    ws_->accept();
    ws_->binary(true);
  }

  /// Reads a frame that holds one call, and gives `look` a view of it.
  template <class Look>
  void read_call(const Look& look) {
    boost::beast::flat_buffer bytes;
    ws_->read(bytes);
    auto words = kj::heapArray<capnp::word>(bytes.size() / sizeof(capnp::word));
    std::memcpy(words.begin(), bytes.data().data(), bytes.size());
    capnp::FlatArrayMessageReader message(words);
    const auto calls = message.getRoot<net::schema::Frame>().getCalls();
    REQUIRE(calls.size() == 1);
    look(calls[0]);
  }
  std::uint64_t read_forward() {
    std::uint64_t id = 0;
    read_call([&](net::schema::Call::Reader call) {
      CHECK(call.isForward());
      id = call.getId();
    });
    return id;
  }
  /// @return the question's id.
  std::uint64_t read_question(const std::vector<std::uint64_t>& about) {
    std::uint64_t id = 0;
    read_call([&](net::schema::Call::Reader call) {
      REQUIRE(call.isProgress());
      std::vector<std::uint64_t> asked;
      for (const auto one : call.getProgress()) asked.push_back(one);
      CHECK(asked == about);
      id = call.getId();
    });
    return id;
  }

  template <class Fill>
  void reply(std::uint64_t id, const Fill& fill) {
    capnp::MallocMessageBuilder message;
    auto reply = message.initRoot<net::schema::Frame>().initReplies(1)[0];
    reply.setId(id);
    fill(reply);
    ws_->write(boost::asio::buffer(flat(message)));
  }

 private:
  RawListener listener_;
  std::optional<websocket::stream<boost::asio::ip::tcp::socket>> ws_;
};

TEST_CASE("a call whose answer was lost ends once its server says that it has nothing left to answer", "[rpc][c20]") {
  PlayedServer server;
  TestClient client;
  TestClient::Future lost;
  TestClient::Future slow;
  const auto first = client.start_forward(server.endpoint(), "ffn.0.0", 0, "x", soon(), lost);
  server.accept();
  CHECK(server.read_forward() == first);
  const auto second = client.start_forward(server.endpoint(), "ffn.0.1", 0, "x", soon(), slow);
  CHECK(server.read_forward() == second);
  client.client().check({first, second, 123'456});
  const auto question = server.read_question({first, second});
  server.reply(question, [&](net::schema::Reply::Builder reply) { reply.initProgress(1).set(0, second); });
  const auto told = get(lost);
  REQUIRE(told.has_error());
  CHECK(told.error().code == Errc::kLost);
  CHECK(told.error().message.find("forward ffn.0.0") != std::string::npos);
  server.reply(second, [](net::schema::Reply::Builder reply) { reply.initForward(0); });
  CHECK(get(slow).has_value());
}

TEST_CASE("a server that does not understand the question still gives its answers", "[rpc][e19]") {
  PlayedServer server;
  TestClient client;
  TestClient::Future future;
  const auto id = client.start_forward(server.endpoint(), "ffn.0.0", 0, "x", soon(), future);
  server.accept();
  CHECK(server.read_forward() == id);
  client.client().check({id});
  const auto question = server.read_question({id});
  server.reply(question, [](net::schema::Reply::Builder reply) {
    net::write_error({Errc::kInvalidArgument, "does not know calls of kind 5", {}}, reply.initError());
  });
  server.reply(id, [](net::schema::Reply::Builder reply) { reply.initForward(0); });
  CHECK(get(future).has_value());
}

TEST_CASE("a server that is still busy with a call says so, and the call goes on", "[rpc][c20]") {
  std::mutex mutex;
  std::vector<net::IncomingCall> held;
  TestServer server([&](net::IncomingCall call) {
    if (call.reader().getForward().getRngSeed() == 1) return echo(std::move(call));
    const std::lock_guard lock(mutex);
    held.push_back(std::move(call));
  });
  TestClient client;
  TestClient::Future busy;
  const auto id = client.start_forward(server.endpoint(), "ffn.0.0", 0, "x", soon(), busy);
  client.client().check({id});
  auto behind = client.forward(server.endpoint(), "ffn.0.1", 1, "y");  // Answered after the question.
  REQUIRE(get(behind).has_value());
  CHECK(busy.wait_for(0s) == std::future_status::timeout);
  {
    const std::lock_guard lock(mutex);
    REQUIRE(held.size() == 1);
    echo(std::move(held.front()));
    held.clear();
  }
  CHECK(get(busy).has_value());
}

}  // namespace
}  // namespace dmoe

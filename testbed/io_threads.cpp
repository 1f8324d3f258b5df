#include "testbed/io_threads.hpp"

namespace dmoe::testbed {

IoThreads::IoThreads(int threads) : io_(threads), work_(boost::asio::make_work_guard(io_)) {
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { io_.run(); });
}

IoThreads::~IoThreads() {
  work_.reset();
  io_.stop();
  for (auto& thread : threads_) thread.join();
}

}  // namespace dmoe::testbed

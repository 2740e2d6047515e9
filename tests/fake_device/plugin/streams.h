// A stream is a thread: what is put on it happens later, in order. An event is a number on it.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

#include "interface.h"

namespace fake {

class Stream {
 public:
  Stream();
  void put(std::function<void()> work);
  bool is_idle();
  void wait();
  // Returns at once, as cudaStreamDestroy does. What is queued still runs; then the stream is gone.
  void retire();

 private:
  void run();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  uint64_t given_ = 0, done_ = 0;
  bool retired_ = false;
};

// The latest record counts. An event that was never recorded is done.
class Event {
 public:
  uint64_t record();
  uint64_t latest();
  void reached(uint64_t number);
  bool is_done();
  void wait_for(uint64_t number);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t recorded_ = 0, done_ = 0;
};

Stream& stream_of(C_Stream stream);  // nullptr is the default stream
void wait_for_all_streams();

void set_stream_functions(C_DeviceInterface* interface);

}  // namespace fake

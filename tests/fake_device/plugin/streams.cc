#include "streams.h"

#include <algorithm>
#include <set>
#include <thread>

#include "launch.h"
#include "numbers.h"

namespace fake {

Stream::Stream() {
  std::thread([this] { run(); }).detach();
}

void Stream::put(std::function<void()> work) {
  std::lock_guard<std::mutex> lock(mutex_);
  queue_.push_back(std::move(work));
  ++given_;
  changed_.notify_all();
}

bool Stream::is_idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return done_ == given_;
}

void Stream::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  uint64_t until = given_;
  changed_.wait(lock, [&] { return done_ >= until; });
}

void Stream::retire() {
  put([this] { retired_ = true; });
}

void Stream::run() {
  while (!retired_) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return !queue_.empty(); });
    auto work = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    work();
    lock.lock();
    ++done_;
    changed_.notify_all();
  }
  delete this;
}

uint64_t Event::record() {
  std::lock_guard<std::mutex> lock(mutex_);
  return ++recorded_;
}

uint64_t Event::latest() {
  std::lock_guard<std::mutex> lock(mutex_);
  return recorded_;
}

void Event::reached(uint64_t number) {
  std::lock_guard<std::mutex> lock(mutex_);
  done_ = std::max(done_, number);
  changed_.notify_all();
}

bool Event::is_done() {
  std::lock_guard<std::mutex> lock(mutex_);
  return done_ >= recorded_;
}

void Event::wait_for(uint64_t number) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return done_ >= number; });
}

namespace {

std::mutex streams_mutex;
std::set<Stream*> streams;

Stream* make_stream() {
  auto* stream = new Stream;
  std::lock_guard<std::mutex> lock(streams_mutex);
  streams.insert(stream);
  return stream;
}

// A stream that holds an event may outlive Paddle's handle of it.
using SharedEvent = std::shared_ptr<Event>;
SharedEvent event_of(C_Event event) { return *reinterpret_cast<SharedEvent*>(event); }

C_Status create_stream(const C_Device, C_Stream* made) {
  *made = reinterpret_cast<C_Stream>(make_stream());
  return C_SUCCESS;
}

C_Status destroy_stream(const C_Device, C_Stream stream) {
  if (!stream) return C_SUCCESS;
  {
    std::lock_guard<std::mutex> lock(streams_mutex);
    if (!streams.erase(&stream_of(stream))) return C_ERROR;
  }
  stream_of(stream).retire();
  return C_SUCCESS;
}

C_Status query_stream(const C_Device, C_Stream stream) {
  return stream_of(stream).is_idle() ? C_SUCCESS : C_FAILED;
}

C_Status add_callback(const C_Device device, C_Stream stream, C_Callback callback, void* data) {
  int number = device->id;
  stream_of(stream).put([=] {
    C_Device_st on{number};
    C_Status status = C_SUCCESS;
    callback(&on, stream, data, &status);
  });
  return C_SUCCESS;
}

C_Status synchronize_stream(const C_Device, C_Stream stream) {
  stream_of(stream).wait();
  return C_SUCCESS;
}

C_Status synchronize_device(const C_Device) {
  wait_for_all_streams();
  return C_SUCCESS;
}

C_Status create_event(const C_Device, C_Event* made) {
  *made = reinterpret_cast<C_Event>(new SharedEvent(std::make_shared<Event>()));
  return C_SUCCESS;
}

C_Status destroy_event(const C_Device, C_Event event) {
  delete reinterpret_cast<SharedEvent*>(event);
  return C_SUCCESS;
}

C_Status record_event(const C_Device, C_Stream stream, C_Event event) {
  SharedEvent shared = event_of(event);
  uint64_t number = shared->record();
  stream_of(stream).put([=] { shared->reached(number); });
  return C_SUCCESS;
}

C_Status query_event(const C_Device, C_Event event) {
  return event_of(event)->is_done() ? C_SUCCESS : C_FAILED;
}

C_Status synchronize_event(const C_Device, C_Event event) {
  SharedEvent shared = event_of(event);
  shared->wait_for(shared->latest());
  return C_SUCCESS;
}

C_Status stream_wait_event(const C_Device, C_Stream stream, C_Event event) {
  SharedEvent shared = event_of(event);
  uint64_t number = shared->latest();
  stream_of(stream).put([=] { shared->wait_for(number); });
  return C_SUCCESS;
}

}  // namespace

Stream& stream_of(C_Stream stream) {
  static Stream* standard = make_stream();
  return stream ? *reinterpret_cast<Stream*>(stream) : *standard;
}

void wait_for_all_streams() {
  std::set<Stream*> now;
  {
    std::lock_guard<std::mutex> lock(streams_mutex);
    now = streams;
  }
  for (auto* stream : now) stream->wait();
}

void launch(void* stream, std::function<void()> work) {
  stream_of(static_cast<C_Stream>(stream)).put([work = std::move(work), late = kernel_us.get()] {
    pause_us(late);
    work();
  });
}

void set_stream_functions(C_DeviceInterface* interface) {
  interface->create_stream = create_stream;
  interface->destroy_stream = destroy_stream;
  interface->query_stream = query_stream;
  interface->stream_add_callback = add_callback;
  interface->synchronize_stream = synchronize_stream;
  interface->synchronize_device = synchronize_device;
  interface->create_event = create_event;
  interface->destroy_event = destroy_event;
  interface->record_event = record_event;
  interface->query_event = query_event;
  interface->synchronize_event = synchronize_event;
  interface->stream_wait_event = stream_wait_event;
}

}  // namespace fake

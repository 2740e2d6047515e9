// Named numbers that a test can set and read while the device runs, through fake_device_number.
#pragma once
#include <atomic>
#include <string>

namespace fake {

// A setting or a counter. A setting begins with the environment variable FAKE_<NAME>, if it is set.
class Number {
 public:
  Number(const char* name, long otherwise);
  long get() const { return value_.load(); }
  void set(long value) { value_.store(value); }
  void add(long more) { value_.fetch_add(more); }
  const std::string& name() const { return name_; }

 private:
  std::string name_;
  std::atomic<long> value_;
};

// Settings. Without a delay a wait that is missing goes unnoticed: the work is done before anybody
// can look.
extern Number devices;        // how many there are
extern Number memory_mb;      // of each device; beyond it an allocation fails
extern Number protect;        // 1: the host dies when it touches a device address
extern Number copy_us;        // before each copy that is put on a stream
extern Number kernel_us;      // before each kernel
extern Number collective_us;  // before each collective

// Counters.
extern Number copies_to_device, copies_to_host, bytes_to_device, bytes_to_host;
extern Number collectives;
extern Number bytes, peak_bytes;  // of all devices together

// Sleep on the thread of a stream.
void pause_us(long us);

}  // namespace fake

#include "numbers.h"

#include <chrono>
#include <cstdlib>
#include <thread>
#include <vector>

namespace fake {
namespace {

std::vector<Number*>& all_numbers() {
  static std::vector<Number*> all;
  return all;
}

long from_environment(const std::string& name, long otherwise) {
  std::string variable = "FAKE_";
  for (char letter : name) variable += static_cast<char>(std::toupper(letter));
  const char* text = std::getenv(variable.c_str());
  return text && *text ? std::atol(text) : otherwise;
}

}  // namespace

Number::Number(const char* name, long otherwise)
    : name_(name), value_(from_environment(name, otherwise)) {
  all_numbers().push_back(this);
}

Number devices("devices", 2);
Number memory_mb("memory_mb", 4096);
Number protect("protect", 1);
Number copy_us("copy_us", 0);
Number kernel_us("kernel_us", 0);
Number collective_us("collective_us", 0);
Number copies_to_device("copies_to_device", 0);
Number copies_to_host("copies_to_host", 0);
Number bytes_to_device("bytes_to_device", 0);
Number bytes_to_host("bytes_to_host", 0);
Number collectives("collectives", 0);
Number bytes("bytes", 0);
Number peak_bytes("peak_bytes", 0);

void pause_us(long us) {
  if (us > 0) std::this_thread::sleep_for(std::chrono::microseconds(us));
}

}  // namespace fake

// For ctypes: the value before; `is_new` says whether `value` is put in its place. -1: no such name.
extern "C" __attribute__((visibility("default"))) long fake_device_number(const char* name,
                                                                          bool is_new, long value) {
  for (auto* number : fake::all_numbers()) {
    if (number->name() != name) continue;
    long before = number->get();
    if (is_new) number->set(value);
    return before;
  }
  return -1;
}

// Device memory: RAM that only this plugin can reach.
#pragma once
#include <cstddef>
#include <map>
#include <mutex>

namespace fake {

constexpr int kMostDevices = 8;

// The memory of one device. It is mapped twice: under the addresses that the program sees, which
// have no access rights, and under addresses of the plugin's own. So whatever touches a device
// pointer from the host dies with SIGSEGV, as with a GPU.
class Memory {
 public:
  void open();
  // First fit, in pages. nullptr: there is no room. The bytes are 0xCD, not zero.
  void* take(size_t size);
  bool give_back(void* address);
  bool holds(const void* address) const { return address >= shown_ && address < shown_ + size_; }
  void* reach(const void* address) const { return own_ + (static_cast<const char*>(address) - shown_); }
  static size_t limit();
  size_t used();

 private:
  char* map(int rights);
  std::mutex mutex_;
  int file_ = -1;
  char *shown_ = nullptr, *own_ = nullptr;
  size_t size_ = 0, used_ = 0;
  std::map<size_t, size_t> free_, taken_;  // offset -> bytes
};

Memory& memory_of(int device);

// The address at which the plugin may read and write what the program calls `address`. Addresses of
// the host are returned as they are.
void* reach(const void* address);

}  // namespace fake

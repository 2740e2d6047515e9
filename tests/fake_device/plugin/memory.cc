#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "numbers.h"

namespace fake {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kAddresses = size_t{16} << 30;  // reserved for one device; pages come when touched

Memory memories[kMostDevices];

void count(long difference) {
  bytes.add(difference);
  if (bytes.get() > peak_bytes.get()) peak_bytes.set(bytes.get());
}

}  // namespace

void Memory::open() {
  size_ = kAddresses;
  file_ = memfd_create("fake_device", MFD_CLOEXEC);
  if (file_ < 0 || ftruncate(file_, static_cast<off_t>(size_)) != 0) std::abort();
  shown_ = map(protect.get() ? PROT_NONE : PROT_READ | PROT_WRITE);
  own_ = map(PROT_READ | PROT_WRITE);
  free_[0] = size_;
}

char* Memory::map(int rights) {
  void* at = mmap(nullptr, size_, rights, MAP_SHARED | MAP_NORESERVE, file_, 0);
  if (at == MAP_FAILED) std::abort();
  return static_cast<char*>(at);
}

size_t Memory::limit() { return std::min(kAddresses, static_cast<size_t>(memory_mb.get()) << 20); }

size_t Memory::used() {
  std::lock_guard<std::mutex> lock(mutex_);
  return used_;
}

void* Memory::take(size_t wanted) {
  std::lock_guard<std::mutex> lock(mutex_);
  size_t size = (std::max<size_t>(wanted, 1) + kPage - 1) / kPage * kPage;
  if (used_ + size > limit()) return nullptr;
  for (auto hole = free_.begin(); hole != free_.end(); ++hole) {
    if (hole->second < size) continue;
    size_t at = hole->first, rest = hole->second - size;
    free_.erase(hole);
    if (rest) free_[at + size] = rest;
    taken_[at] = size;
    used_ += size;
    count(static_cast<long>(size));
    std::memset(own_ + at, 0xCD, size);
    return shown_ + at;
  }
  return nullptr;
}

bool Memory::give_back(void* address) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto block = taken_.find(static_cast<size_t>(static_cast<char*>(address) - shown_));
  if (block == taken_.end()) return false;
  size_t at = block->first, size = block->second;
  taken_.erase(block);
  used_ -= size;
  count(-static_cast<long>(size));
  fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(at),
            static_cast<off_t>(size));
  auto next = free_.lower_bound(at);
  if (next != free_.end() && at + size == next->first) {
    size += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == at) {
      before->second += size;
      return true;
    }
  }
  free_[at] = size;
  return true;
}

Memory& memory_of(int device) { return memories[device]; }

void* reach(const void* address) {
  for (auto& memory : memories)
    if (memory.holds(address)) return memory.reach(address);
  return const_cast<void*>(address);
}

}  // namespace fake

#include "copies.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "memory.h"
#include "numbers.h"
#include "streams.h"

namespace fake {
namespace {

std::mutex pinned_mutex;
std::map<const char*, size_t> pinned;  // address -> bytes

bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto block = pinned.upper_bound(static_cast<const char*>(address));
  if (block == pinned.begin()) return false;
  --block;
  return static_cast<const char*>(address) < block->first + block->second;
}

void count_to_device(size_t size) {
  copies_to_device.add(1);
  bytes_to_device.add(static_cast<long>(size));
}

void count_to_host(size_t size) {
  copies_to_host.add(1);
  bytes_to_host.add(static_cast<long>(size));
}

C_Status to_device(const C_Device, void* to, const void* from, size_t size) {
  count_to_device(size);
  std::memcpy(reach(to), from, size);
  return C_SUCCESS;
}

C_Status to_host(const C_Device, void* to, const void* from, size_t size) {
  count_to_host(size);
  std::memcpy(to, reach(from), size);
  return C_SUCCESS;
}

C_Status on_device(const C_Device, void* to, const void* from, size_t size) {
  std::memcpy(reach(to), reach(from), size);
  return C_SUCCESS;
}

C_Status between_devices(const C_Device, const C_Device, void* to, const void* from, size_t size) {
  return on_device(nullptr, to, from, size);
}

C_Status on_device_later(const C_Device, C_Stream stream, void* to, const void* from, size_t size) {
  stream_of(stream).put([=, late = copy_us.get()] {
    pause_us(late);
    std::memcpy(reach(to), reach(from), size);
  });
  return C_SUCCESS;
}

C_Status between_devices_later(const C_Device, const C_Device, C_Stream stream, void* to,
                               const void* from, size_t size) {
  return on_device_later(nullptr, stream, to, from, size);
}

// As CUDA does: pageable memory has been read when the call returns; pinned memory is read later.
C_Status to_device_later(const C_Device, C_Stream stream, void* to, const void* from, size_t size) {
  count_to_device(size);
  std::shared_ptr<std::vector<char>> staged;
  if (!is_pinned(from)) {
    auto* begin = static_cast<const char*>(from);
    staged = std::make_shared<std::vector<char>>(begin, begin + size);
  }
  stream_of(stream).put([=, late = copy_us.get()] {
    pause_us(late);
    std::memcpy(reach(to), staged ? staged->data() : from, size);
  });
  return C_SUCCESS;
}

// Pageable memory has been written when the call returns; pinned memory is written later.
C_Status to_host_later(const C_Device, C_Stream stream, void* to, const void* from, size_t size) {
  count_to_host(size);
  stream_of(stream).put([=, late = copy_us.get()] {
    pause_us(late);
    std::memcpy(to, reach(from), size);
  });
  if (!is_pinned(to)) stream_of(stream).wait();
  return C_SUCCESS;
}

C_Status allocate(const C_Device device, void** address, size_t size) {
  *address = memory_of(device->id).take(size);
  return C_SUCCESS;  // of nullptr Paddle makes its out-of-memory error, of a failure it does not
}

C_Status deallocate(const C_Device device, void* address, size_t) {
  wait_for_all_streams();  // so does cudaFree
  return memory_of(device->id).give_back(address) ? C_SUCCESS : C_ERROR;
}

C_Status set_bytes(const C_Device, void* address, unsigned char value, size_t size) {
  std::memset(reach(address), value, size);
  return C_SUCCESS;
}

C_Status allocate_pinned(const C_Device, void** address, size_t size) {
  if (posix_memalign(address, 4096, std::max<size_t>(size, 1)) != 0) return C_FAILED;
  std::lock_guard<std::mutex> lock(pinned_mutex);
  pinned[static_cast<char*>(*address)] = size;
  return C_SUCCESS;
}

C_Status deallocate_pinned(const C_Device, void* address, size_t) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  pinned.erase(static_cast<char*>(address));
  std::free(address);
  return C_SUCCESS;
}

C_Status memory_stats(const C_Device device, size_t* total, size_t* free) {
  *total = Memory::limit();
  *free = *total - std::min(*total, memory_of(device->id).used());
  return C_SUCCESS;
}

C_Status smallest_block(const C_Device, size_t* size) { return *size = 256, C_SUCCESS; }

}  // namespace

void set_copy_functions(C_DeviceInterface* interface) {
  interface->memory_copy_h2d = to_device;
  interface->memory_copy_d2h = to_host;
  interface->memory_copy_d2d = on_device;
  interface->memory_copy_p2p = between_devices;
  interface->async_memory_copy_h2d = to_device_later;
  interface->async_memory_copy_d2h = to_host_later;
  interface->async_memory_copy_d2d = on_device_later;
  interface->async_memory_copy_p2p = between_devices_later;
  interface->device_memory_allocate = allocate;
  interface->device_memory_deallocate = deallocate;
  interface->device_memory_set = set_bytes;
  interface->host_memory_allocate = allocate_pinned;
  interface->host_memory_deallocate = deallocate_pinned;
  interface->unified_memory_allocate = allocate_pinned;
  interface->unified_memory_deallocate = deallocate_pinned;
  interface->device_memory_stats = memory_stats;
  interface->device_min_chunk_size = smallest_block;
}

}  // namespace fake

// Where Paddle enters: InitPlugin fills in the table of the functions that make up the device.
#include <algorithm>
#include <cstring>

#include "collectives.h"
#include "copies.h"
#include "memory.h"
#include "numbers.h"
#include "numbers_of_types.h"
#include "streams.h"

namespace fake {
namespace {

thread_local int current = 0;

int num_devices() { return static_cast<int>(std::min<long>(kMostDevices, devices.get())); }

C_Status initialize() {
  for (int i = 0; i < num_devices(); ++i) memory_of(i).open();
  return C_SUCCESS;
}
C_Status finalize() { return C_SUCCESS; }
C_Status init_device(const C_Device device) { return current = device->id, C_SUCCESS; }
C_Status deinit_device(const C_Device) { return C_SUCCESS; }
C_Status set_device(const C_Device device) { return current = device->id, C_SUCCESS; }
C_Status get_device(const C_Device device) { return device->id = current, C_SUCCESS; }
C_Status device_count(size_t* count) { return *count = num_devices(), C_SUCCESS; }
C_Status device_list(size_t* list) {
  for (int i = 0; i < num_devices(); ++i) list[i] = i;
  return C_SUCCESS;
}

#ifdef FAKE_API_3
C_Status yes(const C_Device, bool* is_supported) { return *is_supported = true, C_SUCCESS; }
C_Status zero(const C_Device, size_t* value) { return *value = 0, C_SUCCESS; }
C_Status one(const C_Device, size_t* value) { return *value = 1, C_SUCCESS; }
#endif

// y = alpha * x + beta * y: how Paddle adds up the gradients of a tensor that is used twice.
C_Status add_scaled(const C_Device, C_Stream stream, C_DataType type, size_t count, float alpha,
                    void* x, float beta, void* y) {
  bool is_known = with_type(type, [=](auto one) {
    using T = decltype(one);
    using W = typename Computed<T>::type;
    stream_of(stream).put([=, late = kernel_us.get()] {
      pause_us(late);
      auto *from = static_cast<T*>(reach(x)), *to = static_cast<T*>(reach(y));
      for (size_t i = 0; i < count; ++i)
        to[i] = static_cast<T>(static_cast<W>(alpha) * static_cast<W>(from[i]) +
                               static_cast<W>(beta) * static_cast<W>(to[i]));
    });
  });
  return is_known ? C_SUCCESS : C_ERROR;
}

}  // namespace
}  // namespace fake

extern "C" __attribute__((visibility("default"))) void InitPlugin(CustomRuntimeParams* params) {
  using namespace fake;
  PADDLE_CUSTOM_RUNTIME_CHECK_VERSION(params);
  params->device_type = const_cast<char*>("fake_device");
  params->sub_device_type = const_cast<char*>("v1");
  auto* interface = params->interface;
  std::memset(static_cast<void*>(interface), 0, sizeof(C_DeviceInterface));
  interface->initialize = initialize;
  interface->finalize = finalize;
  interface->init_device = init_device;
  interface->deinit_device = deinit_device;
  interface->set_device = set_device;
  interface->get_device = get_device;
  interface->get_device_count = device_count;
  interface->get_device_list = device_list;
  interface->blas_axpby = add_scaled;
#ifdef FAKE_API_3
  interface->is_float16_supported = yes;
  interface->is_bfloat16_supported = yes;
  interface->get_compute_capability = zero;
  interface->get_runtime_version = zero;
  interface->get_driver_version = zero;
  interface->get_multi_process = one;
  interface->get_max_threads_per_mp = one;
  interface->get_max_threads_per_block = one;
#endif
  set_stream_functions(interface);
  set_copy_functions(interface);
  set_collective_functions(interface);
}

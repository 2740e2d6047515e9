// What a kernel needs of the device. Kernels do not see device_ext.h: its names clash with theirs.
#pragma once
#include <functional>

namespace fake {

void* reach(const void* address);
// Run `work` on the thread of `stream`, after what is there already.
void launch(void* stream, std::function<void()> work);

}  // namespace fake

// Allocation, and copies between host and device.
#pragma once
#include "interface.h"

namespace fake {

void set_copy_functions(C_DeviceInterface* interface);

}  // namespace fake

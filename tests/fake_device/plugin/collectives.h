// Collectives between processes of this machine.
#pragma once
#include "interface.h"

namespace fake {

void set_collective_functions(C_DeviceInterface* interface);

}  // namespace fake

// Paddle's table of functions for a device. Its header of 2.6 leaves out what it needs itself.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "paddle/phi/backends/device_ext.h"

// Arithmetic on the plain numbers of Paddle's dtypes, for the parts that do not see Paddle's own.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "interface.h"

namespace fake {

struct Bfloat16 {
  uint16_t bits;
  Bfloat16() = default;
  explicit Bfloat16(float value) {  // rounds to nearest even
    uint32_t wide;
    std::memcpy(&wide, &value, sizeof wide);
    bits = static_cast<uint16_t>((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16);
  }
  operator float() const {
    uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
};

// In what type to compute: half precision in float32, as devices do.
template <typename T>
struct Computed {
  using type = T;
};
template <>
struct Computed<Bfloat16> {
  using type = float;
};
template <>
struct Computed<_Float16> {
  using type = float;
};

// visit(T{}) with the T of `type`; false where numbers of it cannot be added.
template <typename Visit>
bool with_type(C_DataType type, Visit visit) {
  switch (type) {
    case FLOAT32: return visit(float{}), true;
    case FLOAT64: return visit(double{}), true;
    case FLOAT16: return visit(_Float16{}), true;
    case BFLOAT16: return visit(Bfloat16{}), true;
    case INT32: return visit(int32_t{}), true;
    case INT64: return visit(int64_t{}), true;
    case INT8: return visit(int8_t{}), true;
    case UINT8: case BOOL: return visit(uint8_t{}), true;
    default: return false;
  }
}

inline size_t size_of(C_DataType type) {
  size_t size = 0;
  if (!with_type(type, [&](auto one) { size = sizeof one; })) std::abort();
  return size;
}

}  // namespace fake

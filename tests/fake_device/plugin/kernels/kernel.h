// What the kernels share: reaching tensors, strides, and the precision to compute in.
//
// Paddle runs an operator that has no kernel here on the CPU, by copies. A kernel is written where
// that does not work: Paddle calls it without that detour, or the CPU has none for half precision,
// or it draws random numbers, which must come from the device's own generator.
#pragma once
#include <cstdint>
#include <vector>

#include "../launch.h"
#include "paddle/phi/capi/all.h"

namespace fake {

using Context = phi::Context;
using Tensor = phi::DenseTensor;
using Sizes = std::vector<int64_t>;
using Half = phi::dtype::float16;
using Bfloat = phi::dtype::bfloat16;

template <typename T>
struct WideOf {
  using type = T;
};
template <>
struct WideOf<Half> {
  using type = float;
};
template <>
struct WideOf<Bfloat> {
  using type = float;
};
// In what type to compute with numbers of type T: half precision in float32, as devices do.
template <typename T>
using Wide = typename WideOf<T>::type;

template <typename T>
const T* input(const Tensor& tensor) {
  return static_cast<const T*>(reach(tensor.data<T>()));
}

template <typename T>
T* output(const Context& context, Tensor* tensor) {
  return static_cast<T*>(reach(context.template Alloc<T>(tensor)));
}

// Whether Paddle wants this output; it leaves out gradients that nobody asks for.
inline bool is_wanted(const Tensor* tensor) { return tensor && tensor->raw_data(); }

// The number in `value`, which Scalar cannot give as a half-precision one.
template <typename T>
T number(const phi::Scalar& value) {
  return static_cast<T>(value.to<Wide<T>>());
}

inline int64_t product_of(const Sizes& sizes) {
  int64_t product = 1;
  for (auto size : sizes) product *= size;
  return product;
}

// The strides of a tensor without gaps.
inline Sizes packed_strides(const Sizes& shape) {
  Sizes strides(shape.size());
  int64_t step = 1;
  for (size_t i = shape.size(); i-- > 0; step *= shape[i]) strides[i] = step;
  return strides;
}

// Strides by which `tensor` is read as one of shape `of_all`: 0 where one row serves for all.
inline Sizes broadcast_strides(const Tensor& tensor, const Sizes& of_all) {
  Sizes shape = tensor.dims(), own = tensor.strides(), strides(of_all.size(), 0);
  size_t more = of_all.size() - shape.size();
  for (size_t i = 0; i < shape.size(); ++i) strides[more + i] = shape[i] == 1 ? 0 : own[i];
  return strides;
}

// Where element `index` of a tensor of `shape`, counted row by row, is in memory.
inline int64_t offset_of(int64_t index, const Sizes& shape, const Sizes& strides) {
  int64_t offset = 0;
  for (size_t i = shape.size(); i-- > 0; index /= shape[i]) offset += index % shape[i] * strides[i];
  return offset;
}

}  // namespace fake

#define FAKE_HALVES fake::Half, fake::Bfloat
#define FAKE_FLOATS float, double, FAKE_HALVES
#define FAKE_ALL_TYPES bool, uint8_t, int8_t, int16_t, int32_t, int64_t, FAKE_FLOATS
#define FAKE_KERNEL(name, function, ...) \
  PD_BUILD_PHI_KERNEL(name, fake_device, ALL_LAYOUT, fake::function, __VA_ARGS__) {}

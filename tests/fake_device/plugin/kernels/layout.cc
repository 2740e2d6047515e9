// Kernels that move or set bytes. Paddle calls them with the device's memory, without its detour
// over the CPU.
#include <algorithm>

#include "kernel.h"

namespace fake {

template <typename T>
void Contiguous(const Context& context, const Tensor& x, Tensor* out) {
  Sizes shape = x.dims(), strides = x.strides();
  int64_t count = x.numel();
  out->set_strides(packed_strides(shape));
  out->set_offset(0);
  T* to = output<T>(context, out);
  const T* from = input<T>(x);
  launch(context.stream(), [=] {
    for (int64_t i = 0; i < count; ++i) to[i] = from[offset_of(i, shape, strides)];
  });
}

template <typename T>
void StridedCopy(const Context& context, const Tensor& x, const Sizes& shape, const Sizes& strides,
                 int64_t offset, Tensor* out) {
  Sizes x_shape = x.dims(), x_strides = x.strides();
  int64_t count = x.numel();
  out->Resize(shape);
  out->set_strides(strides);
  out->set_offset(offset);
  T* to = static_cast<T*>(reach(out->data<T>()));
  const T* from = input<T>(x);
  launch(context.stream(), [=] {
    for (int64_t i = 0; i < count; ++i)
      to[offset_of(i, shape, strides)] = from[offset_of(i, x_shape, x_strides)];
  });
}

template <typename T>
void Full(const Context& context, const phi::IntArray& shape, const phi::Scalar& value,
          phi::DataType, Tensor* out) {
  auto sizes = shape.GetData();
  out->Resize(Sizes(sizes.begin(), sizes.end()));
  T* to = output<T>(context, out);
  int64_t count = out->numel();
  T one = number<T>(value);
  launch(context.stream(), [=] { std::fill(to, to + count, one); });
}

template <typename T>
void Fill(const Context& context, const Tensor& x, const phi::Scalar& value, Tensor* out) {
  Sizes shape = x.dims(), strides = x.strides();
  int64_t count = x.numel();
  T* to = output<T>(context, out);
  T one = number<T>(value);
  launch(context.stream(), [=] {
    for (int64_t i = 0; i < count; ++i) to[offset_of(i, shape, strides)] = one;
  });
}

}  // namespace fake

FAKE_KERNEL(contiguous, Contiguous, FAKE_ALL_TYPES)
FAKE_KERNEL(strided_copy, StridedCopy, FAKE_ALL_TYPES)
FAKE_KERNEL(full, Full, FAKE_ALL_TYPES)
FAKE_KERNEL(fill, Fill, FAKE_ALL_TYPES)

// Kernels that compute each number from those at the same place.
#include <cmath>
#include <vector>

#include "kernel.h"

namespace fake {

// out[i] = f(x[i]), or f(x[i], y[i]) for two tensors of one shape.
template <typename T, typename F>
void each(const Context& context, const Tensor& x, const Tensor& y, Tensor* out, F f) {
  const T *a = input<T>(x), *b = input<T>(y);
  int64_t count = x.numel();
  T* to = output<T>(context, out);
  launch(context.stream(), [=] {
    for (int64_t i = 0; i < count; ++i)
      to[i] = static_cast<T>(f(static_cast<Wide<T>>(a[i]), static_cast<Wide<T>>(b[i])));
  });
}

// out = f(x, y), where one row of x or y may serve for many. They need not be contiguous: Paddle
// adds up gradients as they come, and that of a transposed view is one.
template <typename T, typename F>
void each_broadcast(const Context& context, const Tensor& x, const Tensor& y, Tensor* out, F f) {
  Sizes shape = out->dims(), packed = packed_strides(shape);
  const T *a = input<T>(x), *b = input<T>(y);
  int64_t count = out->numel();
  Sizes x_strides = broadcast_strides(x, shape), y_strides = broadcast_strides(y, shape);
  T* to = output<T>(context, out);
  Sizes strides = out->strides();
  launch(context.stream(), [=] {
    auto place = [&](int64_t i, const Sizes& of) {
      return of == packed ? i : offset_of(i, shape, of);
    };
    for (int64_t i = 0; i < count; ++i)
      to[place(i, strides)] = static_cast<T>(f(static_cast<Wide<T>>(a[place(i, x_strides)]),
                                               static_cast<Wide<T>>(b[place(i, y_strides)])));
  });
}

// The gradient of `of`: the sums of value(i) over all places i that one number of it served for.
template <typename T, typename Value>
void sum_to(const Context& context, const Tensor& of, const Sizes& shape, Tensor* gradient,
            Value value) {
  if (!is_wanted(gradient)) return;
  // Of the gradient, which is packed, not of the tensor itself.
  Sizes own = of.dims(), packed = packed_strides(own), strides(shape.size(), 0);
  for (size_t i = own.size(), j = shape.size(); i-- > 0;) strides[--j] = own[i] == 1 ? 0 : packed[i];
  int64_t count = product_of(shape), size = of.numel();
  T* to = output<T>(context, gradient);
  launch(context.stream(), [=] {
    std::vector<Wide<T>> sums(size);
    for (int64_t i = 0; i < count; ++i) sums[offset_of(i, shape, strides)] += value(i);
    for (int64_t i = 0; i < size; ++i) to[i] = static_cast<T>(sums[i]);
  });
}

// Paddle adds up the gradients of a leaf with this kernel, without its detour over the CPU.
template <typename T>
void Add(const Context& context, const Tensor& x, const Tensor& y, Tensor* out) {
  each_broadcast<T>(context, x, y, out, [](auto a, auto b) { return a + b; });
}

template <typename T>
void Subtract(const Context& context, const Tensor& x, const Tensor& y, Tensor* out) {
  each_broadcast<T>(context, x, y, out, [](auto a, auto b) { return a - b; });
}

template <typename T>
void Multiply(const Context& context, const Tensor& x, const Tensor& y, Tensor* out) {
  each_broadcast<T>(context, x, y, out, [](auto a, auto b) { return a * b; });
}

template <typename T>
void AddGrad(const Context& context, const Tensor& x, const Tensor& y, const Tensor& gradient, int,
             Tensor* x_gradient, Tensor* y_gradient) {
  Sizes shape = gradient.dims();
  const T* g = input<T>(gradient);
  auto value = [=](int64_t i) { return static_cast<Wide<T>>(g[i]); };
  sum_to<T>(context, x, shape, x_gradient, value);
  sum_to<T>(context, y, shape, y_gradient, value);
}

template <typename T>
void MultiplyGrad(const Context& context, const Tensor& x, const Tensor& y, const Tensor& gradient,
                  int, Tensor* x_gradient, Tensor* y_gradient) {
  Sizes shape = gradient.dims();
  Sizes x_strides = broadcast_strides(x, shape), y_strides = broadcast_strides(y, shape);
  const T *a = input<T>(x), *b = input<T>(y), *g = input<T>(gradient);
  auto times = [=](const T* other, const Sizes& strides) {
    return [=](int64_t i) {
      return static_cast<Wide<T>>(g[i]) * static_cast<Wide<T>>(other[offset_of(i, shape, strides)]);
    };
  };
  sum_to<T>(context, x, shape, x_gradient, times(b, y_strides));
  sum_to<T>(context, y, shape, y_gradient, times(a, x_strides));
}

template <typename T>
void Tanh(const Context& context, const Tensor& x, Tensor* out) {
  each<T>(context, x, x, out, [](auto a, auto) { return std::tanh(a); });
}

template <typename T>
void TanhGrad(const Context& context, const Tensor& y, const Tensor& gradient, Tensor* out) {
  each<T>(context, y, gradient, out, [](auto y, auto g) { return g * (1 - y * y); });
}

template <typename T>
void Square(const Context& context, const Tensor& x, Tensor* out) {
  each<T>(context, x, x, out, [](auto a, auto) { return a * a; });
}

template <typename T>
void SquareGrad(const Context& context, const Tensor& x, const Tensor& gradient, Tensor* out) {
  each<T>(context, x, gradient, out, [](auto a, auto g) { return 2 * a * g; });
}

template <typename W>
W normal_density(W x) {
  return std::exp(-x * x / 2) * static_cast<W>(0.3989422804014327);
}

template <typename W>
W normal_share_below(W x) {
  return (1 + std::erf(x * static_cast<W>(0.7071067811865476))) / 2;
}

template <typename T>
void Gelu(const Context& context, const Tensor& x, bool, Tensor* out) {
  each<T>(context, x, x, out, [](auto a, auto) { return a * normal_share_below(a); });
}

template <typename T>
void GeluGrad(const Context& context, const Tensor& x, const Tensor& gradient, bool, Tensor* out) {
  each<T>(context, x, gradient, out, [](auto a, auto g) {
    return g * (normal_share_below(a) + a * normal_density(a));
  });
}

}  // namespace fake

FAKE_KERNEL(add, Add, int32_t, int64_t, FAKE_FLOATS)
FAKE_KERNEL(subtract, Subtract, FAKE_HALVES)
FAKE_KERNEL(multiply, Multiply, FAKE_HALVES)
FAKE_KERNEL(add_grad, AddGrad, FAKE_HALVES)
FAKE_KERNEL(multiply_grad, MultiplyGrad, FAKE_HALVES)
FAKE_KERNEL(tanh, Tanh, FAKE_HALVES)
FAKE_KERNEL(tanh_grad, TanhGrad, FAKE_HALVES)
FAKE_KERNEL(square, Square, FAKE_HALVES)
FAKE_KERNEL(square_grad, SquareGrad, FAKE_HALVES)
FAKE_KERNEL(gelu, Gelu, FAKE_HALVES)
FAKE_KERNEL(gelu_grad, GeluGrad, FAKE_HALVES)

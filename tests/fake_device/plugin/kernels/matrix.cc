// Matrix products and softmax in half precision, for which the CPU has no kernels, and the gradient
// of an embedding, which Paddle's detour over the CPU would leave there.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernel.h"

namespace fake {

// The shapes of a product of (batches of) matrices, either of them transposed or not.
struct Product {
  Sizes batches, x_shape, y_shape;
  int64_t rows, inner, columns;
  bool x_turned, y_turned;

  Product(Sizes x, Sizes y, bool x_turned, bool y_turned) : x_turned(x_turned), y_turned(y_turned) {
    if (x.size() == 1) x.insert(x_turned ? x.end() : x.begin(), 1);
    if (y.size() == 1) y.insert(y_turned ? y.begin() : y.end(), 1);
    size_t rank = std::max(x.size(), y.size());
    x.insert(x.begin(), rank - x.size(), 1);
    y.insert(y.begin(), rank - y.size(), 1);
    x_shape = x, y_shape = y;
    rows = x[rank - (x_turned ? 1 : 2)];
    inner = x[rank - (x_turned ? 2 : 1)];
    columns = y[rank - (y_turned ? 2 : 1)];
    for (size_t i = 0; i + 2 < rank; ++i) batches.push_back(std::max(x[i], y[i]));
  }

  // Where the matrix of batch `number` begins in a tensor of `shape`.
  int64_t start(const Sizes& shape, int64_t number) const {
    Sizes strides = packed_strides(shape);
    int64_t offset = 0;
    for (size_t i = batches.size(); i-- > 0; number /= batches[i])
      if (shape[i] != 1) offset += number % batches[i] * strides[i];
    return offset;
  }

  // visit(place in x, place in y, place in the product) for each of the multiplications.
  template <typename Visit>
  void each(Visit visit) const {
    for (int64_t b = 0; b < product_of(batches); ++b) {
      int64_t x0 = start(x_shape, b), y0 = start(y_shape, b), out0 = b * rows * columns;
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < columns; ++c)
          for (int64_t k = 0; k < inner; ++k)
            visit(x0 + (x_turned ? k * rows + r : r * inner + k),
                  y0 + (y_turned ? c * inner + k : k * columns + c), out0 + r * columns + c);
    }
  }
};

template <typename T>
void narrow(const std::vector<float>& from, T* to) {
  for (size_t i = 0; i < from.size(); ++i) to[i] = static_cast<T>(from[i]);
}

template <typename T>
void Matmul(const Context& context, const Tensor& x, const Tensor& y, bool x_turned, bool y_turned,
            Tensor* out) {
  Product product(x.dims(), y.dims(), x_turned, y_turned);
  const T *a = input<T>(x), *b = input<T>(y);
  size_t count = out->numel();
  T* to = output<T>(context, out);
  launch(context.stream(), [=] {
    std::vector<float> sums(count);
    product.each([&](int64_t i, int64_t j, int64_t o) {
      sums[o] += static_cast<float>(a[i]) * static_cast<float>(b[j]);
    });
    narrow(sums, to);
  });
}

template <typename T>
void MatmulGrad(const Context& context, const Tensor& x, const Tensor& y, const Tensor& gradient,
                bool x_turned, bool y_turned, Tensor* x_gradient, Tensor* y_gradient) {
  Product product(x.dims(), y.dims(), x_turned, y_turned);
  const T *a = input<T>(x), *b = input<T>(y), *g = input<T>(gradient);
  T* to_x = is_wanted(x_gradient) ? output<T>(context, x_gradient) : nullptr;
  T* to_y = is_wanted(y_gradient) ? output<T>(context, y_gradient) : nullptr;
  size_t x_count = x.numel(), y_count = y.numel();
  launch(context.stream(), [=] {
    std::vector<float> of_x(x_count), of_y(y_count);
    product.each([&](int64_t i, int64_t j, int64_t o) {
      of_x[i] += static_cast<float>(g[o]) * static_cast<float>(b[j]);
      of_y[j] += static_cast<float>(g[o]) * static_cast<float>(a[i]);
    });
    if (to_x) narrow(of_x, to_x);
    if (to_y) narrow(of_y, to_y);
  });
}

// line(place of the first number, how many, distance) for each line along `axis`.
template <typename Line>
void each_line(const Sizes& shape, int axis, Line line) {
  if (axis < 0) axis += static_cast<int>(shape.size());
  Sizes before(shape.begin(), shape.begin() + axis), after(shape.begin() + axis + 1, shape.end());
  int64_t count = shape[axis], distance = product_of(after);
  for (int64_t o = 0; o < product_of(before); ++o)
    for (int64_t i = 0; i < distance; ++i) line(o * count * distance + i, count, distance);
}

template <typename T>
void Softmax(const Context& context, const Tensor& x, int axis, Tensor* out) {
  Sizes shape = x.dims();
  const T* from = input<T>(x);
  T* to = output<T>(context, out);
  launch(context.stream(), [=] {
    each_line(shape, axis, [&](int64_t first, int64_t count, int64_t distance) {
      auto value = [&](int64_t i) { return static_cast<float>(from[first + i * distance]); };
      float largest = -INFINITY, sum = 0;
      for (int64_t i = 0; i < count; ++i) largest = std::max(largest, value(i));
      for (int64_t i = 0; i < count; ++i) sum += std::exp(value(i) - largest);
      for (int64_t i = 0; i < count; ++i)
        to[first + i * distance] = static_cast<T>(std::exp(value(i) - largest) / sum);
    });
  });
}

template <typename T>
void SoftmaxGrad(const Context& context, const Tensor& y, const Tensor& gradient, int axis,
                 Tensor* out) {
  Sizes shape = y.dims();
  const T *of = input<T>(y), *g = input<T>(gradient);
  T* to = output<T>(context, out);
  launch(context.stream(), [=] {
    each_line(shape, axis, [&](int64_t first, int64_t count, int64_t distance) {
      auto at = [&](const T* tensor, int64_t i) {
        return static_cast<float>(tensor[first + i * distance]);
      };
      float sum = 0;
      for (int64_t i = 0; i < count; ++i) sum += at(of, i) * at(g, i);
      for (int64_t i = 0; i < count; ++i)
        to[first + i * distance] = static_cast<T>(at(of, i) * (at(g, i) - sum));
    });
  });
}

template <typename T>
void EmbeddingGrad(const Context& context, const Tensor& ids, const Tensor& weight,
                   const Tensor& gradient, int64_t padding, Tensor* out) {
  const void* rows = reach(ids.data<void>());
  bool is_wide = ids.dtype() == PD_DataType::INT64;
  const T* g = input<T>(gradient);
  int64_t count = ids.numel(), width = weight.dims()[1], size = weight.numel();
  T* to = output<T>(context, out);
  launch(context.stream(), [=] {
    std::vector<Wide<T>> sums(size);
    for (int64_t i = 0; i < count; ++i) {
      int64_t row = is_wide ? static_cast<const int64_t*>(rows)[i] : static_cast<const int32_t*>(rows)[i];
      if (row == padding) continue;
      for (int64_t j = 0; j < width; ++j)
        sums[row * width + j] += static_cast<Wide<T>>(g[i * width + j]);
    }
    for (int64_t i = 0; i < size; ++i) to[i] = static_cast<T>(sums[i]);
  });
}

}  // namespace fake

FAKE_KERNEL(matmul, Matmul, FAKE_HALVES)
FAKE_KERNEL(matmul_grad, MatmulGrad, FAKE_HALVES)
FAKE_KERNEL(softmax, Softmax, FAKE_HALVES)
FAKE_KERNEL(softmax_grad, SoftmaxGrad, FAKE_HALVES)
FAKE_KERNEL(embedding_grad, EmbeddingGrad, FAKE_FLOATS)

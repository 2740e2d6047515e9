// Layer normalization of half-precision numbers; its weights may be in float32.
#include <cmath>
#include <functional>
#include <vector>

#include "kernel.h"

namespace fake {

// Reads a tensor of T or of float32 as float; `otherwise` where there is none.
template <typename T>
std::function<float(int64_t)> reader(const paddle::optional<Tensor>& tensor, float otherwise) {
  if (!tensor) return [=](int64_t) { return otherwise; };
  const void* data = reach(tensor->data<void>());
  if (tensor->dtype() == PD_DataType::FLOAT32)
    return [=](int64_t i) { return static_cast<const float*>(data)[i]; };
  return [=](int64_t i) { return static_cast<float>(static_cast<const T*>(data)[i]); };
}

// Puts sums into a gradient of the dtype of `like`, if it is wanted.
template <typename T>
std::function<void(const std::vector<float>&)> writer(const Context& context,
                                                      const paddle::optional<Tensor>& like,
                                                      Tensor* out) {
  if (!like || !is_wanted(out)) return [](const std::vector<float>&) {};
  if (like->dtype() == PD_DataType::FLOAT32) {
    float* to = output<float>(context, out);
    return [=](const std::vector<float>& sums) { std::copy(sums.begin(), sums.end(), to); };
  }
  T* to = output<T>(context, out);
  return [=](const std::vector<float>& sums) {
    for (size_t i = 0; i < sums.size(); ++i) to[i] = static_cast<T>(sums[i]);
  };
}

int64_t width_from(const Sizes& shape, int first_axis) {
  return product_of(Sizes(shape.begin() + first_axis, shape.end()));
}

template <typename T>
void LayerNorm(const Context& context, const Tensor& x, const paddle::optional<Tensor>& scale,
               const paddle::optional<Tensor>& bias, float epsilon, int first_axis, Tensor* out,
               Tensor* mean, Tensor* variance) {
  int64_t width = width_from(x.dims(), first_axis), rows = x.numel() / width;
  const T* from = input<T>(x);
  auto weight = reader<T>(scale, 1), shift = reader<T>(bias, 0);
  T* to = output<T>(context, out);
  float *means = output<float>(context, mean), *variances = output<float>(context, variance);
  launch(context.stream(), [=] {
    for (int64_t row = 0; row < rows; ++row) {
      auto value = [&](int64_t i) { return static_cast<float>(from[row * width + i]); };
      float sum = 0, squares = 0;
      for (int64_t i = 0; i < width; ++i) sum += value(i);
      float middle = sum / width;
      for (int64_t i = 0; i < width; ++i) squares += (value(i) - middle) * (value(i) - middle);
      means[row] = middle;
      variances[row] = squares / width;
      float inverse = 1 / std::sqrt(variances[row] + epsilon);
      for (int64_t i = 0; i < width; ++i)
        to[row * width + i] = static_cast<T>((value(i) - middle) * inverse * weight(i) + shift(i));
    }
  });
}

template <typename T>
void LayerNormGrad(const Context& context, const Tensor& x, const paddle::optional<Tensor>& scale,
                   const paddle::optional<Tensor>& bias, const Tensor& mean, const Tensor& variance,
                   const Tensor& gradient, float epsilon, int first_axis, Tensor* x_gradient,
                   Tensor* scale_gradient, Tensor* bias_gradient) {
  int64_t width = width_from(x.dims(), first_axis), rows = x.numel() / width;
  const T *from = input<T>(x), *g = input<T>(gradient);
  const float *means = input<float>(mean), *variances = input<float>(variance);
  auto weight = reader<T>(scale, 1);
  auto put_scale = writer<T>(context, scale, scale_gradient);
  auto put_bias = writer<T>(context, bias, bias_gradient);
  T* to = is_wanted(x_gradient) ? output<T>(context, x_gradient) : nullptr;
  launch(context.stream(), [=] {
    std::vector<float> of_scale(width), of_bias(width);
    for (int64_t row = 0; row < rows; ++row) {
      float inverse = 1 / std::sqrt(variances[row] + epsilon);
      auto normal = [&](int64_t i) {
        return (static_cast<float>(from[row * width + i]) - means[row]) * inverse;
      };
      auto given = [&](int64_t i) { return static_cast<float>(g[row * width + i]); };
      float sum = 0, sum_normal = 0;
      for (int64_t i = 0; i < width; ++i) {
        sum += given(i) * weight(i);
        sum_normal += given(i) * weight(i) * normal(i);
        of_scale[i] += given(i) * normal(i);
        of_bias[i] += given(i);
      }
      for (int64_t i = 0; to && i < width; ++i)
        to[row * width + i] = static_cast<T>(
            inverse * (given(i) * weight(i) - sum / width - normal(i) * sum_normal / width));
    }
    put_scale(of_scale);
    put_bias(of_bias);
  });
}

}  // namespace fake

FAKE_KERNEL(layer_norm, LayerNorm, FAKE_HALVES)
FAKE_KERNEL(layer_norm_grad, LayerNormGrad, FAKE_HALVES)

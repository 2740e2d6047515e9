// Kernels that draw random numbers from the generator of the device. On the CPU they would draw
// from the CPU's, and a wrong generator in a test would do no harm.
#include <cmath>
#include <string>

#include "kernel.h"

namespace fake {

uint64_t mixed(uint64_t seed, int64_t position) {  // splitmix64
  uint64_t z = seed + 0x9E3779B97F4A7C15ull * static_cast<uint64_t>(position + 1);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

// A number in [0, 1) for every position, as a counter-based generator of a GPU gives.
double unit(uint64_t seed, int64_t position) {
  return static_cast<double>(mixed(seed, position) >> 11) * 0x1p-53;
}

template <typename T>
void Dropout(const Context& context, const Tensor& x, const paddle::optional<Tensor>&,
             const phi::Scalar& p, bool is_test, const std::string& mode, int seed, bool fix_seed,
             Tensor* out, Tensor* mask) {
  float rate = p.to<float>();
  bool scales_in_training = mode == "upscale_in_train";
  int64_t count = x.numel();
  const T* from = input<T>(x);
  T* to = output<T>(context, out);
  if (is_test) {
    float scale = scales_in_training ? 1.f : 1.f - rate;
    launch(context.stream(), [=] {
      for (int64_t i = 0; i < count; ++i) to[i] = static_cast<T>(static_cast<float>(from[i]) * scale);
    });
    return;
  }
  uint8_t* kept = output<uint8_t>(context, mask);
  uint64_t drawn = fix_seed ? static_cast<uint64_t>(seed) : context.random();
  float scale = !scales_in_training ? 1.f : rate < 1 ? 1.f / (1.f - rate) : 0.f;
  launch(context.stream(), [=] {
    for (int64_t i = 0; i < count; ++i) {
      kept[i] = unit(drawn, i) >= rate;
      to[i] = static_cast<T>(kept[i] ? static_cast<float>(from[i]) * scale : 0.f);
    }
  });
}

template <typename T, typename Draw>
void draw(const Context& context, const phi::IntArray& shape, int seed, Tensor* out, Draw one) {
  auto sizes = shape.GetData();
  out->Resize(Sizes(sizes.begin(), sizes.end()));
  int64_t count = out->numel();
  T* to = output<T>(context, out);
  uint64_t drawn = seed ? static_cast<uint64_t>(seed) : context.random();
  launch(context.stream(), [=] {
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<T>(one(drawn, i));
  });
}

template <typename T>
void Uniform(const Context& context, const phi::IntArray& shape, phi::DataType,
             const phi::Scalar& min, const phi::Scalar& max, int seed, Tensor* out) {
  float low = min.to<float>(), high = max.to<float>();
  draw<T>(context, shape, seed, out, [=](uint64_t drawn, int64_t i) {
    return low + (high - low) * static_cast<float>(unit(drawn, i));
  });
}

template <typename T>
void Gaussian(const Context& context, const phi::IntArray& shape, float mean, float deviation,
              int seed, phi::DataType, Tensor* out) {
  draw<T>(context, shape, seed, out, [=](uint64_t drawn, int64_t i) {  // Box-Muller
    double radius = std::sqrt(-2 * std::log(1 - unit(drawn, 2 * i)));
    double angle = 6.283185307179586 * unit(drawn, 2 * i + 1);
    return mean + deviation * static_cast<float>(radius * std::cos(angle));
  });
}

}  // namespace fake

FAKE_KERNEL(dropout, Dropout, FAKE_FLOATS)
FAKE_KERNEL(uniform, Uniform, FAKE_FLOATS)
FAKE_KERNEL(gaussian, Gaussian, FAKE_FLOATS)

// Adam and AdamW for parameters in half precision with float32 master weights (level O2).
#include <cmath>

#include "kernel.h"

namespace fake {

struct AdamTensors {
  const Tensor &parameter, &gradient, &rate, &first_moment, &second_moment, &power1, &power2;
  const paddle::optional<Tensor>&master, &skip;
  Tensor *new_parameter, *new_first_moment, *new_second_moment, *new_power1, *new_power2, *new_master;
};

// One step; `decay` is what AdamW takes off the weight, times the learning rate.
template <typename T>
void adam_step(const Context& context, const AdamTensors& t, float beta1, float beta2, float epsilon,
               float rate_ratio, float decay) {
  bool has_master = static_cast<bool>(t.master);
  const T* parameter = input<T>(t.parameter);
  const float* master = has_master ? input<float>(*t.master) : nullptr;
  const void* gradient = reach(t.gradient.data<void>());
  bool is_wide = t.gradient.dtype() == PD_DataType::FLOAT32;
  const float* rate = input<float>(t.rate);
  const float *m = input<float>(t.first_moment), *v = input<float>(t.second_moment);
  const float *power1 = input<float>(t.power1), *power2 = input<float>(t.power2);
  const bool* skip = t.skip ? input<bool>(*t.skip) : nullptr;
  int64_t count = t.parameter.numel();
  T* new_parameter = output<T>(context, t.new_parameter);
  float* new_master = has_master ? output<float>(context, t.new_master) : nullptr;
  float *new_m = output<float>(context, t.new_first_moment);
  float *new_v = output<float>(context, t.new_second_moment);
  float *new_power1 = output<float>(context, t.new_power1);
  float *new_power2 = output<float>(context, t.new_power2);
  launch(context.stream(), [=] {
    if (skip && *skip) return;  // everything is updated in place, so it stays as it is
    float step = *rate * rate_ratio, p1 = *power1, p2 = *power2;
    float root = std::sqrt(1 - p2);
    for (int64_t i = 0; i < count; ++i) {
      float g = is_wide ? static_cast<const float*>(gradient)[i]
                        : static_cast<float>(static_cast<const T*>(gradient)[i]);
      float weight = master ? master[i] : static_cast<float>(parameter[i]);
      weight *= 1 - step * decay;
      new_m[i] = beta1 * m[i] + (1 - beta1) * g;
      new_v[i] = beta2 * v[i] + (1 - beta2) * g * g;
      weight -= step / (1 - p1) * new_m[i] * root / (std::sqrt(new_v[i]) + epsilon * root);
      if (new_master) new_master[i] = weight;
      new_parameter[i] = static_cast<T>(weight);
    }
    *new_power1 = p1 * beta1;
    *new_power2 = p2 * beta2;
  });
}

#ifdef FAKE_API_3
#define FAKE_MAXIMUM const paddle::optional<Tensor>&,
#define FAKE_AMSGRAD bool,
#define FAKE_NEW_MAXIMUM Tensor*,
#else
#define FAKE_MAXIMUM
#define FAKE_AMSGRAD
#define FAKE_NEW_MAXIMUM
#endif

template <typename T>
void AdamW(const Context& context, const Tensor& parameter, const Tensor& gradient,
           const Tensor& rate, const Tensor& first_moment, const Tensor& second_moment,
           FAKE_MAXIMUM const Tensor& power1, const Tensor& power2,
           const paddle::optional<Tensor>& master, const paddle::optional<Tensor>& skip,
           const phi::Scalar& beta1, const phi::Scalar& beta2, const phi::Scalar& epsilon,
           float rate_ratio, float decay, bool with_decay, bool, int64_t, bool, bool,
           FAKE_AMSGRAD Tensor* new_parameter, Tensor* new_first_moment, Tensor* new_second_moment,
           FAKE_NEW_MAXIMUM Tensor* new_power1, Tensor* new_power2, Tensor* new_master) {
  AdamTensors tensors{parameter, gradient, rate, first_moment, second_moment, power1, power2,
                      master, skip, new_parameter, new_first_moment, new_second_moment,
                      new_power1, new_power2, new_master};
  adam_step<T>(context, tensors, beta1.to<float>(), beta2.to<float>(), epsilon.to<float>(),
               rate_ratio, with_decay ? decay : 0.f);
}

template <typename T>
void Adam(const Context& context, const Tensor& parameter, const Tensor& gradient,
          const Tensor& rate, const Tensor& first_moment, const Tensor& second_moment,
          FAKE_MAXIMUM const Tensor& power1, const Tensor& power2,
          const paddle::optional<Tensor>& master, const paddle::optional<Tensor>& skip,
          const phi::Scalar& beta1, const phi::Scalar& beta2, const phi::Scalar& epsilon, bool,
          int64_t, bool, bool, FAKE_AMSGRAD Tensor* new_parameter, Tensor* new_first_moment,
          Tensor* new_second_moment, FAKE_NEW_MAXIMUM Tensor* new_power1, Tensor* new_power2,
          Tensor* new_master) {
  AdamTensors tensors{parameter, gradient, rate, first_moment, second_moment, power1, power2,
                      master, skip, new_parameter, new_first_moment, new_second_moment,
                      new_power1, new_power2, new_master};
  adam_step<T>(context, tensors, beta1.to<float>(), beta2.to<float>(), epsilon.to<float>(), 1, 0);
}

}  // namespace fake

FAKE_KERNEL(adamw, AdamW, FAKE_HALVES)
FAKE_KERNEL(adam, Adam, FAKE_HALVES)

// Norms with an optional residual add for a CPU, as ops of torch's stable ABI: each row is read
// once from memory, where plain torch makes a pass for every operation.
// Letters: n rows, h hidden (columns).
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kGrain = 16384;  // elements that are worth a thread

// The upper half of a float; conversions are written so that the compiler makes vectors of them.
struct BFloat16 {
  uint16_t bits;
};

inline float to_float(float value) { return value; }
inline float to_float(BFloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

template <typename T>
inline T from_float(float value);
template <>
inline float from_float(float value) {
  return value;
}
template <>
inline BFloat16 from_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40u;  // rounding could carry a NaN into an infinity
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return {static_cast<uint16_t>(nan ? quiet : rounded)};
}

template <typename T>
const T* read(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}
template <typename T>
const T* read(const std::optional<Tensor>& tensor) {
  return tensor ? read<T>(*tensor) : nullptr;
}
template <typename T>
T* write(Tensor& tensor) {
  return tensor.numel() ? static_cast<T*>(tensor.mutable_data_ptr()) : nullptr;
}

// Call ``body`` with a null pointer of the tensor's number type.
template <typename Body>
void by_type(const Tensor& tensor, Body&& body) {
  if (tensor.scalar_type() == ScalarType::Float) return body(static_cast<float*>(nullptr));
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::BFloat16,
                  "the kernels take float32 and bfloat16");
  body(static_cast<BFloat16*>(nullptr));
}

template <typename T>
std::vector<float> widened(const T* values, int64_t count) {
  std::vector<float> wide(values ? count : 0);
  for (int64_t i = 0; i < static_cast<int64_t>(wide.size()); ++i) wide[i] = to_float(values[i]);
  return wide;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> norm_forward(Tensor x, std::optional<Tensor> residual,
                                                        Tensor weight, std::optional<Tensor> bias,
                                                        double eps, bool centred) {
  const int64_t rows = x.size(0), columns = x.size(1);
  Tensor y = torch::stable::empty_like(x);
  Tensor total = residual ? torch::stable::empty_like(x) : torch::stable::new_empty(x, {0});
  Tensor mean = torch::stable::new_empty(x, {centred ? rows : 0}, ScalarType::Float);
  Tensor rstd = torch::stable::new_empty(x, {rows}, ScalarType::Float);
  if (rows == 0 || columns == 0) return {y, total, mean, rstd};
  by_type(x, [&](auto* kind) {
    using T = std::remove_pointer_t<decltype(kind)>;
    const T *in = read<T>(x), *added = read<T>(residual);
    T *out = write<T>(y), *sums = write<T>(total);
    float *middles = write<float>(mean), *inverses = write<float>(rstd);
    const std::vector<float> scale = widened(read<T>(weight), columns);
    const std::vector<float> shift = widened(read<T>(bias), columns);
    const auto some_rows = [&](int64_t begin, int64_t end) {
      std::vector<float> row(columns);
      float* v = row.data();
      const float* w = scale.data();
      for (int64_t r = begin; r < end; ++r) {
        const int64_t start = r * columns;
        if (added)
          for (int64_t c = 0; c < columns; ++c) {
            // What is stored is what is normed, so the backward pass sees the same numbers.
            const T sum = from_float<T>(to_float(in[start + c]) + to_float(added[start + c]));
            sums[start + c] = sum;
            v[c] = to_float(sum);
          }
        else
          for (int64_t c = 0; c < columns; ++c) v[c] = to_float(in[start + c]);
        float middle = 0.f, squares = 0.f;
        if (centred) {
          for (int64_t c = 0; c < columns; ++c) middle += v[c];
          middle /= columns;
          for (int64_t c = 0; c < columns; ++c) v[c] -= middle;
          middles[r] = middle;
        }
        for (int64_t c = 0; c < columns; ++c) squares += v[c] * v[c];
        const float inverse = 1.f / std::sqrt(squares / columns + static_cast<float>(eps));
        inverses[r] = inverse;
        if (bias)
          for (int64_t c = 0; c < columns; ++c)
            out[start + c] = from_float<T>(v[c] * inverse * w[c] + shift[c]);
        else
          for (int64_t c = 0; c < columns; ++c)
            out[start + c] = from_float<T>(v[c] * inverse * w[c]);
      }
    };
    torch::stable::parallel_for(0, rows, std::max<int64_t>(1, kGrain / columns), some_rows);
  });
  return {y, total, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> norm_backward(Tensor grad_y, std::optional<Tensor> grad_total,
                                                 Tensor total, Tensor weight, Tensor mean,
                                                 Tensor rstd, bool centred, bool with_bias) {
  const int64_t rows = total.size(0), columns = total.size(1);
  Tensor grad_x = torch::stable::empty_like(total);
  Tensor grad_weight = torch::stable::empty_like(weight);
  Tensor grad_bias = torch::stable::new_empty(weight, {with_bias ? columns : 0});
  if (columns == 0) return {grad_x, grad_weight, grad_bias};
  by_type(total, [&](auto* kind) {
    using T = std::remove_pointer_t<decltype(kind)>;
    const T *grads = read<T>(grad_y), *after = read<T>(grad_total), *sums = read<T>(total);
    const float *middles = centred ? read<float>(mean) : nullptr, *inverses = read<float>(rstd);
    T *out = write<T>(grad_x), *out_weight = write<T>(grad_weight), *out_bias = write<T>(grad_bias);
    const std::vector<float> scale = widened(read<T>(weight), columns);
    // One part a thread, added in order: the same sum in every run with so many threads.
    const int64_t parts = std::clamp<int64_t>(rows * columns / kGrain, 1,
                                              torch::stable::get_num_threads());
    std::vector<float> weight_parts(parts * columns), bias_parts(with_bias ? parts * columns : 0);
    const auto some_parts = [&](int64_t begin, int64_t end) {
      std::vector<float> units(columns), gradients(columns);
      float *u = units.data(), *g = gradients.data();
      const float* w = scale.data();
      for (int64_t part = begin; part < end; ++part) {
        float* ws = weight_parts.data() + part * columns;
        float* bs = with_bias ? bias_parts.data() + part * columns : nullptr;
        for (int64_t r = rows * part / parts; r < rows * (part + 1) / parts; ++r) {
          const int64_t start = r * columns;
          const float middle = middles ? middles[r] : 0.f, inverse = inverses[r];
          float plain = 0.f, along = 0.f;
          for (int64_t c = 0; c < columns; ++c) {
            const float gradient = to_float(grads[start + c]);
            u[c] = (to_float(sums[start + c]) - middle) * inverse;
            ws[c] += gradient * u[c];
            g[c] = gradient * w[c];
            along += g[c] * u[c];
            plain += g[c];
          }
          if (bs)
            for (int64_t c = 0; c < columns; ++c) bs[c] += to_float(grads[start + c]);
          along /= columns;
          plain = middles ? plain / columns : 0.f;
          if (after)
            for (int64_t c = 0; c < columns; ++c)
              out[start + c] = from_float<T>((g[c] - plain - u[c] * along) * inverse +
                                             to_float(after[start + c]));
          else
            for (int64_t c = 0; c < columns; ++c)
              out[start + c] = from_float<T>((g[c] - plain - u[c] * along) * inverse);
        }
      }
    };
    torch::stable::parallel_for(0, parts, 1, some_parts);
    const auto join = [&](const std::vector<float>& sums_of_parts, T* target) {
      for (int64_t c = 0; c < columns; ++c) {
        float sum = 0.f;
        for (int64_t part = 0; part < parts; ++part) sum += sums_of_parts[part * columns + c];
        target[c] = from_float<T>(sum);
      }
    };
    join(weight_parts, out_weight);
    if (with_bias) join(bias_parts, out_bias);
  });
  return {grad_x, grad_weight, grad_bias};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(mds_kernels, library) {
  library.def(
      "cpu_norm_forward(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, float eps, "
      "bool centred) -> (Tensor, Tensor, Tensor, Tensor)");
  library.def(
      "cpu_norm_backward(Tensor grad_y, Tensor? grad_total, Tensor total, Tensor weight, "
      "Tensor mean, Tensor rstd, bool centred, bool with_bias) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(mds_kernels, CPU, library) {
  library.impl("cpu_norm_forward", TORCH_BOX(&norm_forward));
  library.impl("cpu_norm_backward", TORCH_BOX(&norm_backward));
}

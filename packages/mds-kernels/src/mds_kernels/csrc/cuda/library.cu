// Launches of the kernel bodies, as ops of torch's stable ABI: one file for every torch from 2.13.
// The Python side checks shapes and dtypes and makes tensors contiguous before it calls.
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <tuple>

#include "norm.cuh"
#include "softmax.cuh"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kThreads = 256, kRows = 8, kBytes = 16;

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

cudaStream_t stream_of(const Tensor& tensor) {
  const auto stream = torch::stable::accelerator::getCurrentStream(tensor.get_device_index());
  return static_cast<cudaStream_t>(stream.nativeHandle());
}

void check_launch() {
  const cudaError_t error = cudaGetLastError();
  STD_TORCH_CHECK(error == cudaSuccess, "a kernel was not launched: ", cudaGetErrorString(error));
}

bool aligned(std::initializer_list<const void*> addresses) {
  for (const void* address : addresses)
    if (reinterpret_cast<uintptr_t>(address) % kBytes) return false;
  return true;
}

// Call ``body`` with a null pointer of the tensor's number type.
template <typename Body>
void by_type(const Tensor& tensor, Body&& body) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return body(static_cast<float*>(nullptr));
    case ScalarType::BFloat16:
      return body(static_cast<__nv_bfloat16*>(nullptr));
    case ScalarType::Half:
      return body(static_cast<__half*>(nullptr));
    default:
      STD_TORCH_CHECK(false, "the kernels take float32, bfloat16 and float16");
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor> norm_forward(Tensor x, std::optional<Tensor> residual,
                                                        Tensor weight, std::optional<Tensor> bias,
                                                        double eps, bool centred) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const int64_t rows = x.size(0), columns = x.size(1);
  Tensor y = torch::stable::empty_like(x);
  Tensor total = residual ? torch::stable::empty_like(x) : torch::stable::new_empty(x, {0});
  Tensor mean = torch::stable::new_empty(x, {centred ? rows : 0}, ScalarType::Float);
  Tensor rstd = torch::stable::new_empty(x, {rows}, ScalarType::Float);
  if (rows && columns)
    by_type(x, [&](auto* kind) {
      using T = std::remove_pointer_t<decltype(kind)>;
      constexpr int kPack = kBytes / sizeof(T);
      const T *in = read<T>(x), *added = read<T>(residual), *scale = read<T>(weight);
      const bool packed = columns % kPack == 0 && aligned({in, added, scale});
      auto kernel = packed ? mds::norm_forward<T, kThreads, kPack>
                           : mds::norm_forward<T, kThreads, 1>;
      kernel<<<rows, kThreads, 0, stream_of(x)>>>(
          in, added, scale, read<T>(bias), write<T>(y), write<T>(total), write<float>(mean),
          write<float>(rstd), static_cast<int>(columns), static_cast<float>(eps));
      check_launch();
    });
  return {y, total, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> norm_backward(Tensor grad_y, std::optional<Tensor> grad_total,
                                                 Tensor total, Tensor weight, Tensor mean,
                                                 Tensor rstd, bool centred, bool with_bias) {
  const torch::stable::accelerator::DeviceGuard guard(total.get_device_index());
  const int rows = total.size(0), columns = total.size(1);
  // Enough parts to fill a GPU, yet few enough that adding them is nothing.
  const int parts = rows < 64 * kRows ? (rows + kRows - 1) / kRows : 64;
  const int rows_each = parts ? (rows + parts - 1) / parts : 0;
  Tensor grad_x = torch::stable::empty_like(total);
  Tensor grad_weight = torch::stable::empty_like(weight);
  Tensor grad_bias = torch::stable::new_empty(weight, {with_bias ? columns : 0});
  Tensor weight_parts = torch::stable::new_empty(weight, {parts, columns}, ScalarType::Float);
  Tensor bias_parts =
      torch::stable::new_empty(weight, {with_bias ? parts : 0, columns}, ScalarType::Float);
  if (columns == 0) return {grad_x, grad_weight, grad_bias};
  by_type(total, [&](auto* kind) {
    using T = std::remove_pointer_t<decltype(kind)>;
    constexpr int kPack = kBytes / sizeof(T), kFew = 4;
    const T *grad = read<T>(grad_y), *after = read<T>(grad_total), *sum = read<T>(total);
    const T* scale = read<T>(weight);
    const float *middle = centred ? read<float>(mean) : nullptr, *inverse = read<float>(rstd);
    const cudaStream_t stream = stream_of(total);
    const bool packed = columns % kPack == 0 && aligned({grad, sum, scale});
    if (rows) {
      auto over_rows = packed ? mds::norm_backward_x<T, kThreads, kPack>
                              : mds::norm_backward_x<T, kThreads, 1>;
      over_rows<<<rows, kThreads, 0, stream>>>(grad, after, sum, scale, middle, inverse,
                                               write<T>(grad_x), columns);
      auto over_columns = packed ? mds::norm_backward_weight<T, kRows, kFew>
                                 : mds::norm_backward_weight<T, kRows, 1>;
      const int width = mds::kWarp * (packed ? kFew : 1);
      const dim3 grid((columns + width - 1) / width, parts), block(mds::kWarp, kRows);
      over_columns<<<grid, block, 0, stream>>>(grad, sum, middle, inverse,
                                               write<float>(weight_parts),
                                               write<float>(bias_parts), rows, columns, rows_each);
    }
    const int blocks = (columns + kThreads - 1) / kThreads;
    mds::sum_parts<T, kThreads><<<blocks, kThreads, 0, stream>>>(
        read<float>(weight_parts), write<T>(grad_weight), parts, columns);
    if (with_bias)
      mds::sum_parts<T, kThreads><<<blocks, kThreads, 0, stream>>>(
          read<float>(bias_parts), write<T>(grad_bias), parts, columns);
    check_launch();
  });
  return {grad_x, grad_weight, grad_bias};
}

Tensor softmax_forward(Tensor scores, std::optional<Tensor> mask, double scale, bool causal) {
  const torch::stable::accelerator::DeviceGuard guard(scores.get_device_index());
  Tensor result = torch::stable::empty_like(scores);
  if (scores.numel() == 0) return result;
  const int heads = scores.size(1), queries = scores.size(2), keys = scores.size(3);
  // Python has expanded the mask to the scores' shape; broadcast dimensions have stride 0.
  const mds::Mask hidden = mask ? mds::Mask{read<uint8_t>(*mask), mask->stride(0), mask->stride(1),
                                            mask->stride(2), mask->stride(3)}
                                : mds::Mask{nullptr, 0, 0, 0, 0};
  by_type(scores, [&](auto* kind) {
    using T = std::remove_pointer_t<decltype(kind)>;
    constexpr int kPack = kBytes / sizeof(T);
    const bool packed = keys % kPack == 0 && aligned({read<T>(scores)});
    auto kernel = packed ? mds::softmax_forward<T, kThreads, kPack>
                         : mds::softmax_forward<T, kThreads, 1>;
    kernel<<<scores.numel() / keys, kThreads, 0, stream_of(scores)>>>(
        read<T>(scores), hidden, write<T>(result), heads, queries, keys,
        static_cast<float>(scale), causal);
    check_launch();
  });
  return result;
}

Tensor softmax_backward(Tensor gradient, Tensor result, double scale) {
  const torch::stable::accelerator::DeviceGuard guard(result.get_device_index());
  Tensor grad_scores = torch::stable::empty_like(result);
  if (result.numel() == 0) return grad_scores;
  const int keys = result.size(3);
  by_type(result, [&](auto* kind) {
    using T = std::remove_pointer_t<decltype(kind)>;
    constexpr int kPack = kBytes / sizeof(T);
    const bool packed = keys % kPack == 0 && aligned({read<T>(gradient), read<T>(result)});
    auto kernel = packed ? mds::softmax_backward<T, kThreads, kPack>
                         : mds::softmax_backward<T, kThreads, 1>;
    kernel<<<result.numel() / keys, kThreads, 0, stream_of(result)>>>(
        read<T>(gradient), read<T>(result), write<T>(grad_scores), keys,
        static_cast<float>(scale));
    check_launch();
  });
  return grad_scores;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(mds_kernels, library) {
  library.def(
      "cuda_norm_forward(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, float eps, "
      "bool centred) -> (Tensor, Tensor, Tensor, Tensor)");
  library.def(
      "cuda_norm_backward(Tensor grad_y, Tensor? grad_total, Tensor total, Tensor weight, "
      "Tensor mean, Tensor rstd, bool centred, bool with_bias) -> (Tensor, Tensor, Tensor)");
  library.def("cuda_softmax_forward(Tensor scores, Tensor? mask, float scale, bool causal) -> Tensor");
  library.def("cuda_softmax_backward(Tensor gradient, Tensor result, float scale) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(mds_kernels, CUDA, library) {
  library.impl("cuda_norm_forward", TORCH_BOX(&norm_forward));
  library.impl("cuda_norm_backward", TORCH_BOX(&norm_backward));
  library.impl("cuda_softmax_forward", TORCH_BOX(&softmax_forward));
  library.impl("cuda_softmax_backward", TORCH_BOX(&softmax_backward));
}

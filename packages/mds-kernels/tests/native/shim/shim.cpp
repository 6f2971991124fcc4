// The kernel bodies as plain functions on host memory, and a few that are wrong on purpose.
#define MDS_HOST_SHIM 1
#define MDS_SHIM_MAIN 1
#include "norm.cuh"
#include "softmax.cuh"

namespace {

using BF16 = c10::BFloat16;
using F16 = c10::Half;
constexpr int kThreads = 256, kRows = 8;

uint64_t seed = 0;
std::string fault;

// Run ``body`` and keep what it complained of.
template <typename Body>
int guarded(Body&& body) {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    fault = error.what();
    return 1;
  }
}

template <typename T, int kPack>
int norm_forward(const T* x, const T* residual, const T* weight, const T* bias, T* y, T* total,
                 float* mean, float* rstd, int rows, int columns, float eps) {
  return guarded([&] {
    mds_shim::launch(rows, kThreads, seed, [&] {
      mds::norm_forward<T, kThreads, kPack>(x, residual, weight, bias, y, total, mean, rstd,
                                            columns, eps);
    });
  });
}

template <typename T, int kPack, int kFew>
int norm_backward(const T* grad, const T* grad_total, const T* total, const T* weight,
                  const float* mean, const float* rstd, T* grad_x, T* grad_weight, T* grad_bias,
                  float* weight_parts, float* bias_parts, int rows, int columns, int parts) {
  const int rows_each = (rows + parts - 1) / parts, width = mds::kWarp * kFew;
  return guarded([&] {
    mds_shim::launch(rows, kThreads, seed, [&] {
      mds::norm_backward_x<T, kThreads, kPack>(grad, grad_total, total, weight, mean, rstd, grad_x,
                                               columns);
    });
    mds_shim::launch(dim3((columns + width - 1) / width, parts), dim3(mds::kWarp, kRows), seed, [&] {
      mds::norm_backward_weight<T, kRows, kFew>(grad, total, mean, rstd, weight_parts, bias_parts,
                                                rows, columns, rows_each);
    });
    const dim3 blocks((columns + kThreads - 1) / kThreads);
    mds_shim::launch(blocks, kThreads, seed, [&] {
      mds::sum_parts<T, kThreads>(weight_parts, grad_weight, parts, columns);
    });
    if (bias_parts)
      mds_shim::launch(blocks, kThreads, seed, [&] {
        mds::sum_parts<T, kThreads>(bias_parts, grad_bias, parts, columns);
      });
  });
}

template <typename T, int kPack>
int softmax_forward(const T* scores, const uint8_t* mask, const int64_t* strides, T* result,
                    int heads, int queries, int keys, int64_t rows, float scale, bool causal) {
  const mds::Mask hidden{mask, strides[0], strides[1], strides[2], strides[3]};
  return guarded([&] {
    mds_shim::launch(rows, kThreads, seed, [&] {
      mds::softmax_forward<T, kThreads, kPack>(scores, hidden, result, heads, queries, keys, scale,
                                               causal);
    });
  });
}

template <typename T, int kPack>
int softmax_backward(const T* grad, const T* result, T* grad_scores, int keys, int64_t rows,
                     float scale) {
  return guarded([&] {
    mds_shim::launch(rows, kThreads, seed, [&] {
      mds::softmax_backward<T, kThreads, kPack>(grad, result, grad_scores, keys, scale);
    });
  });
}

}  // namespace

#define EXPORT(SUFFIX, T, PACK, FEW)                                                              \
  extern "C" int norm_forward_##SUFFIX(const T* x, const T* residual, const T* weight,            \
                                       const T* bias, T* y, T* total, float* mean, float* rstd,   \
                                       int rows, int columns, float eps) {                        \
    return norm_forward<T, PACK>(x, residual, weight, bias, y, total, mean, rstd, rows, columns,  \
                                 eps);                                                            \
  }                                                                                               \
  extern "C" int norm_backward_##SUFFIX(                                                          \
      const T* grad, const T* grad_total, const T* total, const T* weight, const float* mean,     \
      const float* rstd, T* grad_x, T* grad_weight, T* grad_bias, float* weight_parts,            \
      float* bias_parts, int rows, int columns, int parts) {                                      \
    return norm_backward<T, PACK, FEW>(grad, grad_total, total, weight, mean, rstd, grad_x,       \
                                       grad_weight, grad_bias, weight_parts, bias_parts, rows,    \
                                       columns, parts);                                           \
  }                                                                                               \
  extern "C" int softmax_forward_##SUFFIX(const T* scores, const uint8_t* mask,                   \
                                          const int64_t* strides, T* result, int heads,           \
                                          int queries, int keys, int64_t rows, float scale,       \
                                          bool causal) {                                          \
    return softmax_forward<T, PACK>(scores, mask, strides, result, heads, queries, keys, rows,    \
                                    scale, causal);                                               \
  }                                                                                               \
  extern "C" int softmax_backward_##SUFFIX(const T* grad, const T* result, T* grad_scores,        \
                                           int keys, int64_t rows, float scale) {                 \
    return softmax_backward<T, PACK>(grad, result, grad_scores, keys, rows, scale);               \
  }

EXPORT(float32_1, float, 1, 1)
EXPORT(float32_packed, float, 4, 4)
EXPORT(bfloat16_1, BF16, 1, 1)
EXPORT(bfloat16_packed, BF16, 8, 4)
EXPORT(float16_1, F16, 1, 1)
EXPORT(float16_packed, F16, 8, 4)

// Row ``row`` alone: the block has its index, as if all rows before it had been launched too.
extern "C" int norm_forward_of_row(const BF16* x, const BF16* weight, BF16* y, BF16* total,
                                   float* mean, float* rstd, int columns, unsigned row) {
  return guarded([&] {
    mds_shim::launch_one(row, kThreads, seed, [&] {
      mds::norm_forward<BF16, kThreads, 1>(x, x, weight, nullptr, y, total, mean, rstd, columns,
                                           1e-5f);
    });
  });
}

extern "C" int norm_backward_of_row(const BF16* grad, const BF16* total, const float* mean,
                                    const float* rstd, const BF16* weight, BF16* grad_x,
                                    int columns, unsigned row) {
  return guarded([&] {
    mds_shim::launch_one(row, kThreads, seed, [&] {
      mds::norm_backward_x<BF16, kThreads, 1>(grad, grad, total, weight, mean, rstd, grad_x,
                                              columns);
    });
  });
}

extern "C" int softmax_forward_of_row(const BF16* scores, BF16* result, int keys, unsigned row) {
  return guarded([&] {
    mds_shim::launch_one(row, kThreads, seed, [&] {
      mds::softmax_forward<BF16, kThreads, 1>(scores, mds::Mask{}, result, 1,
                                              static_cast<int>(row) + 1, keys, 1.f, false);
    });
  });
}

extern "C" int softmax_backward_of_row(const BF16* grad, const BF16* result, BF16* grad_scores,
                                       int keys, unsigned row) {
  return guarded([&] {
    mds_shim::launch_one(row, kThreads, seed, [&] {
      mds::softmax_backward<BF16, kThreads, 1>(grad, result, grad_scores, keys, 1.f);
    });
  });
}

extern "C" void set_seed(uint64_t value) { seed = value; }
extern "C" const char* last_fault() { return fault.c_str(); }

// ---- wrong on purpose: the shim must find these ------------------------------------------------

// The sum over a block without the barrier between writing and reading the warps' sums.
extern "C" float planted_race(const float* values) {
  float result = 0.f;
  mds_shim::launch(1, kThreads, seed, [&] {
    __shared__ float shared[kThreads / mds::kWarp];
    const float sum = mds::over_warp<mds::Sum>(values[threadIdx.x]);
    if (threadIdx.x % mds::kWarp == 0) shared[threadIdx.x / mds::kWarp] = sum;
    // __syncthreads() is missing here.
    if (threadIdx.x == 0) {
      for (float one : shared) result += one;
    }
  });
  return result;
}

// A second sum that starts before everybody has read the first.
extern "C" float planted_reuse(const float* values) {
  float result = 0.f;
  mds_shim::launch(1, kThreads, seed, [&] {
    __shared__ float shared[kThreads / mds::kWarp];
    float first = 0.f;
    for (int turn = 0; turn < 2; ++turn) {
      const float sum = mds::over_warp<mds::Sum>(values[threadIdx.x] * (turn + 1));
      if (threadIdx.x % mds::kWarp == 0) shared[threadIdx.x / mds::kWarp] = sum;
      __syncthreads();
      float total = 0.f;
      for (float one : shared) total += one;
      if (turn == 0) first = total;
      // __syncthreads() is missing here.
    }
    if (threadIdx.x == kThreads - 1) result = first;
  });
  return result;
}

// A barrier that half of the threads never reach.
extern "C" int planted_divergence() {
  return guarded([&] {
    mds_shim::launch(1, 64, seed, [&] {
      if (threadIdx.x < 32) __syncthreads();
    });
  });
}

// One value behind the end of the row.
extern "C" float planted_overrun(const float* values, int count) {
  float result = 0.f;
  mds_shim::launch(1, 32, seed, [&] {
    for (int i = threadIdx.x; i <= count; i += 32) result += values[i];
  });
  return result;
}

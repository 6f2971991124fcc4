// Norms with an optional residual add in front: bodies only, no launch syntax, no torch.
// Letters: n rows, h hidden (columns). A null ``mean`` makes an RMS norm of a layer norm.
#pragma once
#include "device_compat.cuh"

namespace mds {

// One block a row. What is stored in ``total`` is what is normed, so the backward pass sees the
// same numbers. Without ``residual`` the input is normed and ``total`` stays untouched.
template <typename T, int kThreads, int kPack>
__global__ void norm_forward(const T* __restrict__ x, const T* __restrict__ residual,
                             const T* __restrict__ weight, const T* __restrict__ bias,
                             T* __restrict__ y, T* total, float* __restrict__ mean,
                             float* __restrict__ rstd, int columns, float eps) {
  __shared__ float shared[kThreads / kWarp];
  const long long row = blockIdx.x, start = row * columns;
  const int first = threadIdx.x * kPack, step = kThreads * kPack;
  const T* normed = residual ? total : x;
  float sum = 0.f, squares = 0.f;
  for (int c = first; c < columns; c += step) {
    Pack<T, kPack> values = load<kPack>(x + start + c);
    if (residual) {
      const Pack<T, kPack> added = load<kPack>(residual + start + c);
#pragma unroll
      for (int i = 0; i < kPack; ++i)
        values.values[i] =
            from_float<T>(to_float(values.values[i]) + to_float(added.values[i]));
      store<kPack>(total + start + c, values);
    }
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      const float value = to_float(values.values[i]);
      sum += value;
      squares += value * value;
    }
  }
  float middle = 0.f;
  if (mean) {
    middle = over_block<Sum, kThreads>(sum, shared) / columns;
    squares = 0.f;  // around the mean: the difference of two large sums would lose digits
    for (int c = first; c < columns; c += step) {
      const Pack<T, kPack> values = load<kPack>(normed + start + c);
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        const float apart = to_float(values.values[i]) - middle;
        squares += apart * apart;
      }
    }
  }
  const float inverse = rsqrtf(over_block<Sum, kThreads>(squares, shared) / columns + eps);
  if (threadIdx.x == 0) {
    rstd[row] = inverse;
    if (mean) mean[row] = middle;
  }
  for (int c = first; c < columns; c += step) {
    Pack<T, kPack> values = load<kPack>(normed + start + c);
    const Pack<T, kPack> scale = load<kPack>(weight + c);
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      const float unit = (to_float(values.values[i]) - middle) * inverse;
      const float shift = bias ? to_float(bias[c + i]) : 0.f;
      values.values[i] = from_float<T>(unit * to_float(scale.values[i]) + shift);
    }
    store<kPack>(y + start + c, values);
  }
}

// One block a row. ``grad_total`` is the gradient that reached the sum by another way, or null.
template <typename T, int kThreads, int kPack>
__global__ void norm_backward_x(const T* __restrict__ grad, const T* __restrict__ grad_total,
                                const T* __restrict__ total, const T* __restrict__ weight,
                                const float* __restrict__ mean, const float* __restrict__ rstd,
                                T* __restrict__ grad_x, int columns) {
  __shared__ float shared[kThreads / kWarp];
  const long long row = blockIdx.x, start = row * columns;
  const int first = threadIdx.x * kPack, step = kThreads * kPack;
  const float middle = mean ? mean[row] : 0.f, inverse = rstd[row];
  float plain = 0.f, along = 0.f;
  for (int c = first; c < columns; c += step) {
    const Pack<T, kPack> g = load<kPack>(grad + start + c), v = load<kPack>(total + start + c);
    const Pack<T, kPack> w = load<kPack>(weight + c);
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      const float scaled = to_float(g.values[i]) * to_float(w.values[i]);
      plain += scaled;
      along += scaled * (to_float(v.values[i]) - middle) * inverse;
    }
  }
  along = over_block<Sum, kThreads>(along, shared) / columns;
  plain = mean ? over_block<Sum, kThreads>(plain, shared) / columns : 0.f;
  for (int c = first; c < columns; c += step) {
    const Pack<T, kPack> g = load<kPack>(grad + start + c), v = load<kPack>(total + start + c);
    const Pack<T, kPack> w = load<kPack>(weight + c);
    Pack<T, kPack> out;
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      const float scaled = to_float(g.values[i]) * to_float(w.values[i]);
      const float unit = (to_float(v.values[i]) - middle) * inverse;
      const float after = grad_total ? to_float(grad_total[start + c + i]) : 0.f;
      out.values[i] = from_float<T>((scaled - plain - unit * along) * inverse + after);
    }
    store<kPack>(grad_x + start + c, out);
  }
}

// Blocks of 32 x kRows threads: each sums 32 kPack columns over a share of the rows into its line
// of ``weight_parts`` and ``bias_parts`` [parts, h] (null without bias). No atomics: the sum is
// the same in every run.
template <typename T, int kRows, int kPack>
__global__ void norm_backward_weight(const T* __restrict__ grad, const T* __restrict__ total,
                                     const float* __restrict__ mean,
                                     const float* __restrict__ rstd,
                                     float* __restrict__ weight_parts,
                                     float* __restrict__ bias_parts, int rows, int columns,
                                     int rows_each) {
  __shared__ float weight_sums[kRows][kWarp * kPack + 1], bias_sums[kRows][kWarp * kPack + 1];
  const int c = (blockIdx.x * kWarp + threadIdx.x) * kPack;
  const int begin = blockIdx.y * rows_each;
  const int end = begin + rows_each < rows ? begin + rows_each : rows;
  float w[kPack] = {}, b[kPack] = {};
  if (c < columns)
    for (int row = begin + threadIdx.y; row < end; row += kRows) {
      const long long place = static_cast<long long>(row) * columns + c;
      const Pack<T, kPack> g = load<kPack>(grad + place), v = load<kPack>(total + place);
      const float middle = mean ? mean[row] : 0.f, inverse = rstd[row];
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        const float gradient = to_float(g.values[i]);
        w[i] += gradient * (to_float(v.values[i]) - middle) * inverse;
        b[i] += gradient;
      }
    }
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    weight_sums[threadIdx.y][threadIdx.x * kPack + i] = w[i];
    bias_sums[threadIdx.y][threadIdx.x * kPack + i] = b[i];
  }
  __syncthreads();
  if (threadIdx.y == 0 && c < columns) {
    const long long part = static_cast<long long>(blockIdx.y) * columns + c;
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      float weight_sum = 0.f, bias_sum = 0.f;
      for (int line = 0; line < kRows; ++line) {
        weight_sum += weight_sums[line][threadIdx.x * kPack + i];
        bias_sum += bias_sums[line][threadIdx.x * kPack + i];
      }
      weight_parts[part + i] = weight_sum;
      if (bias_parts) bias_parts[part + i] = bias_sum;
    }
  }
}

// One thread a column: the parts are added in their order.
template <typename T, int kThreads>
__global__ void sum_parts(const float* __restrict__ parts, T* __restrict__ sums, int num_parts,
                          int columns) {
  const int c = blockIdx.x * kThreads + threadIdx.x;
  if (c >= columns) return;
  float sum = 0.f;
  for (int part = 0; part < num_parts; ++part)
    sum += parts[static_cast<long long>(part) * columns + c];
  sums[c] = from_float<T>(sum);
}

}  // namespace mds

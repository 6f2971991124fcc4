// Masked softmax of attention scores: bodies only, no launch syntax, no torch, no limit of length.
// Letters: b micro batch, n heads, q query positions, k key positions.
#pragma once
#include <cstdint>

#include "device_compat.cuh"

namespace mds {

// Where a mask that is broadcast to [b, n, q, k] keeps its bytes; 1 hides a key.
struct Mask {
  const uint8_t* bytes;  // null: nothing is masked
  long long batch, head, query, key;
};

// One block a query. Each thread keeps the largest score it has seen and the sum relative to it.
template <typename T, int kThreads, int kPack>
__global__ void softmax_forward(const T* __restrict__ scores, Mask mask, T* __restrict__ result,
                                int heads, int queries, int keys, float scale, bool causal) {
  __shared__ float shared[kThreads / kWarp];
  const long long row = blockIdx.x, start = row * keys;
  const int query = static_cast<int>(row % queries);
  const int head = static_cast<int>(row / queries % heads);
  const long long batch = row / queries / heads;
  const uint8_t* hidden =
      mask.bytes ? mask.bytes + batch * mask.batch + head * mask.head + query * mask.query : nullptr;
  int visible = keys;
  if (causal) {
    // The last query sees all keys, so that fewer queries than keys (a cache) come out right.
    visible = query + keys - queries + 1;
    visible = visible < 0 ? 0 : visible;
  }
  const int first = threadIdx.x * kPack, step = kThreads * kPack;
  float largest = kLowest, total = 0.f;
  for (int k = first; k < visible; k += step) {
    const Pack<T, kPack> values = load<kPack>(scores + start + k);
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      if (k + i >= visible || (hidden && hidden[(k + i) * mask.key])) continue;
      const float score = to_float(values.values[i]) * scale;
      if (score > largest) {
        total *= expf(largest - score);
        largest = score;
      }
      total += expf(score - largest);
    }
  }
  const float highest = over_block<Largest, kThreads>(largest, shared);
  total = over_block<Sum, kThreads>(total * expf(largest - highest), shared);
  // A query that sees nothing has no share to give, so any finite factor will do.
  const float inverse = total > 0.f ? 1.f / total : 0.f;
  for (int k = first; k < keys; k += step) {
    const Pack<T, kPack> values = load<kPack>(scores + start + k);
    Pack<T, kPack> out;
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      const bool seen = k + i < visible && !(hidden && hidden[(k + i) * mask.key]);
      const float score = to_float(values.values[i]) * scale;
      out.values[i] = from_float<T>(seen ? expf(score - highest) * inverse : 0.f);
    }
    store<kPack>(result + start + k, out);
  }
}

// One block a query.
template <typename T, int kThreads, int kPack>
__global__ void softmax_backward(const T* __restrict__ grad, const T* __restrict__ result,
                                 T* __restrict__ grad_scores, int keys, float scale) {
  __shared__ float shared[kThreads / kWarp];
  const long long start = static_cast<long long>(blockIdx.x) * keys;
  const int first = threadIdx.x * kPack, step = kThreads * kPack;
  float inner = 0.f;
  for (int k = first; k < keys; k += step) {
    const Pack<T, kPack> g = load<kPack>(grad + start + k), p = load<kPack>(result + start + k);
#pragma unroll
    for (int i = 0; i < kPack; ++i) inner += to_float(g.values[i]) * to_float(p.values[i]);
  }
  inner = over_block<Sum, kThreads>(inner, shared);
  for (int k = first; k < keys; k += step) {
    const Pack<T, kPack> g = load<kPack>(grad + start + k), p = load<kPack>(result + start + k);
    Pack<T, kPack> out;
#pragma unroll
    for (int i = 0; i < kPack; ++i)
      out.values[i] =
          from_float<T>((to_float(g.values[i]) - inner) * to_float(p.values[i]) * scale);
    store<kPack>(grad_scores + start + k, out);
  }
}

}  // namespace mds
